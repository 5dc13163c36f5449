"""What a device measures of itself: counts and means, of which `fedtta.messages.replies.Telemetry` consists.

    predictions, refusals, latency   `Observation`, since the process began
    e, confidence, accuracy          `Recent`, of one model
    drift, guard                     `fedtta.client.agent.guard.Guard`, of one model

Reading waits for no prediction: what is measured of a model is replaced as a whole, never changed in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.agent.guard import Guard
from fedtta.client.agent.status import CALIBRATED, CALIBRATION, Status
from fedtta.client.config import AgentConfig
from fedtta.client.names import SOFTWARE
from fedtta.messages.record import MOST, NAME_LENGTH, printable
from fedtta.messages.replies import LATENCY_BOUNDS, WEIGHT_WINDOW, WEIGHTS_KEPT, Telemetry
from fedtta.settings.versions import versions
from fedtta.tta.estimates import (
    Calibration,
    Signals,
    confidences,
    difference_of_confidences,
    signals,
    slid,
)

#: Images over which the mean confidence of the unadapted network is taken, and the accuracy of predictions estimated.
CONFIDENCE_WINDOW = WEIGHT_WINDOW
DISK_SECONDS = 30.0  # for which the size of the state directory is remembered


class Recent:
    """What a model has predicted lately; not thread-safe, but for reading.

    Attributes
    ----------
    weights : tuple of float
        Mean e of each `WEIGHT_WINDOW` images, oldest first, at most `WEIGHTS_KEPT`; they do not depend on how the
        stream is cut into batches.
    """

    def __init__(self) -> None:
        self.weights: tuple[float, ...] = ()
        self._last = self._open = self._confidences = np.empty(0)
        self._judged: Signals = {}

    def note(self, predicted: NDArray[Any], weights: NDArray[Any] | None, unadapted: NDArray[Any] | None) -> None:
        """Note a batch, in order of arrival.

        Parameters
        ----------
        predicted : [B, K]
            The probabilities that were returned.
        weights : [B] or None
            e of each image; None for adapters that do not mix the heads.
        unadapted : [B, K] or None
            The unadapted network's probabilities, where they are known.
        """
        if weights is not None:
            found = np.clip(weights.astype(np.float64), 0, 1)
            self._last = np.concatenate((self._last, found))[-WEIGHT_WINDOW:]
            waiting = np.concatenate((self._open, found))
            whole = len(waiting) // WEIGHT_WINDOW * WEIGHT_WINDOW
            means = tuple(float(block.mean()) for block in waiting[:whole].reshape(-1, WEIGHT_WINDOW))
            self.weights, self._open = (*self.weights, *means)[-WEIGHTS_KEPT:], waiting[whole:]
        if unadapted is not None:
            self._confidences = np.concatenate((self._confidences, confidences(unadapted)))[-CONFIDENCE_WINDOW:]
            judged = {"judged": signals(predicted, unadapted)["judged"]}
            self._judged = slid(self._judged, judged, CONFIDENCE_WINDOW)

    @property
    def weight(self) -> float | None:
        """Return the mean e of the last `WEIGHT_WINDOW` images, of fewer in the beginning; None without any."""
        last = self._last
        return float(last.mean()) if len(last) else None

    @property
    def confidence(self) -> float | None:
        """Return the unadapted network's mean confidence on the last images; None before the window is full."""
        last = self._confidences
        return float(last.mean()) if len(last) == CONFIDENCE_WINDOW else None

    def accuracy(self, check: Mapping[str, float], rounded: Callable[[int, int], int]) -> tuple[float, ...]:
        """Return the estimated accuracy of the last predictions and its interval; nothing before the window is full.

        It is `label_shift` (`fedtta.tta.estimates`), calibrated on what a new adapter predicted at the model's check.

        Parameters
        ----------
        check : mapping
            Figures of the check (`fedtta.client.agent.candidate.Check`).
        rounded : callable
            See `fedtta.client.policy.Policy.rounded`: the shares are those of counts of the check's samples.
        """
        known = [check[key] for name in CALIBRATION if (key := f"{CALIBRATED}{name}") in check]
        window = self._judged.get("judged", np.empty(0))
        if len(window) < CONFIDENCE_WINDOW or len(known) < len(CALIBRATION):
            return ()
        samples, offset, variance = known
        found, total = Calibration(offset, variance).estimate(window), round(samples)
        return tuple(rounded(round(one * total), total) / total for one in (found.accuracy, found.low, found.high))


class Observation:
    """What an agent counts since its process began, and its telemetry; thread-safe.

    Parameters
    ----------
    config : AgentConfig
    clock : callable
        Monotonic time in seconds.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._clock = config, clock
        self._software = versions(*SOFTWARE)  # slow the first time, so not when it is asked for
        self._lock, self._walking = threading.Lock(), threading.Lock()
        self._predictions = self._refusals = 0
        self._latency, self._latency_sum = [0] * (len(LATENCY_BOUNDS) + 1), 0.0
        self._used, self._used_until = 0, float("-inf")

    def predicted(self, images: int) -> None:
        """Count images that have been predicted."""
        with self._lock:
            self._predictions += images

    def answered(self, seconds: float) -> None:
        """Count a prediction request that was answered so many seconds after its arrival."""
        with self._lock:
            self._latency[bisect_left(LATENCY_BOUNDS, seconds)] += 1
            self._latency_sum += max(0.0, seconds)

    def refused(self) -> None:
        """Count a prediction request that was refused."""
        with self._lock:
            self._refusals += 1

    def telemetry(
        self, status: Status, recent: Recent | None, guard: Guard | None, check: Mapping[str, float], saving_fails: bool
    ) -> Telemetry:
        """Return what the device tells of itself.

        Parameters
        ----------
        status : Status
        recent, guard
            Those of the served model.
        check : mapping
            Figures of the served model's check (`fedtta.client.agent.candidate.Check`).
        saving_fails : bool
            Whether the adapter's state could not be saved the last time.
        """
        with self._lock:
            predictions, refusals = self._predictions, self._refusals
            latency, latency_sum = list(self._latency), self._latency_sum
        return Telemetry(
            name=self.config.name,
            software=self._software,
            uptime=status.uptime,
            model=printable(status.version, NAME_LENGTH),
            candidate=status.candidate,
            refused=status.refused,
            adapter=printable(status.adapter, NAME_LENGTH),
            choice=status.choice,
            phase=status.training,
            predictions=predictions,
            refusals=refusals,
            samples=status.samples,
            unsaved_samples=status.unsaved_samples,
            latency=latency,
            latency_sum=latency_sum,
            weight=recent.weight if recent else None,
            weights=list(recent.weights) if recent else [],
            estimated_accuracy=self._estimated_accuracy(check, recent.confidence if recent else None),
            drift=guard.drift if guard else None,
            holding=status.holding,
            guard_events=status.guard_events,
            saving_fails=saving_fails,
            disk_used=self._disk_used(),
            disk_free=min(MOST, shutil.disk_usage(self.config.state_folder).free),  # a network's may be 2^63
            memory=resident_bytes(),
            data_samples=status.data_samples,
            data_skipped=status.data_skipped,
        )

    def _estimated_accuracy(self, check: Mapping[str, float], confidence: float | None) -> float | None:
        """Return the unadapted network's estimated accuracy on the last images.

        The accuracy of the check is that of a count which the policy rounds: of a network that is equally sure of
        everything, the estimate would tell the exact one.
        """
        if confidence is None or not {"samples", "accuracy", "confidence"} <= check.keys():
            return None
        total = round(check["samples"])
        correct = self.config.policy.rounded(round(check["accuracy"] * total), total)
        return difference_of_confidences(correct / total, check["confidence"], confidence)

    def _disk_used(self) -> int:
        """Return the bytes of the state directory, at most `DISK_SECONDS` old."""
        with self._walking:
            if self._clock() >= self._used_until:
                self._used = folder_bytes(self.config.state_folder)
                self._used_until = self._clock() + DISK_SECONDS
            return self._used


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def resident_bytes() -> int:
    """Return the resident bytes of this process; 0 where the system has no `/proc`."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
