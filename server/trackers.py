"""Trackers: a run's numbers in TensorBoard, MLflow and Weights & Biases.

Each tracker writes in a thread of its own, so that a slow or unreachable one delays no round, and its failures never
end a run. What it has written is noted in `trackers/<name>.json` in the run folder: a resumed run continues the same
tracker run, repeats no number, and adds those that are missing. `fedtta.server.points` says which numbers there are.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import secrets
import shutil
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedtta.server.environment import LOCAL
from fedtta.server.events import Event
from fedtta.server.points import Means, Point, point_of
from fedtta.server.resume import earlier_events
from fedtta.settings import Settings, SettingsError
from fedtta.settings.files import write_atomically
from fedtta.settings.logs import redacted

LOG = logging.getLogger("fedtta.trackers")
FOLDER = "trackers"
PROJECT = "fedtta"  # MLflow's experiment, the project of Weights & Biases
WAITING = 10_000  # points that wait for a slow tracker, at most
PATIENCE = 30.0  # seconds that the end of a run waits for it
FAILURES = 20  # after which a tracker is not opened again: each attempt may leave a file
PARAMETERS = 100  # of MLflow, in one request


# Where it goes


@dataclass(frozen=True)
class Start:
    """What a tracker gets at the start.

    Parameters
    ----------
    folder : Path
        The run folder.
    parameters : dict
        The settings.
    tags : dict
        Commit, versions and hardware.
    id : str
        The tracker's own name of the run that is continued; empty: it is new.
    """

    folder: Path
    parameters: dict[str, Any]
    tags: dict[str, str]
    id: str = ""


class Tracker(Protocol):
    """Writes the points of one run; every method may raise.

    Attributes
    ----------
    id : str
        The tracker's own name of the run.
    """

    id: str

    def __init__(self, start: Start) -> None:
        """Begin or continue a run."""

    def write(self, point: Point) -> None:
        """Write a point; it outlives this process."""

    def end(self, completed: bool) -> None:
        """End the run; one that failed may be continued."""


class TensorBoard:
    """Files in `<run folder>/tensorboard`."""

    def __init__(self, start: Start) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.id = "tensorboard"
        self._writer = writer(start.folder / self.id)
        if not start.id:
            for name, values in (("settings", start.parameters), ("tags", start.tags)):
                rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
                self._writer.add_text(name, f"| | |\n| --- | --- |\n{rows}")

    def write(self, point: Point) -> None:
        """Write a point."""
        for name, value in point.numbers.items():
            self._writer.add_scalar(name, value, point.step or 0, walltime=point.at)
        self._writer.flush()

    def end(self, completed: bool) -> None:
        """Close the file."""
        self._writer.close()


class Mlflow:
    """A run in the experiment "fedtta" of the server that `MLFLOW_TRACKING_URI` names, or of a folder of files.

    Without the variable the folder is `mlruns` beside the run folder. MLflow wants to be told that files are meant; and
    its telemetry is off, unless the environment turns it on.
    """

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            address = (start.folder.absolute().parent / "mlruns").as_uri()
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=address)
        if start.id:
            self._client.update_run(start.id, "RUNNING")
            self.id = start.id
            for key, value in start.tags.items():
                self._client.set_tag(self.id, key, value)
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        run = self._client.create_run(number, run_name=start.folder.name, tags=start.tags)
        self.id = run.info.run_id
        parameters = [self._entities.Param(key, str(value)) for key, value in start.parameters.items()]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self.id, params=parameters[first : first + PARAMETERS])

    def write(self, point: Point) -> None:
        """Write a point."""
        at, step = int(1000 * point.at), point.step or 0
        metrics = [self._entities.Metric(name, value, at, step) for name, value in point.numbers.items()]
        for first in range(0, len(metrics), 1000):  # the most in one request
            self._client.log_batch(self.id, metrics=metrics[first : first + 1000])

    def end(self, completed: bool) -> None:
        """Set the run's status."""
        self._client.set_terminated(self.id, "FINISHED" if completed else "FAILED")


class Wandb:
    """A run in the project "fedtta" of Weights & Biases, with a copy in `<run folder>/wandb`.

    Account, project and mode are those of its environment variables. It learns numbers, settings and tags, and not the
    machine's code, command lines, output and load.
    """

    def __init__(self, start: Start) -> None:
        wandb = importlib.import_module("wandb")
        quiet = wandb.Settings(
            silent=True,  # and no question for an account
            reinit="create_new",  # whatever else this process logs there
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self.id = start.id or secrets.token_hex(4)
        given = {"project": PROJECT, "name": start.folder.name}
        named = {key: value for key, value in given.items() if not os.environ.get(f"WANDB_{key.upper()}")}
        config = {**start.parameters, "tags": start.tags}
        self._run = wandb.init(
            id=self.id, resume="allow", dir=start.folder, config=config, allow_val_change=True, settings=quiet, **named
        )
        self._defined: set[str] = set()

    def write(self, point: Point) -> None:
        """Write a point; its step is a number of its series, for its own steps only ever rise."""
        step = f"{point.series}/step"
        if point.step is not None and point.series not in self._defined:
            self._run.define_metric(f"{point.series}/*", step_metric=step)
            self._defined.add(point.series)
        self._run.log(point.numbers if point.step is None else {**point.numbers, step: point.step})

    def end(self, completed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if completed else 1)


#: Name in the setting `track`, and of the extra that installs it → the tracker and the package that it needs.
TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (Mlflow, "mlflow"),
    "wandb": (Wandb, "wandb"),
}


def tracker_names(settings: Settings) -> list[str]:
    """Return the trackers of a run.

    Raises
    ------
    SettingsError
        One is unknown, or its package is not installed.
    """
    names = list(dict.fromkeys(word.strip() for word in settings.track.split(","))) if settings.track else []
    for name in names:
        if name not in TRACKERS:
            raise SettingsError(f"track = {settings.track!r}: {name!r} is none of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(TRACKERS[name][1]) is None:
            raise SettingsError(f"track = {settings.track!r}: {name} is not installed: pip install 'fedtta[{name}]'")
    return names


# How it gets there


@dataclass
class Written:
    """What a tracker has of a run: `trackers/<name>.json`.

    Parameters
    ----------
    id : str
        The tracker's own name of the run.
    last : dict
        Series → its last step that was written.
    """

    id: str = ""
    last: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Written:
        """Read the file, if there is one; ValueError for a damaged one."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); without it the tracker begins a new run") from error


class Worker(threading.Thread):
    """Writes one tracker's points in order.

    The first failure is logged, all are counted. After one the tracker is opened again for the next point, unless there
    have been `FAILURES`.

    Parameters
    ----------
    name : str
        In `TRACKERS`.
    start : Start
        Its `id` is that of `trackers/<name>.json`, if there is one.
    """

    def __init__(self, name: str, start: Start) -> None:
        super().__init__(name=name, daemon=True)
        self.lost = 0
        self._start, self._path = start, start.folder / FOLDER / f"{name}.json"
        self._points: queue.Queue[Point | bool] = queue.Queue(WAITING)
        self._written: Written | None = None
        self._tracker: Tracker | None = None

    def put(self, one: Point | bool) -> None:
        """Let a point be written, or the run be ended with whether it is complete."""
        try:
            self._points.put_nowait(one)
        except queue.Full:
            self._failed(f"{WAITING} points are waiting")

    def run(self) -> None:
        """Write until the run ends."""
        self._try(None)
        while isinstance(one := self._points.get(), Point):
            self._try(one)
            self._points.task_done()
        self._try(one)

    def waiting(self) -> int:
        """Return how many points are waiting."""
        return self._points.unfinished_tasks

    def _try(self, one: Point | bool | None) -> None:
        try:
            self._do(one)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            self._tracker = None

    def _do(self, one: Point | bool | None) -> None:
        written = self._written = self._written or Written.read(self._path)
        if isinstance(one, Point) and (one.step or 0) <= written.last.get(one.series, -1):
            return
        if self._tracker is None:
            if self.lost >= FAILURES:
                raise RuntimeError(f"given up after {FAILURES} failures")
            start = Start(self._start.folder, self._start.parameters, self._start.tags, written.id)
            self._tracker = TRACKERS[self.name][0](start)
            written.id = self._tracker.id
            self._save(written)
        if isinstance(one, Point):
            written.last[one.series] = one.step or 0
            self._save(written)  # before: a point that a killed process has written must not be there twice
            self._tracker.write(one)
        elif one is not None:
            self._tracker.end(one)

    def _save(self, written: Written) -> None:
        write_atomically(self._path, json.dumps(asdict(written)).encode())

    def _failed(self, text: str) -> None:
        self.lost += 1
        if self.lost == 1:  # said once
            LOG.warning("tracker %s: %s; the run goes on", self.name, redacted(text))


class Trackers:
    """A listener that gives the run's numbers to the trackers of the setting `track`.

    Parameters
    ----------
    settings : Settings
    folder : Path
        The run folder.

    Raises
    ------
    SettingsError
        See `tracker_names`.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._names, self._settings, self._folder = tracker_names(settings), settings, folder
        self._means = Means(settings)
        self._workers: list[Worker] = []

    def __call__(self, event: Event) -> None:
        """Track one event; the first one of a resumed run brings those before it."""
        if not self._names:
            return
        if event["event"] in ("run", "resumed"):
            if event["event"] == "run":  # what is there is of a run whose events were removed
                self._forget()
            self._begin(event)
            for earlier in earlier_events(self._folder) if event["event"] == "resumed" else ():
                self._put(earlier)
        self._put(event)
        if event["event"] == "end":
            self._end(event["status"] == "completed")

    def _forget(self) -> None:
        """Remove what trackers know of an earlier run in the folder; a warning where that fails, as it ends no run."""
        folder = self._folder / FOLDER
        try:
            if folder.is_dir():
                shutil.rmtree(folder)
        except OSError as error:
            LOG.warning("%s stays, and its runs in trackers go on: %s", folder, error)

    def _begin(self, event: Event) -> None:
        parameters = {key: value for key, value in self._settings.flat().items() if key not in LOCAL}
        tags = {key: str(event[key]) for key in ("commit", "bundle", "hardware") if event.get(key)} | event["versions"]
        for name in self._names:
            self._workers.append(Worker(name, Start(self._folder, parameters, tags)))
            self._workers[-1].start()

    def _put(self, event: Event) -> None:
        for one in self._means(event):
            if (point := point_of(one)) is not None:
                for worker in self._workers:
                    worker.put(point)

    def _end(self, completed: bool) -> None:
        """End the trackers' runs; one that does not come to its end in time is left behind."""
        for worker in self._workers:
            worker.put(completed)
        until = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
            lost = worker.lost + (worker.waiting() if worker.is_alive() else 0)
            if lost:
                LOG.warning("tracker %s: %d writes failed or were not waited for", worker.name, lost)
        self._workers = []
