"""Watching an adapter: when to answer with the unadapted model, and when to go back to what the adapter knew before.

The guard sees, batch by batch, what the unadapted model (the global head of the network as it came from training) and
the adapter say of the same samples, before either is answered with. It looks back on a window of samples.

Collapse: the adapter rolls back, and the batch is answered unadapted.

- `non-finite`: a probability is no number, or the adapter failed on input that is fine;
- `collapse`: one class has nearly all adapted predictions, and at most half of that share of the unadapted ones;
- `disagreement`: next to no entropy, half of the predictions are others than the unadapted model's, and half of them
  fall on classes beyond their usual share.

Degenerate input, on which nothing can be learned: adapted answers that differ from the unadapted ones are given as
long as they are at most `margin` of a full window; beyond that the guard holds.

- `one-class`: nearly all unadapted predictions are of one class;
- `constant`: images without variance, or the same image again and again;
- `noise`: the unadapted model's entropy is near its maximum;
- `small-batch`: a batch too small for a method defined per batch.

What is promised: on a stream that is degenerate throughout, at most `margin` of any `window` samples in a row are
answered otherwise than the unadapted model answers them, so accuracy is at most `margin` below its. A degenerate part
of a longer stream is noticed when it fills about `one_class` of the window. While the guard holds, the adapter is not
asked; after `retry` samples it is tried again, from the last state that was good.

What is usual for a client is not degenerate, however skewed: see `Usual`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

COLLAPSES = ("non-finite", "collapse", "disagreement")
DEGENERATE = ("one-class", "constant", "noise", "small-batch")
KINDS = (*COLLAPSES, *DEGENERATE)
HALF = 0.5  # a class with a larger usual share is never suspicious
#: What is kept of each sample in the window, in columns.
UNADAPTED, ADAPTED, UNADAPTED_ENTROPY, ADAPTED_ENTROPY, FLAT, DIFFERS = range(6)
NOT_ASKED = -1.0  # in the column of adapted classes


@dataclass(frozen=True)
class Limits:
    """The guard's numbers.

    Parameters
    ----------
    window : int
        Samples looked back on.
    margin : float
        Share of a window of degenerate samples that may be answered otherwise than unadapted.
    retry : int
        Samples for which the guard holds before the adapter is tried again.
    collapse_share : float
        One class's share of adapted predictions that is a collapse.
    one_class : float
        One class's share of unadapted predictions, or share of constant images, that is degenerate.
    low_entropy, high_entropy : float
        Mean entropy, as a share of ln K, that is next to none, and that is noise.
    least_batch : int
        Smaller batches are degenerate for methods defined per batch.
    """

    window: int = 128
    margin: float = 0.05
    retry: int = 512
    collapse_share: float = 0.9
    one_class: float = 0.6
    low_entropy: float = 0.02
    high_entropy: float = 0.8
    least_batch: int = 8


@dataclass(frozen=True)
class Usual:
    """What is ordinary for a client; known on the device alone.

    Parameters
    ----------
    shares : float64 [K]
        The larger of each class's share of the client's training samples and of the unadapted model's predictions.
    entropy : float
        Mean entropy of the unadapted model, nats.
    """

    shares: NDArray[np.float64]
    entropy: float = 0.0

    @classmethod
    def unknown(cls, classes: int) -> Usual:
        """Return what holds for a client without samples of its own: all classes alike."""
        return cls(np.full(classes, 1 / classes))


@dataclass(frozen=True)
class Verdict:
    """What to do with a batch.

    Parameters
    ----------
    action : "go", "hold" or "roll back"
        "go": answer adapted. Else answer unadapted; "hold" leaves the batch unlearned, "roll back" goes further back.
    kind : str
        One of `KINDS`; empty for "go".
    healthy : bool
        Whether what the adapter knows now is worth going back to.
    """

    action: Literal["go", "hold", "roll back"]
    kind: str = ""
    healthy: bool = False


class Guard:
    """Judge batches in order of arrival (see the module).

    Parameters
    ----------
    limits : Limits
    usual : Usual
        For K classes.
    per_batch : bool
        Whether the adapter's results depend on how the stream is cut into batches.

    Attributes
    ----------
    events : dict
        Kind → how often the guard has begun to act on it.
    """

    def __init__(self, limits: Limits, usual: Usual, per_batch: bool) -> None:
        self.limits, self.usual, self.per_batch = limits, usual, per_batch
        self.classes = len(usual.shares)
        self.events = dict.fromkeys(KINDS, 0)
        self.restart()

    def restart(self) -> None:
        """Forget the window, as for a new model; events stay counted."""
        self._window: NDArray[np.float64] = np.empty((0, 6))
        self._held = 0  # samples for which the guard still holds
        self._since = self.limits.retry  # samples since the last roll-back
        self._kind = ""  # what it acts on now

    @property
    def asks(self) -> bool:
        """Tell whether the adapter is to be asked for the next batch."""
        return self._held <= 0

    @property
    def holding(self) -> bool:
        """Tell whether answers are the unadapted model's."""
        return not self.asks or self._kind in DEGENERATE

    def judge(
        self, unadapted: NDArray[Any], adapted: NDArray[Any] | None, flat: NDArray[np.bool_] | None = None
    ) -> Verdict:
        """Judge a batch.

        Parameters
        ----------
        unadapted : [B, K]
            Probabilities, finite, B at least 1.
        adapted : [B, K] or None
            The adapter's; None where it was not asked (see `asks`). NaN where it failed.
        flat : bool [B], optional
            Which images have no variance or repeat the image before.
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
            _forget_answers(window[-len(rows) :])
            self._window = window
            return Verdict("hold", kind)
        self._kind, self._window = "", window
        return Verdict("go", healthy=not kind)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the guard must know to go on after a restart, as arrays by name; counts of events are not."""
        kind = KINDS.index(self._kind) if self._kind else -1
        numbers = np.array([self._held, self._since, kind], np.int64)
        return {"window": self._window.copy(), "numbers": numbers}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a `state()`; ValueError if it is none."""
        window, numbers = state.get("window"), state.get("numbers")
        if window is None or numbers is None or window.shape[1:] != (6,) or numbers.shape != (3,):
            raise ValueError("the state of the guard does not fit")
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
            _forget_answers(rows)
        elif np.isfinite(adapted).all():
            rows[:, ADAPTED], rows[:, ADAPTED_ENTROPY] = adapted.argmax(1), entropy(adapted)
            rows[:, DIFFERS] = rows[:, ADAPTED] != rows[:, UNADAPTED]
        return rows

    def _allowed(self, samples: int) -> float:
        """Return how many answers of a window may differ from the unadapted ones."""
        return self.limits.margin * max(self.limits.window, samples)

    def _shares(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each class's share [K] of predictions [n], n > 0."""
        return np.bincount(predicted.astype(np.int64), minlength=self.classes) / len(predicted)

    def _collapse(self, window: NDArray[np.float64]) -> str:
        """Return the kind of collapse that the answers in the window show; empty for none."""
        answered = window[window[:, ADAPTED] != NOT_ASKED]
        if len(answered) < max(self.limits.window // 4, 1):
            return ""
        adapted, unadapted = self._shares(answered[:, ADAPTED]), self._shares(answered[:, UNADAPTED])
        top = int(adapted.argmax())
        suspicious = adapted[top] >= self.limits.collapse_share and self.usual.shares[top] <= HALF
        if suspicious and unadapted[top] <= adapted[top] / 2:
            return "collapse"
        sure = answered[:, ADAPTED_ENTROPY].mean() <= self.limits.low_entropy * math.log(self.classes)
        split = (answered[:, ADAPTED] != answered[:, UNADAPTED]).mean() >= HALF
        excess = [np.maximum(shares - self.usual.shares, 0).sum() for shares in (adapted, unadapted)]
        return "disagreement" if sure and split and excess[0] >= HALF and excess[0] > excess[1] else ""

    def _degenerate(self, window: NDArray[np.float64], batch: int) -> str:
        """Return what makes the window, or its last batch, nothing to learn from; empty for nothing."""
        shares, limits = self._shares(window[:, UNADAPTED]), self.limits
        top = int(shares.argmax())
        if self.usual.shares[top] <= HALF and shares[top] >= max(limits.one_class, (1 + self.usual.shares[top]) / 2):
            return "one-class"
        if window[:, FLAT].mean() >= limits.one_class:
            return "constant"
        most = math.log(self.classes)
        if window[:, UNADAPTED_ENTROPY].mean() >= max(limits.high_entropy * most, (most + self.usual.entropy) / 2):
            return "noise"
        return "small-batch" if self.per_batch and batch < limits.least_batch else ""

    def _roll_back(self, kind: str, window: NDArray[np.float64], batch: int) -> Verdict:
        """Let the adapter go back; hold as well where it has just been back."""
        given = window[:-batch, DIFFERS].copy()  # they stay given, and count as such
        self._count(kind)
        self._held = self.limits.retry if self._since < self.limits.retry else 0
        self._since = 0
        _forget_answers(window)
        window[:-batch, DIFFERS] = given
        self._window = window
        return Verdict("roll back", kind)

    def _count(self, kind: str) -> None:
        if kind in COLLAPSES or kind != self._kind:
            self.events[kind] += 1
        self._kind = kind


class LastGood:
    """The newest state that a whole window of healthy samples has followed.

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
        """Take note of `samples` more healthy samples; `state` returns a copy of the state after them."""
        self._followed += samples
        if self._followed >= self._window:
            self.state, self._candidate, self._followed = self._candidate, state(), 0

    def spoil(self) -> None:
        """Forget the states that no whole window has followed yet."""
        self._candidate, self._followed = self.state, 0


def entropy(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """Return the entropy in nats of rows [B, K]; 0 ln 0 is 0."""
    p = np.asarray(probabilities, np.float64)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


def flat_images(pixels: NDArray[Any], before: NDArray[Any] | None = None) -> NDArray[np.bool_]:
    """Return which images [B, C, H, W] have one value a channel, or are the same as the image before them.

    `before` [C, H, W] is the image before the first one.
    """
    rows = pixels.reshape(*pixels.shape[:2], -1)
    constant = (rows == rows[:, :, :1]).all((1, 2))
    shape = before is None or before.shape != pixels.shape[1:]
    earlier = np.concatenate((pixels[:1] if shape or before is None else before[None], pixels[:-1]))
    repeated = (pixels == earlier).reshape(len(pixels), -1).all(1)
    repeated[0] &= not shape
    return constant | repeated


def _forget_answers(rows: NDArray[np.float64]) -> None:
    """Mark rows as answered unadapted, in place."""
    rows[:, ADAPTED], rows[:, ADAPTED_ENTROPY], rows[:, DIFFERS] = NOT_ASKED, 0, 0
