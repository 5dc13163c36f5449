"""The agent: predictions in order of arrival, federated requests beside them, state that survives the process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedtta.client.agent.config import AgentConfig
from fedtta.client.agent.live import Live, images
from fedtta.client.agent.predictions import NoModel, Prediction
from fedtta.client.agent.store import Store
from fedtta.client.node import Node, make_device, perform
from fedtta.client.resources import resolve_device
from fedtta.client.serving import Served
from fedtta.client.state import MemoryState, forget_runs
from fedtta.messages.replies import Reply
from fedtta.messages.requests import AdapterRow, Base, Evaluate, Request

NOTES = 100  # notes kept, the newest ones
PRIVATE = "private"  # folder in `state-dir` for the private state of trainings


@dataclass(frozen=True)
class Saved:
    """A saved snapshot of the adapter's state.

    Parameters
    ----------
    snapshot : str
        Its name.
    version : str
        Version of its model.
    samples : int
        Samples predicted before it.
    """

    snapshot: str
    version: str
    samples: int


@dataclass(frozen=True)
class Status:
    """State of an agent; the fields are those of `StatusReply` in agent.proto, except for the queue's.

    Parameters
    ----------
    version, adapter : str
        Model version (empty: no model yet) and adapter with its options.
    classes : tuple of str
        Class names in the order of the probabilities' columns; empty without a model.
    samples, unsaved_samples : int
        Predicted since the model was installed or the adapter was reset; and those of them not covered by a snapshot.
    holding : bool
        Whether predictions are those of the unadapted model.
    guard_events : dict
        Kind of collapse or degenerate input → number of times that the guard has acted on it.
    snapshots : list of str
        Names, oldest first.
    notes : list of str
        Events that the owner should know of, oldest first: history reset, files refused, failed saves.
    uptime : float
        Seconds.
    training : str
        The federated request that is being processed; empty: none.
    shape : tuple of int
        C, H, W of the images that the model takes; empty without a model.
    """

    version: str = ""
    adapter: str = ""
    classes: tuple[str, ...] = ()
    samples: int = 0
    unsaved_samples: int = 0
    holding: bool = False
    guard_events: dict[str, int] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uptime: float = 0.0
    training: str = ""
    shape: tuple[int, ...] = ()


class Agent:
    """A device's model, adapter and private state.

    Predictions run one after the other in order of arrival, federated requests run one at a time, and both run
    concurrently. A background thread saves the adapter's state.

    Parameters
    ----------
    config : AgentConfig
    clock : callable
        Monotonic time in seconds.

    Raises
    ------
    StateInUse
        Another agent uses the state directory.
    ValueError
        A newer version of the agent wrote the state directory, or the device does not exist.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        torch.set_num_threads(1)  # equal bits; and training leaves a core to predictions
        self.config, self._clock, self._start = config, clock, clock()
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._events: dict[str, int] = {}  # of the guards of former models
        self._device = resolve_device(config.device)
        name, base = config.adapter_name, cast(Base, config.base)
        self._row = AdapterRow(name, name, config.adapter_options, base)
        self._private = config.state_folder / PRIVATE
        self._node = self._own_node()
        self._live: Live | None = None
        self._saved_at, self._tried_at, self._changed, self._model_saved = 0, 0, False, True
        self._current = ""
        self._predicting, self._saving, self._working = threading.RLock(), threading.RLock(), threading.Lock()
        self._store = Store(config.state_folder, config.snapshots_kept, self._note)
        try:
            self._restore()
        except BaseException:
            self._store.close()
            raise
        self._due, self._closed = threading.Event(), False
        self._saver = threading.Thread(target=self._save_when_due, name="save", daemon=True)
        self._saver.start()

    @property
    def per(self) -> Literal["sample", "batch"]:
        """Return "sample" if requests may be joined into one batch, otherwise "batch"."""
        live = self._live
        return "batch" if live is None else live.adapter.per

    def check(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        """Return images as the network takes them, float32 in [0, 1].

        Raises
        ------
        NoModel
            There is no model yet.
        ValueError
            Type, shape or a value is not allowed; the message names it.
        """
        return images(pixels, self._model().served.shape)

    def predict(self, pixels: NDArray[Any]) -> Prediction:
        """Adapt to images in order of arrival and predict them.

        Parameters
        ----------
        pixels : [B, C, H, W]
            uint8, or float32 in [0, 1]; B at least 1.

        Raises
        ------
        NoModel, ValueError
            As `check`, or the network's output is not finite. The adapter is unchanged then.
        """
        with self._predicting:
            live = self._model()
            position = live.samples
            rows, weights, adapted = live.predict(images(pixels, live.served.shape))
            self._changed = True
            waiting = live.samples - max(self._saved_at, self._tried_at)
        if waiting >= self.config.save_every_samples:
            self._due.set()
        return Prediction(rows, weights, live.version, adapted, position)

    def status(self) -> Status:
        """Return the state of the agent."""
        with self._predicting:
            live, events = self._live, dict(self._events)
            for kind, count in (live.guard.events if live and live.guard else {}).items():
                events[kind] = events.get(kind, 0) + count
            return Status(
                version=live.version if live else "",
                adapter=self.config.adapter,
                classes=live.served.classes if live else (),
                samples=live.samples if live else 0,
                unsaved_samples=live.samples - self._saved_at if live else 0,
                holding=bool(live and live.guard and live.guard.holding),
                guard_events=events,
                snapshots=self._store.names,
                notes=list(self._notes),
                uptime=self._clock() - self._start,
                training=self._current,
                shape=live.served.shape if live else (),
            )

    def snapshot(self) -> Saved:
        """Save the adapter's state now.

        Raises
        ------
        NoModel
            There is no model yet.
        OSError, ValueError
            The state could not be written, or a value is not finite; earlier snapshots are kept.
        """
        with self._saving:
            with self._predicting:
                live = self._model()
                arrays, samples = live.state(), live.samples
                self._changed, self._tried_at = False, samples
            try:
                if not self._model_saved:
                    self._store.save_model(live.served)
                    self._model_saved = True
                entry = self._store.save(arrays, samples, live.digest)
            except (OSError, ValueError):
                self._changed = True
                raise
            self._saved_at = samples
        return Saved(entry.name, live.version, entry.samples)

    def rollback(self, name: str = "") -> Saved:
        """Restore a snapshot, by default the newest one, and remove newer ones.

        Raises
        ------
        NoModel
            There is no model yet.
        ValueError
            There is no such snapshot, or it cannot be read; the message names it.
        OSError
            The newer snapshots could not be removed.
        """
        with self._saving, self._predicting:
            live = self._model()
            found = self._store.load(live.digest, name) if self._model_saved else None
            if found is None:
                raise ValueError("there is no snapshot to go back to")
            entry, arrays = found
            self._store.forget_after(entry.name)
            live.load(arrays, entry.samples)
            self._saved_at = self._tried_at = entry.samples
            self._changed = False
        self._note(f"rolled back to snapshot {entry.name}")
        return Saved(entry.name, live.version, entry.samples)

    def reset(self) -> Saved:
        """Reset the adapter to its state before the stream, and save that; raises as `snapshot` does."""
        with self._saving:
            with self._predicting:
                self._model().reset()
                self._saved_at, self._tried_at, self._changed = 0, 0, True
            self._note("reset: the adapter's history of the stream is dropped")
            return self.snapshot()

    def perform(self, request: Request) -> Reply:
        """Answer a federated request; after an evaluation of the served training, serve its model.

        Raises
        ------
        SettingsError, ValueError, FloatingPointError
            As `fedtta.client.device.perform`.
        """
        with self._working:
            self._current = request.kind.rpartition(".")[2]
            try:
                reply = perform(request, self._node)
                if isinstance(request, Evaluate):
                    self._take_over(request)
                self._forget_runs(request.run)
            finally:
                self._current = ""
        return reply

    def _forget_runs(self, current: str) -> None:
        """Remove the private state of old runs; a failure does not affect the reply."""
        try:
            for run in forget_runs(self._private, current, self.config.runs_kept):
                self._note(f"run {run} forgotten: it is not among the last {self.config.runs_kept}")
        except OSError as error:
            self._note(f"old runs could not be removed: {error}")

    def close(self) -> None:
        """Save unsaved state and release the state directory; predictions must have ended."""
        if self._closed:
            return
        self._closed = True
        self._due.set()
        self._saver.join()
        self._save()
        self._store.close()

    def _note(self, text: str) -> None:
        """Keep a note, unless it repeats the last one."""
        if not self._notes or self._notes[-1] != text:
            self._notes.append(text)

    def _own_node(self) -> Node:
        config = self.config
        settings = {"device": config.device, "state-dir": str(self._private)}
        if config.data_dir:
            settings["data-dir"] = config.data_dir
        return Node(config.partition_id, config.num_partitions, MemoryState(), config.role or None, settings)

    def _model(self) -> Live:
        if self._live is None:
            raise NoModel("no model yet: the evaluation that ends a training brings one")
        return self._live

    def _make(self, served: Served) -> Live:
        watched = self.config.guard and self.config.adapter_name != "none"  # "none" does not adapt
        limits = self.config.limits if watched else None
        return Live(served, limits, self._device, self._note)

    def _restore(self) -> None:
        """Restore model and snapshot from the state directory."""
        served = self._store.load_model(self._device)
        if served is None:
            return
        chosen = served.chosen if served.row.adapter == self._row.adapter else {}
        try:
            if served.row.base != self._row.base:
                raise ValueError(f"its base is {served.row.base}")
            live = self._make(replace(served, row=self._row, chosen=chosen))
        except ValueError as error:
            self._note(f"the model kept does not fit adapter = {self.config.adapter}: {error}; waiting for one")
            return
        found = self._store.load(live.digest)
        if found is not None:
            entry, arrays = found
            try:
                live.load(arrays, entry.samples)
            except ValueError as error:
                self._note(f"snapshot {entry.name} refused: {error}")
        # with another adapter than before it is saved as a new model
        self._model_saved = served.digest() == live.digest
        self._saved_at, self._live = live.samples, live

    def _take_over(self, request: Evaluate) -> None:
        """Serve the model of an evaluation, if it is of the served training and has changed."""
        run, training, wanted = request.run, request.task.training, self.config.training
        before = self._live.served.origin.split("/") if self._live else ["", ""]
        if training != (wanted or (before[1] if before[0] == run else training)):
            return
        try:
            served = make_device(request, self._node).serve(request, self._row)
            live = self._make(replace(served, origin=f"{run}/{training}/{request.round}"))
        except (ValueError, RuntimeError) as error:  # the evaluation itself has succeeded, and its result counts
            self._note(f"the model of {run}/{training} is not served: {error}")
            return
        with self._saving:
            if self._live is not None and self._live.digest == live.digest:
                return
            with self._predicting:
                self._install(live)
            self._save()

    def _install(self, live: Live) -> None:
        """Replace the model; the caller holds the lock on predictions."""
        text = f"model {live.version}"
        if self._live is not None:
            for kind, count in (self._live.guard.events if self._live.guard else {}).items():
                self._events[kind] = self._events.get(kind, 0) + count
            text += f" replaces {self._live.version}; its history of {self._live.samples} samples is dropped"
        self._note(text)
        self._live, self._saved_at, self._tried_at = live, 0, 0
        self._changed, self._model_saved = True, False

    def _save(self) -> None:
        """Save unsaved state; a failure is noted and retried after the next interval."""
        with self._saving:
            if self._live is None or (self._model_saved and not self._changed):
                return
            try:
                self.snapshot()
            except (OSError, ValueError) as error:
                self._note(f"not saved: {error}")

    def _save_when_due(self) -> None:
        """Save after the configured numbers of samples and seconds, until the agent is closed."""
        while not self._closed:
            self._due.wait(self.config.save_every_seconds)
            self._due.clear()
            if not self._closed:
                self._save()
