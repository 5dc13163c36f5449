"""Clients whose streams do not wait: what they know, what their adapters cost, and what these get done in time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.arrivals import Taken, schedule
from benchmarks.batch_cost import Cost
from client.device import Device
from client.evaluation import Row
from client.runtime import make_device
from client.serving import Served
from client.state import Arrays, MemoryState
from client.task import Task
from data import Federation, Stream, check_no_leak, resolve, stream
from models import TwoHead
from server.events import Leak
from server.methods import MethodRow
from settings import Settings, SettingsError
from tta import Adapter
from tta.statistics import ON_REQUEST

#: The one training whose network all rows share.
TASK = Task("cross_entropy")
ROUND = 1  # of the statistics

Scores = dict[tuple[str, float], dict[str, list["Score"]]]


@dataclass(frozen=True)
class Client:
    """A client at test time.

    Parameters
    ----------
    streams : list of Stream
        None of them empty.
    fallback : list of ndarray of bool [n]
        Which of each stream's samples the unadapted network gets right.
    served : mapping
        By label of a row, what makes its adapter.
    """

    streams: list[Stream]
    fallback: list[NDArray[np.bool_]]
    served: Mapping[str, Served]


@dataclass(frozen=True)
class Score:
    """What became of one stream: how many samples it has, of how many the adapter answered in time, and what was right.

    `right` counts the adapter's answers, `fallback_right` the unadapted network's to the samples that were missed;
    `delay` is the longest time in seconds from a sample's arrival to the adapter's answer.
    """

    total: int
    answered: int
    right: int
    fallback_right: int
    delay: float

    @property
    def accuracy(self) -> float:
        """Return the accuracy where a missed sample has the unadapted network's answer."""
        return (self.right + self.fallback_right) / self.total

    @property
    def accuracy_missed_wrong(self) -> float:
        """Return the accuracy where a missed sample is wrong."""
        return self.right / self.total


def prepare(
    settings: Settings, federation: Federation, model: TwoHead, rows: Sequence[MethodRow], console: Console
) -> tuple[list[Client], list[str]]:
    """Let every client train its personal head and share statistics, and make adapters and streams of all.

    Returns
    -------
    clients, notes
        Clients without test samples are left out; what a reader has to know of the test distributions.

    Raises
    ------
    SettingsError
        An adapter needs something that is not here, or there are no test samples.
    Leak
        A test sample had been trained on.
    """
    arrays = {name: value.numpy().copy() for name, value in model.global_state().items()}
    devices = [make_device(settings, one, MemoryState(), MemoryState()) for one in range(settings.clients)]
    needs = frozenset().union(*(row.needs for row in rows))
    means = _mean_statistics(devices, arrays, [need for need in ON_REQUEST if need in needs], settings, console)
    try:
        shifts, note = resolve(settings.shifts, devices[0].natural is not None)
        clients = [
            _client(device, arrays, means, rows, shifts)
            for device in track(devices, "adapters and streams", console=console)
        ]
    except ValueError as error:
        raise SettingsError(f"methods = {settings.methods!r}: {error}") from error
    if leaked := sum(check_no_leak(samples, federation) for client in clients for samples in client.streams):
        raise Leak(f"{leaked} test samples had been trained on")
    testing = [client for client in clients if client.streams]
    if not testing:
        raise SettingsError(f"shifts = {settings.shifts!r}: no client has test samples")
    return testing, [note] if note else []


def _mean_statistics(
    devices: Sequence[Device], arrays: Arrays, wanted: Collection[str], settings: Settings, console: Console
) -> Arrays:
    """Return the means of the clients' statistics, as a run's statistics round weighs them."""
    local, sizes = [], []
    for device in track(devices, "personal heads and statistics", console=console):
        known, metrics = device.statistics(ROUND, TASK, arrays, wanted)
        local.append(known)
        sizes.append(metrics["num-examples"] if settings.statistics_weighting == "examples" else 1)
    return {name: np.average([one[name] for one in local], axis=0, weights=sizes) for name in local[0]}


def _client(device: Device, arrays: Arrays, means: Arrays, rows: Sequence[MethodRow], shifts: Sequence[str]) -> Client:
    """Return one client; streams without samples are left out."""
    chosen = device.settings
    known: dict[str, Any] = {"seed": chosen.seed, "severity": chosen.severity, "natural": device.natural}
    made = (stream(device.federation, device.partition, shift, device=device.device, **known) for shift in shifts)
    streams = [samples for samples in made if len(samples)]
    served = {
        row.label: device.serve(ROUND, TASK, arrays, means, Row(row.label, row.method.adapter, row.options, row.base))
        for row in rows
    }
    unadapted = device.serve(ROUND, TASK, arrays, None, Row("unadapted", "none")).build()
    size = chosen.eval_batch_size
    fallback = []
    for samples in streams:
        parts = [_right(unadapted, samples, places) for places in _split(np.arange(len(samples)), size)]
        fallback.append(np.concatenate(parts))
    return Client(streams, fallback, served)


def play(
    clients: Sequence[Client],
    costs: Mapping[str, Cost],
    interval: float,
    speeds: Sequence[float],
    queue: int,
    size: int,
    console: Console,
) -> Scores:
    """Play every stream to every adapter at every speed.

    Parameters
    ----------
    costs : mapping
        By label of a row.
    interval : float
        Seconds between arrivals at speed 1.
    queue : int
        Samples that can wait.
    size : int
        Samples that an adapter which is defined per sample really gets at once; it changes nothing.

    Returns
    -------
    dict
        (label, speed) → test distribution → the score of every client.
    """
    scores: Scores = {(label, speed): {} for label in costs for speed in speeds}
    work = [(client, label) for client in clients for label in costs]
    for client, label in track(work, "streams", console=console):
        adapter, cost = client.served[label].build(), costs[label]
        for samples, fallback in zip(client.streams, client.fallback, strict=True):
            right: dict[bytes, int] = {}  # of what was taken at another speed already
            for speed in speeds:
                apart = interval / speed
                taken = schedule(len(samples), apart, cost, queue, cost.least, cost.most)
                batches = batches_of(taken, adapter.per, size)
                key = b"|".join(batch.tobytes() for batch in batches)
                if key not in right:
                    right[key] = count_right(adapter, samples, batches)
                scores[label, speed].setdefault(samples.name, []).append(score(taken, apart, right[key], fallback))
    return scores


def batches_of(taken: Sequence[Taken], per: str, size: int) -> list[NDArray[np.int64]]:
    """Return the places in the stream that an adapter gets at once.

    For a method defined per batch they are what was taken; for one defined per sample all that were taken, in order,
    `size` at a time, which gives the same predictions sooner.
    """
    batches = [np.arange(one.first, one.stop) for one in taken]
    if per == "batch" or not batches:
        return batches
    return _split(np.concatenate(batches), size)


def _split(places: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    return [places[begin : begin + size] for begin in range(0, len(places), size)]


def count_right(adapter: Adapter, samples: Stream, batches: Sequence[NDArray[np.int64]]) -> int:
    """Return how many of these samples an adapter gets right that begins with them and sees no others."""
    adapter.reset()
    return sum(int(_right(adapter, samples, batch).sum()) for batch in batches)


def _right(adapter: Adapter, samples: Stream, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Predict samples of a stream, the next that the adapter sees, and tell which are right, [n]."""
    chosen = torch.from_numpy(places)
    return (adapter.predict(samples.x[chosen]).argmax(1) == samples.y[chosen]).numpy()


def score(taken: Sequence[Taken], interval: float, right: int, fallback: NDArray[np.bool_]) -> Score:
    """Return the score of one stream.

    Parameters
    ----------
    taken : sequence of Taken
        What `schedule` says, at least one batch.
    interval : float
        Seconds between arrivals.
    right : int
        Of the samples taken.
    fallback : ndarray of bool [n]
        Which samples of the whole stream the unadapted network gets right.
    """
    missed = np.ones(len(fallback), bool)
    for one in taken:
        missed[one.first : one.stop] = False
    delay = max(one.end - one.first * interval for one in taken)
    return Score(len(fallback), int((~missed).sum()), right, int(fallback[missed].sum()), delay)
