"""A served model: its adapter, the guard, and the state of both."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.adapters import chooses
from fedtta.client.agent.guard import Guard, LastGood, Verdict, flat_images
from fedtta.client.agent.observation import Recent
from fedtta.client.config import Limits
from fedtta.client.served import ServedModel, version_of
from fedtta.messages.arrays import Arrays
from fedtta.tta.arrays import softmax_of, to_host, untracked
from fedtta.tta.auto import Auto
from fedtta.tta.heads import NoAdaptation, two_heads
from fedtta.tta.registry import info

ADAPTER, GUARD = "adapter.", "guard."  # prefixes of names in a snapshot
LISTED = 20  # images that an error names
#: Adapters with this need report e, the weight of the global head, for every sample.
MIXES = "personal_head"


class Live:
    """A model that predicts and adapts in order of arrival; not thread-safe.

    Parameters
    ----------
    served : ServedModel
    limits : Limits or None
        Limits of the guard; None: no guard.
    note : callable
        Called with a line of text when the guard begins to act.

    Attributes
    ----------
    samples : int
        Samples predicted so far.
    saved, tried : int
        Samples covered by its newest snapshot, and by the last attempt to save one.
    changed : bool
        Whether there is anything to save.
    recent : Recent
        e and confidence of the last images.
    former_events : dict
        How often the guards of the models before it have acted, by kind.
    """

    def __init__(self, served: ServedModel, limits: Limits | None, note: Callable[[str], None]) -> None:
        self.served, self._note = served, note
        with served.ahead(received=True):
            self.adapter = served.build()
            start = self.adapter.state_dict()
        self.digest = served.digest()
        self.version = version_of(served.origin, self.digest)
        self.samples = self.saved = self.tried = 0
        self.changed = True
        self.guard = None if limits is None else Guard(limits, served.baseline, self.adapter.per == "batch")
        self._good = LastGood(start, limits.window if limits else 1)
        self._before: NDArray[Any] | None = None  # the last image, which the next one may repeat
        self._noted = dict(self.guard.events) if self.guard else {}
        self._mixes = MIXES in info(served.row.adapter).needs and not chooses(served.row)
        self.recent = Recent()
        self.former_events: dict[str, int] = {}

    def predict(self, pixels: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None, bool]:
        """Return probabilities [B, K], e [B] or None, and whether they are adapted.

        Parameters
        ----------
        pixels : float32 [B, C, H, W]
            In [0, 1], B at least 1.

        Raises
        ------
        ValueError
            The unadapted network's output is not finite, or there is no guard and the adapter failed. The adapter is
            unchanged then.
        """
        with untracked(), self.served.ahead():
            return self._predict(pixels)

    def _predict(self, pixels: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None, bool]:
        x = self.served.images(pixels)
        if self.guard is None:
            adapted, weights = self._adapted(x)
            self.samples += len(x)
            self.recent.note(adapted, weights, adapted if isinstance(self.adapter, NoAdaptation) else None)
            return adapted, weights, True
        plain, heads = self._unadapted(x)
        if not np.isfinite(plain).all():
            raise ValueError("the network's output is not finite")
        runs, small = self.guard.runs_adapter, len(x) < self.guard.limits.least_batch
        before = self.adapter.state_dict() if small else {}
        adapted, weights = self._tried(x, heads) if runs else (plain, None)
        verdict = self.guard.judge(plain, adapted if runs else None, flat_images(pixels, self._before))
        self._note_events(verdict)
        self.samples, self._before = self.samples + len(x), pixels[-1]
        if verdict.action == "go":
            if verdict.healthy:
                self._good.note(self.adapter.state_dict, len(x))
            self.recent.note(adapted, weights, plain)
            return adapted, weights, True
        if runs:
            self._go_back(before if verdict.kind == "small-batch" else self._good.state)
        weights = np.ones(len(x), np.float32) if self._mixes else None
        self.recent.note(plain, weights, plain)
        return plain, weights, False

    @property
    def choice(self) -> tuple[str, str]:
        """Return what an adapter has chosen that chooses among others, and since when and why; empty for others."""
        return (self.adapter.choice, self.adapter.reason) if isinstance(self.adapter, Auto) else ("", "")

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undo what a block that raises has done to the adapter and the guard: all predictions, or a `load`."""
        with self.served.ahead():
            adapter = self.adapter.state_dict()
        good, guard = copy.copy(self._good), copy.copy(self.guard)
        if guard is not None:
            guard.events = dict(guard.events)
        samples, before, noted, recent = self.samples, self._before, self._noted, copy.copy(self.recent)
        try:
            yield
        except BaseException:
            with self.served.ahead():
                self.adapter.load_state_dict(adapter)
            self.adapter.take_report()
            self._good, self.guard, self._noted, self.recent = good, guard, noted, recent
            self.samples, self._before = samples, before
            raise

    def reset(self) -> None:
        """Reset the adapter to its state before the stream."""
        with self.served.ahead():
            self.adapter.reset()
            self._start_over()
        self.samples = self.saved = self.tried = 0
        self.changed = True

    def state(self) -> Arrays:
        """Return copies of the state to be saved."""
        with self.served.ahead():
            arrays = {f"{ADAPTER}{name}": to_host(value) for name, value in self.adapter.state_dict().items()}
        if self.guard is not None:
            arrays |= {f"{GUARD}{name}": value for name, value in self.guard.state().items()}
        return arrays

    def load(self, arrays: Arrays, samples: int) -> None:
        """Restore a `state()`; ValueError if it does not fit, and nothing has changed then."""
        learned = {name: value for name, value in arrays.items() if name.startswith(ADAPTER)}
        guarded = {name.removeprefix(GUARD): value for name, value in arrays.items() if name.startswith(GUARD)}
        guard = copy.copy(self.guard)
        if guard is not None and guarded:
            guard.load(guarded)
        with self.served.ahead():
            state = {name.removeprefix(ADAPTER): self.served.given(value) for name, value in learned.items()}
            self.adapter.load_state_dict(state)
            self._start_over()
        self.samples = self.saved = self.tried = samples
        self.changed = False
        if guarded:
            self.guard = guard

    def _start_over(self) -> None:
        """Take the adapter's state as good, with an empty window."""
        if self.guard is not None:
            self.guard.restart()
            self._good = LastGood(self.adapter.state_dict(), self.guard.limits.window)
        self._before = None

    def _note_events(self, verdict: Verdict) -> None:
        """Note that the guard begins to act; for small batches only the first time."""
        counts = dict(self.guard.events) if self.guard else {}
        if counts != self._noted and (verdict.kind != "small-batch" or counts[verdict.kind] == 1):
            self._note(f"guard: {verdict.kind} after {self.samples} samples: {verdict.action}")
        self._noted = counts

    def _go_back(self, state: dict[str, Any]) -> None:
        self.adapter.load_state_dict(state)
        self._good.spoil()

    def _unadapted(self, x: Any) -> tuple[NDArray[np.float32], tuple[Any, Any, Any] | None]:
        """Return the global head's probabilities [B, K], and the outputs of both heads if the adapter mixes them."""
        if hasattr(self.adapter, "interpolate"):  # one pass of the network for both
            heads = two_heads(self.served.network, x)
            return _array(softmax_of(heads[1])), heads
        if isinstance(self.adapter, Auto):  # its own pass
            return _array(softmax_of(self.adapter.unadapted(x))), None
        return _array(softmax_of(self.served.network(x))), None

    def _tried(
        self, x: Any, heads: tuple[Any, Any, Any] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return what `_adapted` returns; NaN if the adapter fails, which the guard detects."""
        try:
            return self._adapted(x, heads)
        except (ValueError, FloatingPointError) as error:
            self._note(f"adapter failed: {error}")
            self.adapter.take_report()
            return np.full((len(x), len(self.served.classes)), np.nan, np.float32), None

    def _adapted(
        self, x: Any, heads: tuple[Any, Any, Any] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Adapt to a batch; return the probabilities [B, K], and e [B] if the adapter mixes the heads."""
        adapter: Any = self.adapter
        rows = _array(adapter.predict(x) if heads is None else adapter.interpolate(*heads))
        weight = adapter.take_report("weight").get("weight")
        fits = self._mixes and weight is not None and tuple(weight.shape) == (len(x),)
        return rows, _array(weight) if fits else None


def _array(values: Any) -> NDArray[np.float32]:
    return np.asarray(to_host(values), np.float32)


def checked(pixels: NDArray[Any], shape: tuple[int, int, int]) -> NDArray[Any]:
    """Return images that a network can take, as they are.

    Parameters
    ----------
    pixels : [B, C, H, W]
        uint8, or float32 in [0, 1].
    shape : (int, int, int)
        C, H, W.

    Raises
    ------
    ValueError
        Type, shape or a value is not allowed, or there is no image; the message names it.
    """
    if not isinstance(pixels, np.ndarray) or pixels.dtype not in (np.uint8, np.float32):
        raise ValueError(f"images are {getattr(pixels, 'dtype', type(pixels).__name__)}; allowed: uint8, float32")
    if pixels.ndim != 4 or pixels.shape[1:] != shape or not len(pixels):
        expected = f"[B, {', '.join(map(str, shape))}]"
        raise ValueError(f"images have shape {list(pixels.shape)}; allowed is {expected}, B at least 1")
    if pixels.dtype == np.float32:
        inside = ((pixels >= 0) & (pixels <= 1)).reshape(len(pixels), -1).all(1)  # NaN is in no range
        if not inside.all():
            bad = np.flatnonzero(~inside).tolist()
            raise ValueError(f"images {_some(bad)} of the request hold values that are not finite or outside [0, 1]")
    return pixels


def _some(numbers: list[int]) -> str:
    """Return numbers in words, the first ones of many."""
    return str(numbers) if len(numbers) <= LISTED else f"{numbers[:LISTED]} and {len(numbers) - LISTED} more"


def as_floats(pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Return uint8 images as float32 in [0, 1]; float32 images as they are."""
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels
