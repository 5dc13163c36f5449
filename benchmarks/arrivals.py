"""Which samples of a constant-speed stream a busy device gets to, and when: a simulation of the clock.

Sample i arrives at i intervals. The device keeps the newest `queue` samples that it has not taken; one more overwrites
the oldest, which is missed. When the device is free and enough samples wait, it takes the oldest of them as one batch,
and is busy for what a batch of that size costs. The stream goes on after the samples that are scored: those that still
wait at its end are overwritten like all others, or taken before. Two things at one time: a sample arrives, then the
device takes, then a sample is overwritten.

Everything follows from the costs, which are given: the same costs give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """A batch: samples `first` to `stop` (not included), and when the device took and when it answered them."""

    first: int
    stop: int
    start: float
    end: float


def schedule(
    samples: int, interval: float, cost: Callable[[int], float], queue: int, least: int = 1, most: int = 1
) -> list[Taken]:
    """Return the batches that a device takes of a stream, in order; samples in none of them are missed.

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
    taken: list[Taken] = []
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
        taken.append(Taken(first, stop, now, now + cost(stop - first)))
        now, first = taken[-1].end, stop
    return taken
