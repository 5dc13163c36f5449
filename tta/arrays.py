"""Float64 array operations on network outputs: numpy on the CPU, torch on an accelerator.

After the network a method handles B x K numbers. On the CPU the cost of such small operations is the overhead of each
call, which is several times lower in numpy than in torch; on an accelerator the numbers stay where they are. Everything
here is float64 whatever the model's dtype; the result is cast to the model's dtype at the very end.

A network may give numpy arrays in place of tensors, as exported ones do. Nothing here imports torch: a process that has
not imported it has no tensors.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: A float64 numpy array (CPU) or torch tensor (elsewhere).
Array = Any


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: object) -> bool:
    """Return whether a network is one of torch, whose outputs are tensors, or stands for one as its `network`."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(getattr(value, "network", value), torch.nn.Module)


def untracked() -> AbstractContextManager[object]:
    """Return a context whose tensors are ordinary ones without gradients, also for a caller in inference mode."""
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def namespace(array: Array) -> ModuleType:
    """Return the array API namespace that works on `array`."""
    if isinstance(array, np.ndarray):
        return np
    import array_api_compat.torch as torch_namespace

    return torch_namespace


def largest(array: Array, axis: int = 0) -> Array:
    """Return the maximum along `axis`; the method, because numpy's function costs twice as much on few numbers."""
    return array.max(axis) if isinstance(array, np.ndarray) else array.amax(axis)


def from_tensor(tensor: Tensor | np.ndarray) -> Array:
    """Return `tensor` as a float64 array; float64 on the CPU is not copied."""
    if isinstance(tensor, np.ndarray):
        return np.asarray(tensor, dtype=np.float64)
    tensor = tensor.detach()
    if not tensor.is_cpu:
        return tensor.double()
    if tensor.itemsize < 4:  # float16 and bfloat16; numpy has no bfloat16
        tensor = tensor.float()
    return np.asarray(tensor.numpy(), dtype=np.float64)


def to_tensor(array: Array, like: Tensor | np.ndarray) -> Tensor:
    """Return `array` as `like` is: a contiguous tensor or numpy array of that dtype."""
    if isinstance(like, np.ndarray):
        return np.ascontiguousarray(array, like.dtype)  # type: ignore[return-value]
    import torch

    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return tensor.to(like.dtype).contiguous()


def double(values: Array) -> Array:
    """Return float64 values where they are."""
    return values.astype(np.float64) if isinstance(values, np.ndarray) else values.detach().double()


def copied(values: Array) -> Array:
    """Return a copy of the values, without gradients."""
    return values.copy() if isinstance(values, np.ndarray) else values.detach().clone()


def to_host(array: Array) -> np.ndarray:
    """Return a copy of `array` as numpy; bfloat16, which numpy does not have, as float32."""
    if not is_tensor(array):
        return np.array(array)
    import torch

    host = array.detach().cpu()
    return (host.float() if host.dtype == torch.bfloat16 else host).numpy().copy()


def on_cpu(values: Array) -> Array:
    """Return a tensor on the CPU; a numpy array as it is."""
    return values.cpu() if is_tensor(values) else values


def softmax_of(logits: Array) -> Array:
    """Return the softmax of each row of logits [B, K], in their dtype."""
    if isinstance(logits, np.ndarray):
        return to_tensor(softmax(from_tensor(logits).T).T, like=logits)
    return logits.softmax(1)


def log_softmax_of(logits: Array) -> Array:
    """Return the logarithm of the softmax of each row of logits [B, K], in their dtype."""
    if isinstance(logits, np.ndarray):
        shifted = logits - logits.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return logits.log_softmax(1)


def entropy_of_logits(logits: Array) -> Array:
    """Return the entropy, in nats, of softmax(logits [B, K]) for every sample [B]; p = 0 has a finite gradient."""
    log_p = log_softmax_of(logits)
    return -(namespace(log_p).exp(log_p) * log_p).sum(1)


def class_major(first: Tensor, second: Tensor) -> Array:
    """Stack the logits [B, K] of two heads as [K, 2, B].

    With the classes first, sums over them run along the outer axis, which is the fast way for K much below B.
    """
    one, two = from_tensor(first), from_tensor(second)
    samples, classes = one.shape
    shape = classes, 2, samples
    stacked = np.empty(shape) if isinstance(one, np.ndarray) else one.new_empty(shape)
    stacked[:, 0], stacked[:, 1] = one.T, two.T
    return stacked


def softmax_entropy(logits: Array) -> tuple[Array, Array]:
    """Return the softmax over the first axis, and its entropy in nats.

    Parameters
    ----------
    logits : Array [K, ...]
        Finite; any size of number (the largest is subtracted first).

    Returns
    -------
    probabilities : Array [K, ...]
    entropy : Array [...]
        In [0, ln K], never negative; 0 ln 0 is 0.
    """
    xp = namespace(logits)
    shifted = logits - largest(logits)
    mass = xp.exp(shifted)
    total = mass.sum(0)
    probabilities = mass / total
    # ln p = shifted - ln total, so that a probability of zero meets a finite logarithm: 0 ln 0 = 0 by itself.
    return probabilities, xp.log(total) - (probabilities * shifted).sum(0)


def softmax(logits: Array) -> Array:
    """Return the softmax of `logits` [K, ...] over the first axis."""
    mass = namespace(logits).exp(logits - largest(logits))
    return mass / mass.sum(0)


class Constants:
    """Named float64 arrays that an adapter needs at every step, kept once per device.

    Parameters
    ----------
    **values : np.ndarray
        Kept as they are for the CPU, copied to an accelerator when it first asks.
    """

    def __init__(self, **values: np.ndarray) -> None:
        self._host = values
        self._elsewhere: dict[torch.device, dict[str, Array]] = {}

    def on(self, like: Array) -> dict[str, Array]:
        """Return the arrays by name, where `like` lives."""
        if isinstance(like, np.ndarray):
            return self._host
        if like.device not in self._elsewhere:
            self._elsewhere[like.device] = {name: to_device_of(value, like) for name, value in self._host.items()}
        return self._elsewhere[like.device]


def to_device_of(value: Array, like: Array) -> Array:
    """Return a numpy array or tensor where `like` lives."""
    if isinstance(like, np.ndarray):
        return to_host(value) if is_tensor(value) else value
    import torch

    from fedtta.models.arrays import to_device

    return to_device(value if is_tensor(value) else torch.from_numpy(value), like.device)
