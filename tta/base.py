"""The interface of every test-time adaptation method: a stream of samples in, probabilities out."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fedtta.tta.arrays import copied, is_module, is_tensor, namespace, on_cpu, untracked
from fedtta.tta.checks import Checks, finite_rows
from fedtta.tta.statistics import STATISTICS_NEEDS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedtta.tta.views import RandomViews

#: What an adapter may need from the training before it, the model or the machine.
NEEDS = STATISTICS_NEEDS | {
    "personal_head", "residual_head", "rotation_head", "gradients", "batchnorm", "nonnegative", "rates", "datastore",
    "candidates", "clients",
}  # fmt: skip

#: Constructor arguments that are no options: they come from the training or the network.
GIVEN = ("self", "model", "statistics", "rates", "datastore", "candidates", "clients", "fisher", "num_classes")


class _Options:
    """The options of an adapter class: name → (type, default), read from its constructor."""

    def __get__(self, instance: object, owner: type) -> dict[str, tuple[Any, Any]]:
        return dict(_options(owner.__init__))  # type: ignore[misc]


@functools.cache
def _options(constructor: Any) -> dict[str, tuple[Any, Any]]:
    given = dict.fromkeys(GIVEN)  # whose types may need torch
    plain = types.SimpleNamespace(__annotations__={**constructor.__annotations__, **given})
    hints = typing.get_type_hints(plain, constructor.__globals__)
    parameters = {name: one for name, one in inspect.signature(constructor).parameters.items() if name not in GIVEN}
    if bad := [name for name, one in parameters.items() if name not in hints or one.default is one.empty]:
        place = constructor.__qualname__
        raise TypeError(f"{place}: {', '.join(bad)}: an option is a named argument with a type and a default")
    return {name: (hints[name], one.default) for name, one in parameters.items()}


class Adapter(ABC):
    """A model that adapts while it predicts, in the order in which samples arrive.

    Labels are no argument anywhere here: a method cannot leak them. A subclass implements `_predict` and, when it has
    state, `_reset` and `_state`; where `_state` does not return the adapter's own tensors it implements `_load` as
    well. Everything public is defined here, so that all methods treat bad input alike.

    A network that takes and gives numpy arrays serves the methods of `fedtta.tta.registry.LIGHT`: then arrays stand
    wherever tensors are spoken of, and torch is not needed.

    Parameters
    ----------
    model : nn.Module
        The network; switched to evaluation mode. `predict` leaves its parameters as they are.
    record : bool
        Keep the per-sample report of everything since the last reset (False keeps none, for endless streams).
    """

    #: Name in settings and tables, the key in `fedtta.tta.registry.ADAPTERS`.
    name: ClassVar[str] = ""
    #: Title and venue; empty for a plain baseline.
    paper: ClassVar[str] = ""
    #: What changes at test time.
    adapts: ClassVar[str] = ""
    #: "sample": the result of a sample does not depend on how the stream is cut into batches. "batch": it does. Of a
    #: class it holds for the default options.
    per: Literal["sample", "batch"] = "sample"
    #: A subset of `NEEDS`.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: Whether it can take part in test-time rounds; see `fedtta.tta.collaborator`.
    collaborates: ClassVar[bool] = False
    #: Whether there is anything to mix in those rounds.
    shares: ClassVar[bool] = False
    #: Random views of images that the option `augment` takes, adjusted to a data set by `views.for_data`; None: none.
    views: ClassVar[type[RandomViews] | None] = None
    #: (option, value) with which `predict` takes a whole test set; None: it never does.
    whole_set: ClassVar[tuple[str, str] | None] = None
    #: Options by name: (type, default).
    options: ClassVar[_Options] = _Options()

    #: Names of state that cannot be negative: variances, second moments, counts. Not any name that ends so: a network
    #: may have a parameter called "position", which is "weight.position" here.
    _non_negative: ClassVar[re.Pattern[str]] = re.compile(
        r"position|seen|batches|(batches|largest|optimizer)\.step|optimizer\..*\.second|domain\..*\.variance"
        r"|.*\.(running_var|class_variance|num_batches_tracked)"
    )

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if unknown := sorted(cls.needs - NEEDS):
            raise ValueError(f"{cls.__name__} has unknown needs {unknown}; there are: {', '.join(sorted(NEEDS))}")

    def __init__(self, model: nn.Module, *, record: bool = True) -> None:
        self.model = model.eval()
        self._of_torch = is_module(model)
        self.record = record
        self._records: dict[str, list[Tensor | np.ndarray]] = {}

    def predict(self, x: Tensor) -> Tensor:
        """Adapt to `x` and predict it.

        Parameters
        ----------
        x : Tensor [B, ...]
            Samples in stream order, floating point, finite; images are in [0, 1]. B may be 0.

        Returns
        -------
        Tensor [B, K]
            Class probabilities; rows sum to one. Same dtype and device as the model's output.

        Raises
        ------
        TypeError
            `x` is not a floating-point tensor.
        ValueError
            A sample is not finite (the message names its index in the batch), or `x` has no batch dimension. The
            adapter's state is unchanged. Or `_predict` returned something other than a row for each sample.
        """
        fits = x.is_floating_point() if is_tensor(x) else isinstance(x, np.ndarray) and x.dtype.kind == "f"
        if not fits or is_tensor(x) != self._of_torch:
            kind = "tensor" if self._of_torch else "array"
            raise TypeError(f"predict needs a floating-point {kind}, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2:
            raise ValueError(f"predict needs a batch dimension: shape {tuple(x.shape)} has none")
        # What is learned consists of ordinary tensors, also if the caller is in inference mode.
        with untracked():
            checks = Checks()
            checks.require(finite_rows(x), lambda bad: f"samples {bad} of the batch hold values that are not finite")
            checks.read()
            found = self._predict(x.clone() if self._of_torch and x.is_inference() else x)
        classes = getattr(self.model, "num_classes", None)
        if found.ndim != 2 or len(found) != len(x) or classes not in (None, found.shape[1]):
            allowed = f"({len(x)}, {classes or 'K'})"
            raise ValueError(f"{self.name} predicted shape {tuple(found.shape)}; allowed is {allowed}")
        return found

    @property
    def takes_whole_set(self) -> bool:
        """Whether `predict` expects a whole test set and carries nothing over to the next call."""
        return self.whole_set is not None and getattr(self, self.whole_set[0]) == self.whole_set[1]

    def reset(self) -> None:
        """Discard everything learned from the stream, and the report."""
        self._records = {}
        with untracked():
            self._reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the adapter has learned from the stream, as tensors by name (copies)."""
        return {name: self._as_given(copied(value)) for name, value in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a `state_dict()` of the same method; the report starts empty.

        Raises
        ------
        ValueError
            Names are missing or unknown, or a value has the wrong shape or dtype, is not finite or is out of range;
            nothing is loaded then.
        """
        method, own = type(self).__name__, self._state()
        own = {name: self._as_given(value) for name, value in own.items()}
        if set(state) != set(own):
            raise ValueError(f"state of {method} has the names {sorted(own)}, got {sorted(state)}")
        for name, value in state.items():
            if not bool(namespace(value).isfinite(value).all()):
                raise ValueError(f"state {name!r} of {method} is not finite")
            like = own[name]
            if not self._varies(name) and (value.shape, value.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"state {name!r} of {method}: {value.dtype} of shape {tuple(value.shape)} does not fit "
                    f"{like.dtype} of shape {tuple(like.shape)}"
                )
            if self._non_negative.fullmatch(name) and bool((value < 0).any()):
                raise ValueError(f"state {name!r} of {method} holds negative values")
        with untracked():
            self._load(state)
        self._records = {}

    def report(self, *names: str) -> dict[str, Any]:
        """Return what happened to every sample since the last reset, in order: name → Tensor [n, ...], on the CPU.

        Given `names`, return these columns alone, those that there are: on a GPU, reading each waits for it.
        """
        return {name: on_cpu(self._as_given(column)) for name, column in self._columns(*names).items()}

    def take_report(self, *names: str) -> dict[str, Any]:
        """Return `report(*names)` and start a new one; what was learned stays. For endless streams."""
        report = self.report(*names)
        self._records = {}
        return report

    def _columns(self, *names: str) -> dict[str, Any]:
        """Return the report's columns [n, ...], where they are; `names` as of `report`."""
        chosen = {name: parts for name, parts in self._records.items() if not names or name in names}
        return {name: namespace(parts[0]).concat(parts, axis=0) for name, parts in chosen.items()}

    def _note(self, **columns: Tensor | np.ndarray) -> None:
        """Append per-sample values [B, ...] to the report; they are not copied, leave them alone.

        They stay where they are until the report is read: on a GPU, copying would wait for the whole batch.
        """
        if self.record:
            for name, value in columns.items():
                self._records.setdefault(name, []).append(value.detach() if is_tensor(value) else value)

    @classmethod
    def leaves_own_share_out(cls, options: Mapping[str, Any]) -> bool:
        """Tell whether, with these options, it takes a client's own share out of a mean over clients."""
        return False

    @abstractmethod
    def _predict(self, x: Tensor) -> Tensor:
        """Adapt to `x [B, ...]` (validated) and return probabilities [B, K]; commit state last."""

    def _reset(self) -> None:  # noqa: B027
        """Return to the state before the stream; a method without state has nothing to do."""

    def _state(self) -> dict[str, Any]:
        """Return the state by name, tensors or arrays; the set of names never changes over a stream."""
        return {}

    def _as_given(self, value: Any) -> Any:
        """Return a state's value as the network's outputs are: a tensor, or an array."""
        if not self._of_torch or is_tensor(value):
            return value
        import torch

        return torch.from_numpy(value)

    def _varies(self, name: str) -> bool:
        """Tell whether the shape of a state tensor changes over a stream."""
        return False

    def _load(self, state: dict[str, Tensor]) -> None:
        """Take over a state that fits `_state()`; by default copy it into those tensors."""
        for name, own in self._state().items():
            own.copy_(state[name])


def prefixed(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` under the names "<prefix>.<name>"."""
    return {f"{prefix}.{name}": value for name, value in values.items()}
