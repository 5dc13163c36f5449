"""A GPU that is not there: tensors that say they are on cuda:0, computed by the CPU.

    with PretendedGPU() as gpu:
        adapter.predict(images.to(gpu.device))
    print(gpu.waits)  # Counter: "tta/views.py:181" -> how often the host would have waited there

`Pretended` wraps a CPU tensor below autograd and the transforms of `torch.func`: every ATen operation on it arrives at
`PretendedGPU.run`, also within vmap and in backward passes. Refused is what CUDA refuses: operands on two devices,
`.numpy()`, a CPU generator for numbers drawn on the device, BatchNorm of channels-last images within vmap. Counted is
what makes the host wait: `.item()` and `bool()`, shapes that depend on values (`nonzero`, boolean indices), blocking
copies and those of pageable memory. A non-blocking copy to the host holds no values until something has waited, as it
may on a GPU.

To C++ a `Pretended` is on the CPU, because autograd has no thread for a device that is not there. What Python asks of
it (`.device`, `.is_cuda`, `.to`) is answered above, by a mode; threads that begin while the GPU is there enter it, too.

Limits: kernels, their numerics and their memory are the CPU's; gradients do not flow back through copies between
devices; a pinned buffer that is overwritten while its copy is under way is not noticed; streams run one after another.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu import streams
from tests.gpu.streams import Streams

ROOT = Path(__file__).resolve().parents[2]
OURS = (__file__, streams.__file__)
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten: Any = torch.ops.aten
SEQUENCES, NESTED = (tuple, list), (tuple, list, dict)  # `tuple | list` would be made again at each call

#: Operation → how often it waits for the device: its result's shape, or its error, depends on values.
WAITS: dict[Any, int] = {
    aten._local_scalar_dense: 1, aten.equal: 1, aten.nonzero: 1, aten.masked_select: 1, aten.bincount: 2,
    aten._unique2: 1, aten.unique_dim: 1, aten.unique_consecutive: 1, aten.multinomial: 2, aten.histc: 2,
    aten._linalg_check_errors: 1, aten._linalg_svd: 1, aten._linalg_eigh: 1, aten.linalg_eig: 1, aten.linalg_lstsq: 1,
}  # fmt: skip
#: Operations that take indices on the CPU, too, and copy them to the device.
WRITES = (aten.index_put, aten.index_put_, aten._index_put_impl_)
INDEXING = (aten.index, aten._unsafe_index, *WRITES)
BATCH_NORM = (torch.batch_norm, torch.nn.functional.batch_norm)
#: Operations beside pointwise ones that take a number on the CPU, a tensor without dimensions.
TAKE_NUMBERS = (*INDEXING, aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_, aten.where)


class Pretended(torch.Tensor):
    """A tensor on cuda:0 whose values are in `host`, a CPU tensor of equal shape and strides."""

    host: Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> Pretended:
        """Wrap a CPU tensor, which is not copied."""
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made: Pretended = torch.Tensor._make_wrapper_subclass(cls, host.shape, **layout)  # type: ignore[attr-defined]
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute where no mode does."""
        if PretendedGPU.current is None:
            raise RuntimeError(f"{func}: a tensor is on a pretended GPU that has gone")
        return PretendedGPU.current.run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy; of a parameter, a parameter."""
        if id(self) not in memo:
            copy = self.detach().clone()
            made = torch.nn.Parameter(copy) if isinstance(self, torch.nn.Parameter) else copy
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({tuple(self.host.shape)}, {self.host.dtype})"


class _Operations(TorchDispatchMode):
    """Send every ATen operation of the thread that enters it to a pretended GPU."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class _Questions(TorchFunctionMode):
    """Send every call of torch's Python functions in the thread that enters it to a pretended GPU."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.call(func, args, kwargs or {})


class PretendedGPU:
    """One pretended GPU, there while its context lasts.

    Attributes
    ----------
    device : torch.device
    waits : Counter
        "<file>:<line>" of the checkout → how often the host would have waited for the device there.
    streams : Streams
    """

    current: ClassVar[PretendedGPU | None] = None
    device = CUDA

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.streams = Streams(self._note_wait)
        self._thread = threading.local()  # home: where the function that is being called makes its tensors
        self._pinned: dict[int, Any] = {}  # address → storage
        self._late: list[tuple[Tensor, Tensor]] = []  # (where, values) of copies that have not arrived

    # What Python calls

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch's; answer itself what it would answer for the CPU."""
        if func in ANSWERS:
            return ANSWERS[func](self, func, *args, **kwargs)
        if func in BATCH_NORM and on_device(args[0]) and channels_last_within_vmap(args[0]):
            raise RuntimeError(f"cuda: NYI: Tensor.clone(memory_format) inside vmap, got ChannelsLast (at {site()})")
        home = None
        if kwargs.get("device") is not None:
            home = torch.device(kwargs["device"]).type
            kwargs = {**kwargs, "device": CUDA if home == "cuda" else kwargs["device"]}  # C++ would ask for the index
        elif any(on_device(value) for value in leaves((args, kwargs)) if isinstance(value, Tensor)):
            home = "cuda"
        return self._at(home, func, *args, **kwargs)

    def _at(self, home: str | None, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes its tensors on a device."""
        before, self._thread.home = getattr(self._thread, "home", None), home
        try:
            return func(*args, **kwargs)
        finally:
            self._thread.home = before

    def to(self, func: Any, value: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """Answer `value.to(...)`."""
        other = kwargs.pop("other", args[0] if args else None)
        if isinstance(other, Tensor):
            kwargs |= {"device": CUDA if on_device(other) else CPU, "dtype": other.dtype}
            args = args[1:]
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        there = on_device(value)
        how = {"dtype": dtype, "non_blocking": non_blocking, "memory_format": layout}
        how = {name: one for name, one in how.items() if one is not None}
        if device is None or (device.type == "cuda") == there:
            return self._at("cuda" if there else None, func, value, copy=copy, **how) if how or copy else value
        return self._at(device.type, aten._to_copy, value, device=CPU if there else CUDA, **how)

    def make(self, func: Any, data: Any, device: Any = None, **how: Any) -> Tensor:
        """Answer `torch.tensor(...)` and `torch.as_tensor(...)`: made on the CPU, and copied from there."""
        if on_device(data):
            return self.to(Tensor.to, data, data.device if device is None else device, **how)
        made = func(data, **how)
        return made if device is None else self.to(Tensor.to, made, device)

    def numpy(self, func: Any, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse `value.numpy()` of a tensor on the device."""
        if on_device(value) and not kwargs.get("force"):
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy (at {site()})")
        return func(self.to(Tensor.to, value.detach(), CPU) if on_device(value) else value, *args, **kwargs)

    # Operations

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one ATen operation, on whichever device it belongs to."""
        packet = func.overloadpacket
        if packet in (aten.is_pinned, aten._pin_memory):
            return self._pin(packet, args[0])
        given = leaves((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        there = [value for value in tensors if isinstance(value, Pretended)]
        on_gpu = self._belongs(tensors, there, kwargs.get("device"))
        if not (there or on_gpu or kwargs.get("pin_memory")):
            return func(*args, **kwargs)
        if packet is aten._to_copy:
            return self._moved(args[0], on_gpu, **kwargs)
        if packet is aten.copy_:
            return self._copied(*args, **kwargs)
        written = [args[i] for i in writes(func) if i < len(args)]
        self._check(func, args, given, tensors, written, on_gpu)
        self._count(func, args)
        result = self._compute(func, args, kwargs, there, on_gpu)
        self._order(there, written, result)
        return result

    def _order(self, reads: Any, writes: Any, results: Any = ()) -> None:
        """Note an operation in the current stream; refuse one that nothing orders."""
        if len(self.streams.made) == 1:  # memory does not matter
            self.streams.note((), (), ())
            return
        read, written, made = (
            {value.host.untyped_storage().data_ptr() for value in leaves(values) if isinstance(value, Pretended)}
            for values in (reads, writes, results)
        )
        if wrong := self.streams.note(read, written, made - read - written):
            self._refuse(wrong)

    def _belongs(self, tensors: list[Tensor], there: list[Pretended], asked: torch.device | None) -> bool:
        """Tell whether the result of an operation is on the device.

        C++ asks for the CPU where it asks for the device of an operand: only the function that Python called knows.
        """
        home = getattr(self._thread, "home", None)
        if asked is not None and (asked.type == "cuda" or home == "cpu"):
            return asked.type == "cuda"
        return bool(there) or (home == "cuda" and not tensors)

    def _compute(self, func: Any, args: Any, kwargs: Any, there: list[Pretended], on_gpu: bool) -> Any:
        """Run an operation on the host's values; a result that is an argument stays that argument."""
        known = {id(value.host): value for value in there}
        plain_args, plain = mapped(_host, args), mapped(_host, kwargs)
        pin = plain.pop("pin_memory", None)
        if plain.get("device") is not None:
            plain["device"] = CPU
        result = func(*plain_args, **plain)
        for value in there:
            if value.shape != value.host.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor in place")
        if pin and not on_gpu:
            self._remember_pinned(result)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else Pretended(value)

        return mapped(wrapped, result) if on_gpu else result

    def _check(
        self, func: Any, args: Any, given: list[Any], tensors: list[Tensor], written: list[Any], on_gpu: bool
    ) -> None:
        """Refuse what CUDA refuses."""
        host = [value for value in tensors if not isinstance(value, Pretended)]
        if on_gpu:
            for value in given:
                if isinstance(value, torch.Generator) and value.device.type == "cpu":
                    self._refuse(f"{func}: expected a 'cuda' device type for generator but found 'cpu'")
        if len(host) in (0, len(tensors)):
            return
        wrong = [value for value in host if value.ndim or any(value is one for one in written)]
        packet = func.overloadpacket
        if packet in INDEXING and isinstance(args[0], Pretended):
            wrong = [value for value in wrong if not any(value is one for one in args[1])]
        numbers = packet in TAKE_NUMBERS or torch.Tag.pointwise in func.tags
        if wrong or not numbers:
            shapes = [tuple(value.shape) for value in wrong or host]
            self._refuse(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu: {shapes}")

    def _refuse(self, why: str) -> None:
        raise RuntimeError(f"{why} (at {site()})")

    def _count(self, func: Any, args: Any) -> None:
        """Count the waits of an operation that is no copy."""
        packet = func.overloadpacket
        self._wait(WAITS.get(packet, 0))
        if packet is aten.repeat_interleave and func._overloadname != "self_int":
            self._wait()
        if packet in INDEXING:
            fills = packet in WRITES and args[2].numel() == 1  # masked_fill then
            for index in (one for one in args[1] if one is not None):
                masks = index.dtype in (torch.bool, torch.uint8)
                self._wait(int(not isinstance(index, Pretended)) + int(masks and not fills))

    def _wait(self, times: int = 1) -> None:
        """Note that the host waits; everything under way has arrived then."""
        if times:
            self.streams.host_waits(self.streams.current)
            self.waits[site()] += times - 1

    def _note_wait(self) -> None:
        self.waits[site()] += 1
        late, self._late = self._late, []
        for into, values in late:
            into.copy_(values)

    # Copies

    def _moved(self, value: Tensor, to_device: bool, **how: Any) -> Tensor:
        """Return a copy of a tensor with another device, type or layout (`aten::_to_copy`)."""
        non_blocking, pin = how.pop("non_blocking", False), how.pop("pin_memory", False)
        how.pop("device", None)
        copy, was_there = aten._to_copy(_host(value), **how), isinstance(value, Pretended)
        if to_device:
            moved = Pretended(copy)
            self._order([value], [], [moved])
            if not was_there:
                self._send(value, non_blocking)
            return moved
        self._order([value], [])
        if pin or (non_blocking and was_there):  # what torch copies to without blocking is pinned
            self._remember_pinned(copy)
        if was_there:
            self._fetch(copy, non_blocking)
        return copy

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy values into a tensor (`aten::copy_`)."""
        into, to_device, from_device = _host(target), isinstance(target, Pretended), isinstance(source, Pretended)
        into.copy_(_host(source))
        self._order([source], [target])
        if to_device and not from_device:
            self._send(source, non_blocking)
        if from_device and not to_device:
            self._fetch(into, non_blocking)
        return target

    def _send(self, source: Tensor, non_blocking: bool) -> None:
        """Count a copy from the host, unless it is from pinned memory and does not block."""
        if not (non_blocking and source.untyped_storage().data_ptr() in self._pinned):
            self._wait()

    def _fetch(self, into: Tensor, non_blocking: bool) -> None:
        """Count a copy to the host; one that does not block arrives when something waits."""
        if not non_blocking:
            self._wait()
            return
        self._late.append((into, into.clone()))
        into.fill_(torch.nan if into.is_floating_point() else 1)

    def _pin(self, packet: Any, value: Tensor) -> Any:
        """Tell whether a tensor is in pinned memory, or return a copy there."""
        if packet is aten.is_pinned:
            return value.untyped_storage().data_ptr() in self._pinned if not isinstance(value, Pretended) else False
        if isinstance(value, Pretended):
            self._refuse("cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned")
        return self._remember_pinned(value.clone())

    def _remember_pinned(self, value: Tensor) -> Tensor:
        """Take a tensor's memory as pinned for as long as the GPU is there."""
        self._pinned[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return value

    # Being there

    def __enter__(self) -> PretendedGPU:
        """Let torch find the GPU, in this thread and in those that begin while it is there."""
        if PretendedGPU.current is not None:
            raise RuntimeError("there is a pretended GPU already")
        self._stack = ExitStack()
        enter = self._stack.enter_context
        for name, value in self._module().items():
            enter(mock.patch.object(torch.cuda, name, value))
        autocast: Any = torch.autocast
        enter(mock.patch.object(torch, "autocast", lambda device_type, *rest, **how: autocast("cpu", *rest, **how)))
        enter(mock.patch.object(threading.Thread, "run", self._in_thread(threading.Thread.run)))
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data = ` would lose what is wrapped
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        PretendedGPU.current = self
        self._stack.callback(setattr, PretendedGPU, "current", None)
        enter(_Operations(self))
        enter(_Questions(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _in_thread(self, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Return `Thread.run` under the modes."""

        def pretending(thread: threading.Thread) -> None:
            with _Operations(self), _Questions(self):
                run(thread)

        return pretending

    def _module(self) -> dict[str, Any]:
        """Return what `torch.cuda` says while the GPU is there."""
        state = torch.zeros(16, dtype=torch.uint8)
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: nullcontext(),
            "get_device_name": lambda device=None: "pretended",
            "get_device_capability": lambda device=None: (9, 0),
            "is_bf16_supported": lambda *_, **__: True,
            "mem_get_info": lambda device=None: (6 << 30, 8 << 30),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "get_rng_state": lambda device=None: state.clone(),
            "set_rng_state": lambda new, device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            **self.streams.module(),
        }


#: Function of torch's → what answers a call of it: (gpu, function, arguments...).
ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.to: PretendedGPU.to,
    Tensor.type_as: PretendedGPU.to,
    Tensor.cpu: lambda gpu, func, value, **how: gpu.to(Tensor.to, value, CPU, **how),
    Tensor.cuda: lambda gpu, func, value, *_, **how: gpu.to(Tensor.to, value, CUDA, **how),
    Tensor.numpy: PretendedGPU.numpy,
    Tensor.__array__: PretendedGPU.numpy,
    Tensor.tolist: lambda gpu, func, value: func(gpu.to(Tensor.to, value, CPU)),
    Tensor.new_tensor: lambda gpu, func, value, data, **how: gpu.make(
        torch.tensor, data, **{"dtype": value.dtype, "device": CUDA if on_device(value) else CPU, **how}
    ),
    torch.tensor: PretendedGPU.make,
    torch.as_tensor: PretendedGPU.make,
    Tensor.device.__get__: lambda gpu, func, value, *_: CUDA if on_device(value) else func(value),  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda gpu, func, value, *_: on_device(value),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda gpu, func, value, *_: not on_device(value),  # type: ignore[attr-defined]
}


def on_device(value: object) -> bool:
    """Tell whether a value is a tensor on the device, also within transforms of `torch.func`."""
    functorch = torch._C._functorch
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return isinstance(value, Pretended)


def channels_last_within_vmap(value: Tensor) -> bool:
    """Tell whether images are in channels-last format within `vmap`, which cuDNN's BatchNorm refuses."""
    functorch, inner, batched = torch._C._functorch, value, False
    while functorch.is_functorch_wrapped_tensor(inner):
        batched, inner = batched or functorch.is_batchedtensor(inner), functorch.get_unwrapped(inner)
    return batched and value.dim() == 4 and value.stride(1) < value.stride(3)


@functools.cache
def writes(func: Any) -> tuple[int, ...]:
    """Return which arguments an ATen operation writes in place."""
    return tuple(i for i, one in enumerate(func._schema.arguments) if one.is_write)


def leaves(values: Any) -> list[Any]:
    """Return what is in nested tuples, lists and dicts."""
    found: list[Any] = []
    _gather(values, found)
    return found


def _gather(values: Any, found: list[Any]) -> None:
    if isinstance(values, SEQUENCES):
        for value in values:
            if isinstance(value, NESTED):
                _gather(value, found)
            else:
                found.append(value)
    elif isinstance(values, dict):
        _gather(list(values.values()), found)
    else:
        found.append(values)


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested tuples, lists and dicts with `function` of what is in them."""
    if isinstance(values, SEQUENCES):
        return type(values)(
            [mapped(function, value) if isinstance(value, NESTED) else function(value) for value in values]
        )
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    return function(values)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, Pretended) else value


def site() -> str:
    """Return "<file>:<line>" of the innermost call in the checkout."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/") and path not in OURS and "/.venv/" not in path:
            return f"{path[len(str(ROOT)) + 1 :].removeprefix('fedtta/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
