"""Simulated clock: which samples of a stream with a constant sampling rate a busy device answers, and when.

Sample i arrives after i intervals. The device keeps the newest `queue` samples that it has not processed; one more
overwrites the oldest, which is missed. Once the device is free and enough samples wait, it takes the oldest as one
batch and is busy for that batch's cost. The stream continues after the scored samples, so those that still wait at its
end are overwritten like all others. At equal times a sample arrives first, then the device takes, then a sample is
overwritten.

Everything follows from the measured costs: equal costs give equal answers.
"""

from __future__ import annotations

import itertools
import statistics as averages
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from fedtta.settings import Settings
from fedtta.tta import Adapter

#: No larger batch of an adapter is timed after one that took longer, in seconds.
PATIENCE = 0.1
#: A batch whose time per sample is within this factor of the least is large enough.
ENOUGH = 1.1


@dataclass(frozen=True)
class Batch:
    """A batch: samples `first` to `stop` (excluded), and when the device started and finished it."""

    first: int
    stop: int
    start: float
    end: float


def schedule(
    samples: int, interval: float, cost: Callable[[int], float], queue: int, least: int = 1, most: int = 1
) -> list[Batch]:
    """Return the batches that a device processes, in order; samples in none of them are missed.

    Parameters
    ----------
    samples : int
        Length of what is scored; 0 or more.
    interval : float
        Seconds between arrivals, above 0.
    cost : callable
        Batch size → seconds.
    queue : int
        Samples that can wait.
    least, most : int
        The device waits for `least` samples before it takes any (the stream's last ones apart), and takes at most
        `most` at once.

    Raises
    ------
    ValueError
        There is no interval, or the queue is shorter than the least batch.
    """
    if not interval > 0 or not 1 <= least <= min(queue, most):
        raise ValueError(
            f"interval={interval}, least={least}, most={most}, queue={queue}: allowed are an interval above 0 and "
            "1 <= least <= most, queue"
        )
    batches: list[Batch] = []
    now, first, arrived = 0.0, 0, 0
    while first < samples:
        while first < samples and (first + queue) * interval < now:  # overwritten while the device was busy
            first += 1
        if first == samples:
            break
        now = max(now, (min(first + least, samples) - 1) * interval)  # of the last one that it waits for
        while arrived < samples and arrived * interval <= now:
            arrived += 1
        stop = min(first + most, arrived)
        batches.append(Batch(first, stop, now, now + cost(stop - first)))
        now, first = batches[-1].end, stop
    return batches


@dataclass(frozen=True)
class Cost:
    """Seconds of an adapter's batches, and which batches it takes.

    Parameters
    ----------
    sizes : tuple of int
        Batch sizes that were measured, ascending.
    seconds : tuple of float
        Of a batch of each of these sizes.
    least, most : int
        The device waits for `least` samples before it takes any (the stream's last ones apart), and takes at most
        `most` at once.

    Raises
    ------
    ValueError
        Nothing was measured, sizes do not ascend, or a batch costs no time.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    least: int
    most: int

    def __post_init__(self) -> None:
        ascending = all(small < large for small, large in itertools.pairwise((0, *self.sizes)))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not ascending or min(self.seconds) <= 0:
            raise ValueError(f"batches of {self.sizes} in {self.seconds} s: each size needs a time above 0, ascending")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least={self.least}, most={self.most}: allowed is 1 <= least <= most")

    @classmethod
    def of_samples(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
        """Return the cost of a method defined per sample, for which the batch size changes nothing but time.

        It takes all waiting samples, up to the smallest measured batch that is about as fast as any (see `ENOUGH`).
        """
        each = [second / size for size, second in zip(sizes, seconds, strict=True)]
        enough = next(size for size, one in zip(sizes, each, strict=True) if one <= ENOUGH * min(each))
        return cls(tuple(sizes), tuple(seconds), 1, enough)

    @classmethod
    def of_batches(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
        """Return the cost of a method defined per batch: it takes batches of the largest measured size alone."""
        return cls(tuple(sizes), tuple(seconds), sizes[-1], sizes[-1])

    def __call__(self, batch: int) -> float:
        """Return the seconds of a batch: between measured sizes on a line, beyond them in proportion."""
        if batch <= self.sizes[0] or batch >= self.sizes[-1]:
            end = 0 if batch <= self.sizes[0] else -1
            return self.seconds[end] * batch / self.sizes[end]
        return float(np.interp(batch, self.sizes, self.seconds))

    @property
    def per_single_sample(self) -> float:
        """Return the seconds per sample in the smallest batches that the adapter takes."""
        return self(self.least) / self.least

    @property
    def at_best(self) -> float:
        """Return the seconds per sample in the largest batches that it takes; a faster stream loses samples."""
        return self(self.most) / self.most


def measure_costs(
    adapters: Mapping[str, Adapter],
    x: Tensor,
    settings: Settings,
    queue: int,
    repeats: int,
    console: Console,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Cost]:
    """Time adapters in turns, and return the cost of each.

    Parameters
    ----------
    adapters : mapping
        By label of a row.
    x : Tensor [n, C, H, W]
        A stream to take batches of.
    settings : Settings
        Say how large batches are.
    queue : int
        Samples that can wait; a larger batch never comes up.
    repeats : int
        Turns, of which the medians count; in one more before them everything warms up.
    console : Console
        Gets a progress bar.
    clock : callable
        Returns seconds. The processor's, of a process that computes with one thread, is the wall's on an idle core.
    """
    largest = {"batch": settings.adapt_batch_size, "sample": min(queue, settings.eval_batch_size)}
    sizes = {label: _sizes(adapter, x, largest[adapter.per], clock) for label, adapter in adapters.items()}
    turns: list[dict[str, list[float]]] = []
    for _ in track(range(repeats), "costs", console=console):
        turns.append({})
        for label, adapter in adapters.items():
            adapter.reset()
            turns[-1][label] = [_timed(adapter, x, size, clock) for size in sizes[label]]
    costs = {}
    for label, adapter in adapters.items():
        seconds = [averages.median(column) for column in zip(*(turn[label] for turn in turns), strict=True)]
        make = Cost.of_batches if adapter.per == "batch" else Cost.of_samples
        costs[label] = make(sizes[label], seconds)
        adapter.reset()  # those that change the network give it back
    return costs


def _sizes(adapter: Adapter, x: Tensor, largest: int, clock: Callable[[], float]) -> list[int]:
    """Return the batch sizes to time, after a call of each: 1, 2, 4, ... up to the largest that the adapter takes."""
    sizes: list[int] = []
    for size in (*itertools.takewhile(lambda size: size < largest, (2**i for i in itertools.count())), largest):
        sizes.append(size)
        if _timed(adapter, x, size, clock) > PATIENCE and adapter.per == "sample":
            break
    return sizes


def _timed(adapter: Adapter, x: Tensor, size: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one batch of a stream x [n, C, H, W], repeated where it is too short."""
    batch = x[torch.arange(size) % len(x)]
    start = clock()
    adapter.predict(batch)
    return clock() - start
