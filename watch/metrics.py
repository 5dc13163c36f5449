"""`/metrics`: devices and runs as Prometheus reads them.

Devices have the metrics of `fedtta.messages.exposition`, from their newest telemetry, however old it is:
`fedtta_last_seen_timestamp_seconds` and `fedtta_telemetry_timestamp_seconds` tell. Runs are those that changed last; a
run's metrics are read again when its files have changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from fedtta.messages import exposition
from fedtta.messages.exposition import Named, histogram
from fedtta.messages.record import NAME_LENGTH, printable
from fedtta.server.report.events import Incident, Round
from fedtta.server.report.journal import COPY, METRICS_FILE
from fedtta.server.report.live import SILENCE, STATES, Live, read_live
from fedtta.server.report.results import Results, read_results
from fedtta.watch import alerts as rules
from fedtta.watch.alerts import Alert
from fedtta.watch.fleet import FleetDevice, damaged_lines
from fedtta.watch.runs import LARGEST, SHARE, Runs, Signature, signature_of

LOG = logging.getLogger(__name__)
NEWEST = 20  # runs with metrics
TRAININGS = 32  # of a run, the first ones
#: Upper bounds in seconds of the intervals in which rounds are counted.
ROUND_BOUNDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
LOST = ("refused", "failed", "late", "limited")  # incidents that are replies


@dataclass(frozen=True)
class Training:
    """One training of a run: its rounds in order, and its incidents."""

    rounds: list[Round]
    incidents: list[Incident]

    def last(self, name: str) -> float | None:
        """Return a field of the last round that has it."""
        return next((value for one in reversed(self.rounds) if (value := getattr(one, name)) is not None), None)

    def replies(self) -> dict[str, int]:
        """Return result → number of replies; a limited one is accepted, too."""
        lost = Counter(one.event for one in self.incidents)
        return {"accepted": sum(len(one.replied) for one in self.rounds), **{name: lost[name] for name in LOST}}

    def seconds(self) -> tuple[dict[str, int], float]:
        """Return the histogram of the rounds' wall times."""
        counts = [0] * (len(ROUND_BOUNDS) + 1)
        for one in self.rounds:
            counts[sum(bound < one.wall_seconds for bound in ROUND_BOUNDS)] += 1
        return histogram(ROUND_BOUNDS, counts, sum(one.wall_seconds for one in self.rounds))

    def traffic(self) -> dict[str, int]:
        """Return direction → bytes of all rounds."""
        return {
            "down": sum(one.bytes_down for one in self.rounds),
            "up": sum(one.bytes_up for one in self.rounds),
        }


@dataclass(frozen=True)
class Run:
    """A run at a moment.

    Parameters
    ----------
    started : float or None
        Seconds since the epoch.
    status : str
        How it has ended; empty before that.
    trainings : dict
        Name, which fits into a label → training.
    live : Live or None
        What it is doing; None where no process runs it.
    """

    started: float | None = None
    status: str = ""
    trainings: dict[str, Training] = field(default_factory=dict)
    live: Live | None = None

    @classmethod
    def of(cls, results: Results) -> Run:
        """Keep of a run's results what has metrics."""
        trainings = {
            printable(name, NAME_LENGTH): Training(
                rounds, [one for one in results.incidents if one.training == name and _in_training(one)]
            )
            for name, rounds in list(results.by_training().items())[:TRAININGS]
        }
        started = None
        if results.run is not None:
            with suppress(ValueError, OverflowError):  # a text that is no time is unknown
                started = datetime.fromisoformat(results.run.time).timestamp()
        return cls(started, results.end.status if results.end else "", trainings)

    def clients(self) -> dict[str, int]:
        """Return state → number of clients, while a process runs the run."""
        if self.live is None:
            return {}
        found = Counter(one.state for one in self.live.clients.values())
        return {state: found[state] for state in STATES}


def _in_training(incident: Incident) -> bool:
    """Whether it is one of a training round, not of an evaluation; runs of earlier versions do not say."""
    return incident.phase in ("", f"train {incident.training}")


@dataclass(frozen=True)
class Server:
    """What the server could not read."""

    unreadable_runs: int
    damaged_lines: int


#: Of a device that is enrolled, or that telemetry is there of: the label is `device`.
DEVICE: tuple[Named[FleetDevice], ...] = (
    Named(
        "fedtta_device_online", "1 while the SuperLink hears of the device; unknown without --superlink.",
        lambda one: None if one.status == "unknown" else one.status == "online",
    ),
    Named(
        "fedtta_last_seen_timestamp_seconds", "Time of its last heartbeat or telemetry.", lambda one: one.last_seen
    ),
    Named(
        "fedtta_telemetry_timestamp_seconds", "Time of the telemetry that its other metrics are of.",
        lambda one: one.telemetry_at,
    ),
)  # fmt: skip
#: Of a run: the label is `run`.
RUN: tuple[Named[Run], ...] = (
    Named("fedtta_run_started_timestamp_seconds", "When the run began.", lambda one: one.started),
    Named("fedtta_run_running", "1 while a process runs the run.", lambda one: one.live is not None),
    Named("fedtta_run_ended", "1 after the end of the run.", lambda one: one.status != ""),
    Named(
        "fedtta_run_completed", "1 after an end without an error.",
        lambda one: one.status == "completed",
    ),
    Named("fedtta_clients", "Clients by state, while a process runs the run.", Run.clients, label="state"),
)  # fmt: skip
#: Of a training of a run: the labels are `run` and `training`.
TRAINING: tuple[Named[Training], ...] = (
    Named("fedtta_rounds", "Training rounds that have ended.", lambda one: len(one.rounds), CounterMetricFamily),
    Named("fedtta_round_seconds", "Wall time of training rounds.", Training.seconds, HistogramMetricFamily),
    Named("fedtta_train_loss", "Mean training loss of the last round.", lambda one: one.last("train_loss")),
    Named(
        "fedtta_validation_accuracy", "Mean over clients for the global model as the last round received it.",
        lambda one: one.last("validation_accuracy"),
    ),
    Named(
        "fedtta_personal_validation_accuracy", "Mean over clients for the personal heads of the last round.",
        lambda one: one.last("personal_validation_accuracy"),
    ),
    Named(
        "fedtta_replies", "Replies of training rounds; limited ones are accepted, too.", Training.replies,
        CounterMetricFamily, "result",
    ),
    Named("fedtta_bytes", "Bytes of training rounds.", Training.traffic, CounterMetricFamily, "direction"),
)  # fmt: skip
#: Of the server: no label.
SERVER: tuple[Named[Server], ...] = (
    Named("fedtta_unreadable_runs", "Runs whose files cannot be read.", lambda one: one.unreadable_runs),
    Named("fedtta_damaged_telemetry_lines", "Lines of telemetry that cannot be read.", lambda one: one.damaged_lines),
)
#: Every metric with the labels that say whose it is, for the documentation.
TABLES = (
    (exposition.METRICS, ("device",)), (DEVICE, ("device",)), (RUN, ("run",)), (TRAINING, ("run", "training")),
    ((rules.METRIC,), rules.LABELS), (SERVER, ()),
)  # fmt: skip


def device_metrics(devices: Iterable[FleetDevice]) -> list[Metric]:
    """Return the metrics of devices; of several with one name, the one that was seen last."""
    found: dict[str, FleetDevice] = {}
    for one in sorted(devices, key=lambda one: one.last_seen or 0.0):
        found[printable(one.name, NAME_LENGTH)] = one
    known = [((name,), one) for name, one in sorted(found.items())]
    said = [(names, one.telemetry) for names, one in known if one.telemetry is not None]
    return [
        *(one.of(known, ("device",)) for one in DEVICE),
        *(one.of(said, ("device",)) for one in exposition.METRICS),
    ]


def run_metrics(runs: dict[str, Run]) -> list[Metric]:
    """Return the metrics of runs by name; a name is that of a folder, printable and as long as a disk allows."""
    each = [((name,), run) for name, run in runs.items()]
    trainings = [((*names, label), one) for names, run in each for label, one in run.trainings.items()]
    return [
        *(one.of(each, ("run",)) for one in RUN),
        *(one.of(trainings, ("run", "training")) for one in TRAINING),
    ]


@dataclass(frozen=True)
class _Kept:
    """A run that was read; None: it cannot be."""

    signature: Signature
    run: Run | None
    again: float  # monotonic time from which on a change is read


class RunReader:
    """Reads the runs of a results folder that changed last, each only when its files have changed.

    Parameters
    ----------
    runs : Runs
    newest : int
        Number of runs.
    """

    def __init__(self, runs: Runs, newest: int = NEWEST) -> None:
        self.readings = 0  # so far
        self._runs, self._newest = runs, newest
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def read(self) -> tuple[dict[str, Run], int]:
        """Return name → run, and the number of runs that cannot be read."""
        found: dict[str, Run] = {}
        with self._lock:
            names = self._runs.names()[: self._newest]
            self._kept = {name: self._current(name) for name in names}
            for name, kept in self._kept.items():
                if kept.run is not None:
                    found[name] = replace(kept.run, live=self._live(self._runs.folder / name))
        return found, len(names) - len(found)

    def _current(self, name: str) -> _Kept:
        folder, kept, now = self._runs.folder / name, self._kept.get(name), time.monotonic()
        signature = signature_of(folder, (METRICS_FILE, COPY))
        if kept is not None and (kept.signature == signature or now < kept.again):
            return kept
        self.readings += 1
        path, run = folder / METRICS_FILE, None
        try:
            if not path.exists():
                run = Run()  # it has only begun
            elif path.stat().st_size <= LARGEST:
                run = Run.of(read_results(path))
        except (OSError, ValueError) as error:
            LOG.warning("run %s has no metrics: %s", name, printable(str(error)))
        end = time.monotonic()
        return _Kept(signature, run, end + (end - now) * (1 / SHARE - 1))

    def _live(self, folder: Path) -> Live | None:
        """Return what a run is doing; None as well for one that was stopped without an end."""
        try:
            live = read_live(folder)
        except (OSError, ValueError):  # its page says why
            return None
        return live if live is not None and self._runs.clock() - live.written <= SILENCE else None


def router(
    folder: Path, fleet: Callable[[], Sequence[FleetDevice]], alerts: Callable[[], Sequence[Alert]] = list
) -> APIRouter:
    """Return the route `/metrics`.

    Parameters
    ----------
    folder : Path
        The results folder.
    fleet : callable
        Returns all devices; it is called in a thread.
    alerts : callable
        Returns the alerts that last.
    """
    made, reader = APIRouter(), RunReader(Runs(folder))

    def expose(accept: str) -> tuple[bytes, str]:
        runs, unreadable = reader.read()
        server = Server(unreadable, damaged_lines(folder))
        found = [*device_metrics(fleet()), *run_metrics(runs), rules.metric(alerts())]
        found += [one.of([((), server)], ()) for one in SERVER]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(found))
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # a version of the format that is no number
            encode, kind = choose_encoder("")
        return encode(registry), kind

    async def metrics(request: Request) -> Response:
        content, kind = await run_in_threadpool(expose, request.headers.get("accept", ""))
        return Response(content, headers={"content-type": kind})

    made.add_api_route("/metrics", metrics, methods=["GET", "HEAD"], response_model=None)
    return made


class _Collected(Collector):
    """Metrics that are there already, for prometheus-client."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._found


def documented() -> list[tuple[str, str, str, str]]:
    """Return (name, type, labels, meaning) of every metric."""
    return [
        (one.exposed, one.of([], labels).type, ", ".join([*labels, *([one.label] if one.label else [])]), one.about)
        for table, labels in TABLES
        for one in table
    ]
