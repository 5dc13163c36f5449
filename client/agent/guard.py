"""The guard: detects a collapsing adapter or degenerate input, and decides when to predict with the unadapted model.

For each batch the guard compares the predictions of the unadapted model (the global head of the network as training
left it) with those of the adapter, before either is returned. It looks at a sliding window of samples.

Collapse: the adapter is rolled back, and the batch is predicted unadapted.

- `non-finite`: a probability is not finite, or the adapter failed on valid input;
- `collapse`: one class has nearly all adapted predictions, and at most half of that share of the unadapted ones;
- `disagreement`: the entropy is close to zero, half of the predictions differ from the unadapted ones, and half of
  them exceed the usual shares of their classes.

Degenerate input, from which nothing can be learned: adapted predictions that differ from the unadapted ones are
returned as long as they are at most `margin` of a full window; beyond that the guard holds the adapter.

- `one-class`: nearly all unadapted predictions are of one class;
- `constant`: images without variance, or repetitions of the same image;
- `noise`: the unadapted model's entropy is near its maximum;
- `small-batch`: the batch is too small for a method defined per batch.

Guarantee: on a stream that is degenerate throughout, at most `margin` of any `window` consecutive predictions differ
from the unadapted model's, so the accuracy is at most `margin` below its accuracy. A degenerate part of a longer stream
is detected when it fills about `one_class` of the window. While the guard holds, the adapter does not run; after
`retry` samples it is tried again, from its last good state.

A skewed class distribution that is usual for a client is not degenerate: see `fedtta.client.serving.Baseline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedtta.client.config import Limits
from fedtta.client.served import Baseline, entropy

COLLAPSES = ("non-finite", "collapse", "disagreement")
DEGENERATE = ("one-class", "constant", "noise", "small-batch")
KINDS = (*COLLAPSES, *DEGENERATE)
HALF = 0.5  # a class with a larger usual share is never suspicious
#: Columns of the window, which has one row per sample.
UNADAPTED, ADAPTED, UNADAPTED_ENTROPY, ADAPTED_ENTROPY, FLAT, DIFFERS = range(6)
NOT_ADAPTED = -1.0  # in the column ADAPTED: predicted unadapted


@dataclass(frozen=True)
class Verdict:
    """The guard's decision on a batch.

    Parameters
    ----------
    action : "go", "hold" or "roll back"
        "go": return the adapted predictions. Otherwise return the unadapted ones, and undo this batch ("hold") or go
        back to the last good state ("roll back").
    kind : str
        One of `KINDS`; empty for "go".
    healthy : bool
        Whether the adapter's state is worth a roll-back to it.
    """

    action: Literal["go", "hold", "roll back"]
    kind: str = ""
    healthy: bool = False


class Guard:
    """Judge batches in order of arrival (see the module).

    Parameters
    ----------
    limits : Limits
    baseline : Baseline
        For K classes.
    per_batch : bool
        Whether the adapter's results depend on how the stream is cut into batches.

    Attributes
    ----------
    events : dict
        Kind → number of times that the guard has begun to act on it.
    """

    def __init__(self, limits: Limits, baseline: Baseline, per_batch: bool) -> None:
        self.limits, self.baseline, self.per_batch = limits, baseline, per_batch
        self.classes = len(baseline.shares)
        self.events = dict.fromkeys(KINDS, 0)
        self.restart()

    def restart(self) -> None:
        """Clear the window, as for a new model; the counts of events stay."""
        self._window: NDArray[np.float64] = np.empty((0, 6))
        self._held = 0  # samples for which the guard goes on holding
        self._since = self.limits.retry  # samples since the last roll-back
        self._kind = ""  # what it currently acts on

    @property
    def runs_adapter(self) -> bool:
        """Return whether the adapter is to predict the next batch."""
        return self._held <= 0

    @property
    def holding(self) -> bool:
        """Return whether predictions are the unadapted model's."""
        return not self.runs_adapter or self._kind in DEGENERATE

    @property
    def drift(self) -> float | None:
        """Return how far the classes of the window are from the usual ones; any thread may ask.

        The total variation distance between the classes that the unadapted model predicts for the window and the
        baseline's shares, normalized; None before the window is full, and without a baseline.
        """
        window = self._window
        if len(window) < self.limits.window or not self.baseline.known:
            return None
        usual = self.baseline.shares / self.baseline.shares.sum()
        return min(1.0, float(np.abs(self._shares(window[:, UNADAPTED]) - usual).sum()) / 2)

    def judge(
        self, unadapted: NDArray[Any], adapted: NDArray[Any] | None, flat: NDArray[np.bool_] | None = None
    ) -> Verdict:
        """Judge a batch.

        Parameters
        ----------
        unadapted : [B, K]
            Probabilities, finite, B at least 1.
        adapted : [B, K] or None
            The adapter's; None if it did not run (see `runs_adapter`), NaN if it failed.
        flat : bool [B], optional
            Images without variance, and repetitions of the previous image.
        """
        rows = self._rows(unadapted, adapted, flat)
        window = np.concatenate((self._window, rows))[-max(self.limits.window, len(rows)) :]
        self._since += len(rows)
        if adapted is None:
            self._held -= len(rows)
            self._window = window
            return Verdict("hold", self._kind)
        kind = "" if np.isfinite(adapted).all() else "non-finite"
        if kind := kind or self._collapse(window):
            return self._roll_back(kind, window, len(rows))
        if (kind := self._degenerate(window, len(rows))) and window[:, DIFFERS].sum() > self._allowed(len(window)):
            self._count(kind)
            self._held = 0 if kind == "small-batch" else self.limits.retry
            _mark_unadapted(window[-len(rows) :])
            self._window = window
            return Verdict("hold", kind)
        self._kind, self._window = "", window
        return Verdict("go", healthy=not kind)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state that a restart needs, as arrays by name; counts of events are left out."""
        kind = KINDS.index(self._kind) if self._kind else -1
        numbers = np.array([self._held, self._since, kind], np.int64)
        return {"window": self._window.copy(), "numbers": numbers}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a `state()`; ValueError if it does not fit, and nothing has changed then."""
        window, numbers = state.get("window"), state.get("numbers")
        if window is None or numbers is None or window.shape[1:] != (6,) or numbers.shape != (3,):
            raise ValueError("the state of the guard does not fit")
        predicted = window[:, [UNADAPTED, ADAPTED]]
        known = np.isfinite(window).all() and (predicted >= [0, NOT_ADAPTED]).all() and (predicted < self.classes).all()
        if not (known and numbers.dtype.kind == "i" and -1 <= numbers[2] < len(KINDS)):
            raise ValueError("the state of the guard holds values out of range")
        self._window = window.astype(np.float64)
        self._held, self._since = int(numbers[0]), int(numbers[1])
        self._kind = KINDS[int(numbers[2])] if numbers[2] >= 0 else ""

    def _rows(
        self, unadapted: NDArray[Any], adapted: NDArray[Any] | None, flat: NDArray[np.bool_] | None
    ) -> NDArray[np.float64]:
        """Return the batch as rows [B, 6] of the window."""
        rows = np.zeros((len(unadapted), 6))
        rows[:, UNADAPTED], rows[:, UNADAPTED_ENTROPY] = unadapted.argmax(1), entropy(unadapted)
        if flat is not None:
            rows[:, FLAT] = flat
        if adapted is None:
            _mark_unadapted(rows)
        elif np.isfinite(adapted).all():
            rows[:, ADAPTED], rows[:, ADAPTED_ENTROPY] = adapted.argmax(1), entropy(adapted)
            rows[:, DIFFERS] = rows[:, ADAPTED] != rows[:, UNADAPTED]
        return rows

    def _allowed(self, samples: int) -> float:
        """Return how many predictions of a window may differ from the unadapted ones."""
        return self.limits.margin * max(self.limits.window, samples)

    def _shares(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each class's share [K] of predictions [n], n > 0."""
        return np.bincount(predicted.astype(np.int64), minlength=self.classes) / len(predicted)

    def _collapse(self, window: NDArray[np.float64]) -> str:
        """Return the kind of collapse in the window; empty for none."""
        answered = window[window[:, ADAPTED] != NOT_ADAPTED]
        if len(answered) < max(self.limits.window // 4, 1):
            return ""
        adapted, unadapted = self._shares(answered[:, ADAPTED]), self._shares(answered[:, UNADAPTED])
        top = int(adapted.argmax())
        suspicious = adapted[top] >= self.limits.collapse_share and self.baseline.shares[top] <= HALF
        if suspicious and unadapted[top] <= adapted[top] / 2:
            return "collapse"
        sure = answered[:, ADAPTED_ENTROPY].mean() <= self.limits.low_entropy * math.log(self.classes)
        split = (answered[:, ADAPTED] != answered[:, UNADAPTED]).mean() >= HALF
        excess = [np.maximum(shares - self.baseline.shares, 0).sum() for shares in (adapted, unadapted)]
        return "disagreement" if sure and split and excess[0] >= HALF and excess[0] > excess[1] else ""

    def _degenerate(self, window: NDArray[np.float64], batch: int) -> str:
        """Return the kind of degenerate input in the window or its last batch; empty for none."""
        shares, limits = self._shares(window[:, UNADAPTED]), self.limits
        top = int(shares.argmax())
        share = self.baseline.shares[top]
        if share <= HALF and shares[top] >= max(limits.one_class, (1 + share) / 2):
            return "one-class"
        if window[:, FLAT].mean() >= limits.one_class:
            return "constant"
        most = math.log(self.classes)
        if window[:, UNADAPTED_ENTROPY].mean() >= max(limits.high_entropy * most, (most + self.baseline.entropy) / 2):
            return "noise"
        return "small-batch" if self.per_batch and batch < limits.least_batch else ""

    def _roll_back(self, kind: str, window: NDArray[np.float64], batch: int) -> Verdict:
        """Decide on a roll-back; if the last one was recent, also hold."""
        given = window[:-batch, DIFFERS].copy()  # these were returned, and go on counting
        self._count(kind)
        self._held = self.limits.retry if self._since < self.limits.retry else 0
        self._since = 0
        _mark_unadapted(window)
        window[:-batch, DIFFERS] = given
        self._window = window
        return Verdict("roll back", kind)

    def _count(self, kind: str) -> None:
        if kind in COLLAPSES or kind != self._kind:
            self.events[kind] += 1
        self._kind = kind


class LastGood:
    """The newest adapter state that has been followed by a whole window of healthy samples.

    Parameters
    ----------
    start : Any
        The state before the first sample.
    window : int
        Samples that must follow.
    """

    def __init__(self, start: Any, window: int) -> None:
        self.state, self._candidate, self._window, self._followed = start, start, window, 0

    def note(self, state: Callable[[], Any], samples: int) -> None:
        """Count `samples` more healthy samples; `state` returns a copy of the state after them."""
        self._followed += samples
        if self._followed >= self._window:
            self.state, self._candidate, self._followed = self._candidate, state(), 0

    def spoil(self) -> None:
        """Drop the states that have not been followed by a whole window yet."""
        self._candidate, self._followed = self.state, 0


def flat_images(pixels: NDArray[Any], before: NDArray[Any] | None = None) -> NDArray[np.bool_]:
    """Return which images [B, C, H, W] are constant in each channel, or equal to the previous image.

    `before` [C, H, W] precedes the first image.
    """
    rows = pixels.reshape(*pixels.shape[:2], -1)
    constant = (rows == rows[:, :, :1]).all((1, 2))
    shape = before is None or before.shape != pixels.shape[1:]
    earlier = np.concatenate((pixels[:1] if shape or before is None else before[None], pixels[:-1]))
    repeated = (pixels == earlier).reshape(len(pixels), -1).all(1)
    repeated[0] &= not shape
    return constant | repeated


def _mark_unadapted(rows: NDArray[np.float64]) -> None:
    """Mark rows as predicted unadapted, in place."""
    rows[:, ADAPTED], rows[:, ADAPTED_ENTROPY], rows[:, DIFFERS] = NOT_ADAPTED, 0, 0
