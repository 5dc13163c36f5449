"""The contract of every test-time adaptation method: a stream of samples in, probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn


class Adapter(ABC):
    """A model that adapts while it predicts, in the order in which samples arrive.

    Labels are no argument anywhere here: a method cannot leak them. A subclass implements `_predict` and, when it has
    state, `_reset`, `_state` and `_load`; everything public is here, so that all methods treat bad input alike.

    Parameters
    ----------
    model : nn.Module
        The network; switched to evaluation mode. Its parameters are never left changed by `predict` unless the method
        is defined that way, in which case `reset` restores them.
    record : bool
        Keep the per-sample report of everything since the last reset (False keeps none, for endless streams).
    """

    #: "sample": the result of a sample does not depend on how the stream is cut into batches. "batch": it does.
    per: ClassVar[Literal["sample", "batch"]] = "sample"

    def __init__(self, model: nn.Module, *, record: bool = True) -> None:
        self.model = model.eval()
        self.record = record
        self._records: dict[str, list[Tensor | np.ndarray]] = {}

    @torch.no_grad()
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
            adapter's state is unchanged.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"predict needs a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2:
            raise ValueError(f"predict needs a batch dimension: shape {tuple(x.shape)} has none")
        finite = torch.isfinite(x.flatten(1)).all(1)  # [B]
        if not bool(finite.all()):
            bad = torch.nonzero(~finite).flatten().tolist()
            raise ValueError(f"samples {bad} of the batch hold values that are not finite")
        return self._predict(x)

    @property
    def takes_whole_set(self) -> bool:
        """Tell whether what `predict` gets is meant to be a whole test set, which nothing outlives."""
        return False

    def reset(self) -> None:
        """Forget everything learned from the stream, and the report."""
        self._records = {}
        self._reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the adapter has learned from the stream, as tensors by name (copies)."""
        return {name: value.detach().clone() for name, value in self._state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a `state_dict()` of the same method; the report starts empty.

        Raises
        ------
        ValueError
            Names are missing or unknown, or a value has the wrong shape or is not finite; nothing is loaded then.
        """
        expected = set(self._state())
        if set(state) != expected:
            raise ValueError(f"state of {type(self).__name__} has the names {sorted(expected)}, got {sorted(state)}")
        for name, value in state.items():
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"state {name!r} of {type(self).__name__} is not finite")
        self._load(state)
        self._records = {}

    def report(self) -> dict[str, Any]:
        """Return what happened to every sample since the last reset, in order: name → Tensor [n, ...]."""
        return {name: torch.cat([torch.as_tensor(part) for part in parts]) for name, parts in self._records.items()}

    def take_report(self) -> dict[str, Any]:
        """Return `report()` and start a new one; what was learned stays. For streams without end."""
        taken = self.report()
        self._records = {}
        return taken

    def _note(self, **columns: Tensor | np.ndarray) -> None:
        """Append per-sample values [B, ...] to the report, on the CPU; arrays are not copied, leave them alone."""
        if self.record:
            for name, value in columns.items():
                kept = value.detach().cpu() if isinstance(value, Tensor) else value
                self._records.setdefault(name, []).append(kept)

    @abstractmethod
    def _predict(self, x: Tensor) -> Tensor:
        """Adapt to `x [B, ...]` (validated) and return probabilities [B, K]; commit state last."""

    def _reset(self) -> None:  # noqa: B027
        """Forget the stream; a method without state has nothing to do."""

    def _state(self) -> dict[str, Tensor]:
        """Return the state by name; the set of names never changes over a stream."""
        return {}

    def _load(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Take over a state whose names and finiteness have been checked; check shapes, then commit."""
