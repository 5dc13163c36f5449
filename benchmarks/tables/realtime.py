"""Real-time evaluation: test-time adaptation under a stream with a constant sampling rate (simulated clock).

After *Evaluation of Test-Time Adaptation Under Computational Time Constraints* (Alfarra et al., ICML 2024), which
defines it for batches; here samples arrive one by one, for methods defined per sample and per batch alike.

- Speed 1: a sample arrives every t seconds, where t is what the reference row takes for a single sample. The default
  reference, FedTHE, is the slowest of the methods that only weigh two heads: all of these keep up with speed 1 sample
  by sample, and with faster streams by batching the waiting samples, which does not change their predictions.
- A method's time is processor time with one thread as a function of the batch size, a median over turns in the same
  run. The clock is simulated from these times (`fedtta.benchmarks.tables.clock`), so other load on the machine hardly
  matters.
- Each adapter really predicts the samples that it has time for, in order, and no others. Each client and test
  distribution is a stream of its own with a fresh adapter and an idle device, so its first batch is never missed.
- Accuracy: a missed sample gets the prediction of the unadapted network at no cost, so `fedavg` is the same at any
  speed. `missed_wrong_percent` is the lower bound in which every missed sample counts as wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from fedtta.benchmarks.clients import client_of, serve, summarize
from fedtta.benchmarks.provenance import provenance
from fedtta.benchmarks.tables.clock import Batch, Cost, measure_costs, schedule
from fedtta.benchmarks.tables.networks import load_federation
from fedtta.benchmarks.tables.protocol import Realtime
from fedtta.client.device import Device
from fedtta.client.serving import Served
from fedtta.data import Federation, Stream, check_no_leak, resolve, stream
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow
from fedtta.models import TwoHead, load_model
from fedtta.server.events import Leak
from fedtta.server.methods import MethodRow, plan
from fedtta.settings import Settings, SettingsError
from fedtta.tta import Adapter
from fedtta.tta.statistics import ON_REQUEST

#: The only training: all rows share its network.
TRAINING = "cross_entropy"
ROUND = 1  # of the statistics

#: (row, speed) → test distribution → score of each client.
Scores = dict[tuple[str, float], dict[str, list["Score"]]]


@dataclass(frozen=True)
class Client:
    """A client at test time.

    Parameters
    ----------
    streams : list of Stream
        None of them empty.
    fallback : list of ndarray of bool [n]
        Which samples of each stream the unadapted network predicts correctly.
    served : mapping
        Row → what builds its adapter.
    """

    streams: list[Stream]
    fallback: list[NDArray[np.bool_]]
    served: Mapping[str, Served]


@dataclass(frozen=True)
class Score:
    """Outcome of one stream.

    Parameters
    ----------
    total, answered : int
        Samples of the stream, and those that the adapter predicted.
    correct, fallback_correct : int
        Correct predictions of the adapter, and of the unadapted network on the missed samples.
    delay : float
        Longest time in seconds from a sample's arrival to the adapter's prediction.
    """

    total: int
    answered: int
    correct: int
    fallback_correct: int
    delay: float

    def percent(self) -> dict[str, float]:
        """Return accuracy, accuracy with missed samples wrong, and the share answered, in percent."""
        counts = {
            "accuracy_percent": self.correct + self.fallback_correct,
            "missed_wrong_percent": self.correct,
            "answered_percent": self.answered,
        }
        return {name: 100 * count / self.total for name, count in counts.items()}


def measure_cell(settings: Settings, realtime: Realtime, console: Console) -> dict[str, Any]:
    """Time all rows side by side, play every stream at every speed, and return the content of a cell's file.

    Raises
    ------
    SettingsError
        A row or a setting does not fit, or data or network cannot be read.
    Leak
        A test sample was trained on.
    """
    federation = load_federation(settings)
    check_settings(settings, federation, realtime.queue)
    rows = shared_rows(settings)
    reference = reference_row(rows, realtime.reference)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clients, notes = prepare(settings, federation, load_model(settings.init)[0], rows, console)
        adapters = {label: served.build() for label, served in clients[0].served.items()}
        x = clients[0].streams[0].x[:]
        costs = measure_costs(adapters, x, settings, realtime.queue, realtime.repeats, console)
        interval = costs[reference].per_single_sample
        scores = play(clients, costs, interval, realtime, settings.eval_batch_size, console)
    finally:
        torch.set_num_threads(threads)
    return {
        "rows": score_rows(scores),
        "realtime": {
            "reference": reference,
            "interval_milliseconds": round(1000 * interval, 4),
            "queue": realtime.queue,
            "repeats": realtime.repeats,
            "costs": {label: described(cost, interval) for label, cost in costs.items()},
        },
        "runs": [{"training": TRAINING, "methods": list(costs), **provenance()}],
        "notes": notes,
    }


def check_settings(settings: Settings, federation: Federation, queue: int) -> None:
    """Raise SettingsError for settings under which the streams could not be played."""
    try:
        resolve(settings.shifts, has_natural=True)
    except ValueError as error:
        raise SettingsError(f"shifts = {settings.shifts!r}: {error}") from error
    least = settings.adapt_batch_size
    if queue < least:
        raise SettingsError(f"realtime: queue = {queue}; allowed is adapt-batch-size, {least}, or more")
    if settings.device != "cpu":
        raise SettingsError(f"device = {settings.device!r}: allowed is cpu, whose processor time is measured")
    if settings.split != "once":
        raise SettingsError(f"split = {settings.split!r}: allowed is once: the network was trained on one split")
    if any(role != "both" for role in federation.roles):
        raise SettingsError("target-fraction, target-domain: allowed are clients that all train and test")


def shared_rows(settings: Settings) -> list[MethodRow]:
    """Return the rows; SettingsError for one that needs another training or learned rates."""
    rows = [row for training in plan(settings) for row in training.rows]
    for row in rows:
        if row.training != TRAINING:
            raise SettingsError(
                f"methods: {row.label} is defined on the training {row.training}; all rows share one network here: "
                f"allowed is training={TRAINING}"
            )
        if "rates" in row.needs:
            raise SettingsError(f"methods: {row.label} needs adaptation rates, which are not learned here")
    return rows


def reference_row(rows: Sequence[MethodRow], name: str) -> str:
    """Return the label of the named row, with the fewest options; SettingsError lists the rows."""
    labels = [row.label for row in rows]
    for label in sorted(labels, key=len):
        if name in (label, label.partition("[")[0]):
            return label
    raise SettingsError(f"realtime: reference = {name!r}; allowed is one of the rows, {', '.join(labels)}")


def prepare(
    settings: Settings, federation: Federation, model: TwoHead, rows: Sequence[MethodRow], console: Console
) -> tuple[list[Client], list[str]]:
    """Train personal heads, share statistics, and make every client's adapters and streams.

    Returns
    -------
    clients, notes
        Clients without test samples are left out; notes on the test distributions.

    Raises
    ------
    SettingsError
        An adapter needs something that is missing, or there are no test samples.
    Leak
        A test sample was trained on.
    """
    arrays = {name: value.numpy().copy() for name, value in model.global_state().items()}
    devices = [client_of(settings, one) for one in range(settings.clients)]
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
    """Return the means of the clients' statistics, weighted as in a run's statistics round."""
    local, sizes = [], []
    for device in track(devices, "personal heads and statistics", console=console):
        reply = summarize(device, ROUND, TRAINING, arrays, list(wanted))
        local.append(reply.statistics)
        sizes.append(reply.num_examples if settings.statistics_weighting == "examples" else 1)
    return {name: np.average([one[name] for one in local], axis=0, weights=sizes) for name in local[0]}


def _client(device: Device, arrays: Arrays, means: Arrays, rows: Sequence[MethodRow], shifts: Sequence[str]) -> Client:
    """Return one client; streams without samples are left out."""
    chosen = device.settings
    options: dict[str, Any] = {"seed": chosen.seed, "severity": chosen.severity, "natural": device.natural}
    made = (stream(device.federation, device.partition, shift, device=device.device, **options) for shift in shifts)
    streams = [samples for samples in made if len(samples)]
    served = {row.label: serve(device, ROUND, TRAINING, arrays, means, row.as_requested()) for row in rows}
    unadapted = serve(device, ROUND, TRAINING, arrays, None, AdapterRow("unadapted", "none")).build()
    size = chosen.eval_batch_size
    fallback = []
    for samples in streams:
        parts = [_correct(unadapted, samples, positions) for positions in _split(np.arange(len(samples)), size)]
        fallback.append(np.concatenate(parts))
    return Client(streams, fallback, served)


def play(
    clients: Sequence[Client],
    costs: Mapping[str, Cost],
    interval: float,
    realtime: Realtime,
    size: int,
    console: Console,
) -> Scores:
    """Play every stream to every adapter at every speed.

    Parameters
    ----------
    costs : mapping
        Row → cost of its batches.
    interval : float
        Seconds between arrivals at speed 1.
    size : int
        Batch size in which an adapter defined per sample is really run; it changes nothing.
    """
    scores: Scores = {(label, speed): {} for label in costs for speed in realtime.speeds}
    work = [(client, label) for client in clients for label in costs]
    for client, label in track(work, "streams", console=console):
        adapter, cost = client.served[label].build(), costs[label]
        for samples, fallback in zip(client.streams, client.fallback, strict=True):
            correct: dict[bytes, int] = {}  # by the batches, which may be the same at several speeds
            for speed in realtime.speeds:
                apart = interval / speed
                batches = schedule(len(samples), apart, cost, realtime.queue, cost.least, cost.most)
                positions = batches_of(batches, adapter.per, size)
                key = b"|".join(one.tobytes() for one in positions)
                if key not in correct:
                    correct[key] = count_correct(adapter, samples, positions)
                own = score(batches, apart, correct[key], fallback)
                scores[label, speed].setdefault(samples.name, []).append(own)
    return scores


def batches_of(batches: Sequence[Batch], per: str, size: int) -> list[NDArray[np.int64]]:
    """Return the positions in the stream that an adapter predicts at once.

    For a method defined per batch these are the scheduled batches; for one defined per sample, all scheduled samples
    in order, `size` at a time: the same predictions in less time.
    """
    positions = [np.arange(one.first, one.stop) for one in batches]
    if per == "batch" or not positions:
        return positions
    return _split(np.concatenate(positions), size)


def _split(positions: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    return [positions[begin : begin + size] for begin in range(0, len(positions), size)]


def count_correct(adapter: Adapter, samples: Stream, batches: Sequence[NDArray[np.int64]]) -> int:
    """Return how many of these samples a fresh adapter that sees no others predicts correctly."""
    adapter.reset()
    return sum(int(_correct(adapter, samples, batch).sum()) for batch in batches)


def _correct(adapter: Adapter, samples: Stream, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Predict the next samples of a stream and return which predictions are correct, [n]."""
    chosen = torch.from_numpy(positions)
    return (adapter.predict(samples.x[chosen]).argmax(1) == samples.y[chosen]).numpy()


def score(batches: Sequence[Batch], interval: float, correct: int, fallback: NDArray[np.bool_]) -> Score:
    """Return the score of one stream.

    Parameters
    ----------
    batches : sequence of Batch
        From `schedule`, at least one.
    interval : float
        Seconds between arrivals.
    correct : int
        Correct predictions in these batches.
    fallback : ndarray of bool [n]
        Which samples of the whole stream the unadapted network predicts correctly.
    """
    missed = np.ones(len(fallback), bool)
    for one in batches:
        missed[one.first : one.stop] = False
    delay = max(one.end - one.first * interval for one in batches)
    return Score(len(fallback), int((~missed).sum()), correct, int(fallback[missed].sum()), delay)


def described(cost: Cost, interval: float) -> dict[str, Any]:
    """Return a cost as JSON values; `keeps_up_to` is the highest speed at which nothing is missed for long."""
    return {
        "milliseconds": {str(size): round(1000 * one, 4) for size, one in zip(cost.sizes, cost.seconds, strict=True)},
        "least": cost.least,
        "most": cost.most,
        "keeps_up_to": round(interval / cost.at_best, 4),
    }


def score_rows(scores: Scores) -> dict[str, Any]:
    """Return row → speed → percentages: means over clients, then over test distributions, which are kept as well."""
    rows: dict[str, Any] = {}
    for (label, speed), shifts in scores.items():
        by_shift = {shift: _means([one.percent() for one in of_clients]) for shift, of_clients in shifts.items()}
        delay = max(one.delay for of_clients in shifts.values() for one in of_clients)
        row = rows.setdefault(label, {"training": TRAINING, "shifts": {}})
        row["shifts"][f"{speed:g}×"] = {
            **_means(list(by_shift.values())),
            "longest_delay_milliseconds": round(1000 * delay, 4),
            "by_shift": by_shift,
        }
    return rows


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(float(np.mean([one[key] for one in entries])), 4) for key in entries[0]}
