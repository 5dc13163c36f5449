"""What the agent answers with, in plain values: torch is not needed to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray


class NoModel(RuntimeError):
    """No model has come from training yet, so nothing can be predicted."""


class Busy(RuntimeError):
    """So many requests wait that no other is taken."""


@dataclass(frozen=True)
class Prediction:
    """The answer to one request.

    Parameters
    ----------
    probabilities : float32 [B, K]
        Class probabilities; rows sum to one.
    weights : float32 [B] or None
        e in [0, 1], the weight of the global head; None for adapters that do not mix the heads.
    version : str
        "<run>/<training>/<round>/<digest>" of the model that answered.
    adapted : bool
        False: the guard holds, and these are the unadapted model's probabilities.
    position : int
        Samples answered before these since the model came or the adapter was reset.
    """

    probabilities: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    version: str
    adapted: bool
    position: int

    def split(self, sizes: Sequence[int]) -> list[Prediction]:
        """Return the answers to the requests of `sizes` samples each that were joined into this one."""
        ends = np.cumsum(sizes)
        parts = []
        for begin, end in zip(ends - np.asarray(sizes), ends, strict=True):
            weights = None if self.weights is None else self.weights[begin:end]
            rows = self.probabilities[begin:end]
            parts.append(replace(self, probabilities=rows, weights=weights, position=self.position + int(begin)))
        return parts


@dataclass(frozen=True)
class Saved:
    """A snapshot of what the adapter has learned.

    Parameters
    ----------
    snapshot : str
        Its name.
    version : str
        Of the model that it belongs to.
    samples : int
        Samples answered until then.
    """

    snapshot: str
    version: str
    samples: int


@dataclass(frozen=True)
class Status:
    """How the agent is; the fields are those of `StatusReply` in agent.proto, without the queue's.

    Parameters
    ----------
    version, adapter : str
        Model version (empty: none yet) and adapter with its options.
    classes : tuple of str
        Class names in the order of the probabilities' columns; empty before a model has come.
    samples, unsaved_samples : int
        Answered since the model came or the adapter was reset; of these, those that a kill -9 now would forget.
    holding : bool
        Whether the guard answers with the unadapted model.
    guard_events : dict
        Kind of collapse or degenerate input → how often the guard has acted on it.
    snapshots : list of str
        Names, oldest first.
    notes : list of str
        What happened that somebody should know, oldest first: history reset, files refused, saves that failed.
    uptime : float
        Seconds.
    training : str
        The phase that runs now; empty: none.
    shape : tuple of int
        C, H, W of the images that the model takes; empty before a model has come.
    """

    version: str = ""
    adapter: str = ""
    classes: tuple[str, ...] = ()
    samples: int = 0
    unsaved_samples: int = 0
    holding: bool = False
    guard_events: dict[str, int] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uptime: float = 0.0
    training: str = ""
    shape: tuple[int, ...] = ()
