"""The agent itself: predictions in order of arrival, federated work beside them, state that outlives the process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from client.agent.answers import NoModel, Prediction, Saved, Status
from client.agent.config import AgentConfig
from client.agent.live import Live, images
from client.agent.serving import Served
from client.agent.store import Entry, Store
from client.compute import resolve_device
from client.evaluation import Row
from client.phases import PHASES, Node, device_of, perform, round_of, task_of, variants_of
from client.state import MemoryState, forget_runs
from client.work import Done, Work

__all__ = ["Agent", "NoModel", "Prediction", "Saved", "Status"]

NOTES = 100  # the newest ones are kept
PRIVATE = "private"  # folder in `state-dir` of what training keeps


class Agent:
    """A device's model, adapter and private state.

    Predictions are one after the other, in order of arrival; federated work is one phase at a time; both go on beside
    each other, and what was learned is saved by a thread of its own.

    Parameters
    ----------
    config : AgentConfig
    clock : callable
        Seconds, never going back.

    Raises
    ------
    StateInUse
        Another agent has the state directory.
    ValueError
        The state directory is a newer program's, or the device does not exist.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        torch.set_num_threads(1)  # equal bits, and training beside predictions leaves a core to them
        self.config, self._clock, self._start = config, clock, clock()
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._events: dict[str, int] = {}  # of guards of models that were here before
        self._device = resolve_device(config.device)
        self._row = Row(config.adapter_name, config.adapter_name, config.adapter_options, config.base)
        self._private = config.state_folder / PRIVATE
        self._node = self._own_node()
        self._live: Live | None = None
        self._saved_at, self._tried_at, self._changed, self._model_saved = 0, 0, False, True
        self._phase = ""
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
        """Tell whether requests may be joined into one batch ("sample") or not ("batch", or no model yet)."""
        live = self._live
        return "batch" if live is None else live.adapter.per

    def check(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        """Return images as the network takes them, float32 in [0, 1].

        Raises
        ------
        NoModel
            No model has come yet.
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
            As `check`; or the network gives values that are not finite. Nothing is learned then.
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
        """Say how the agent is."""
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
                training=self._phase,
                shape=live.served.shape if live else (),
            )

    def snapshot(self) -> Saved:
        """Save what the adapter has learned, now.

        Raises
        ------
        NoModel
            There is nothing to save.
        OSError, ValueError
            It could not be written, or a value is not finite; what was saved before is still there.
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
        return _told(entry, live)

    def rollback(self, name: str = "") -> Saved:
        """Go back to a snapshot, the newest one without a name; newer ones are forgotten.

        Raises
        ------
        NoModel
            No model has come yet.
        ValueError
            There is no such snapshot, or it cannot be read; the message names it.
        OSError
            The newer ones could not be forgotten.
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
        return _told(entry, live)

    def reset(self) -> Saved:
        """Forget what the adapter has learned from the stream, and save that; raises as `snapshot` does."""
        with self._saving:
            with self._predicting:
                self._model().reset()
                self._saved_at, self._tried_at, self._changed = 0, 0, True
            self._note("reset: what was learned from the stream is forgotten")
            return self.snapshot()

    def perform(self, work: Work) -> Done:
        """Do federated work; after an evaluation of the training that is served, serve its model.

        Raises
        ------
        SettingsError, ValueError, FloatingPointError
            As `client.phases.perform`, or there is no such phase.
        """
        if work.phase not in PHASES:
            raise ValueError(f"unknown phase {work.phase!r}; there are: {', '.join(PHASES)}")
        with self._working:
            self._phase = work.phase
            try:
                done = perform(work, self._node)
                if work.phase == "evaluate":
                    self._take_over(work)
                self._forget_runs(str(work.config["run"]))
            finally:
                self._phase = ""
        return done

    def _forget_runs(self, current: str) -> None:
        """Remove the private state of old runs; work that is done is not lost when that fails."""
        try:
            for run in forget_runs(self._private, current, self.config.runs_kept):
                self._note(f"run {run} forgotten: it is not among the last {self.config.runs_kept}")
        except OSError as error:
            self._note(f"old runs could not be removed: {error}")

    def close(self) -> None:
        """Save what is not saved, and let others have the state directory; predictions must have ended."""
        if self._closed:
            return
        self._closed = True
        self._due.set()
        self._saver.join()
        self._save()
        self._store.close()

    def _note(self, text: str) -> None:
        """Keep a note; what goes on and on is said once."""
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
            raise NoModel("no model yet: it comes with the evaluation that ends a training")
        return self._live

    def _make(self, served: Served) -> Live:
        watched = self.config.guard and self.config.adapter_name != "none"  # which has nothing to be held back
        limits = self.config.limits if watched else None
        return Live(served, limits, self._device, self._note)

    def _restore(self) -> None:
        """Go on from what the state directory holds."""
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
        # of another adapter than before: to be saved as a new model
        self._model_saved = served.digest() == live.digest
        self._saved_at, self._live = live.samples, live

    def _take_over(self, work: Work) -> None:
        """Serve the model of an evaluation, if it is the one to serve and another than before."""
        run, task, wanted = str(work.config["run"]), task_of(work), self.config.training
        before = self._live.served.origin.split("/") if self._live else ["", ""]
        if task.training != (wanted or (before[1] if before[0] == run else task.training)):
            return
        record = work.records["arrays"], work.records.get("statistics")
        try:
            device = device_of(work, self._node)
            served = device.serve(round_of(work), task, *record, self._row, variants_of(work))
            live = self._make(replace(served, origin=f"{run}/{task.training}/{round_of(work)}"))
        except (ValueError, RuntimeError) as error:  # the evaluation itself is done, and its result counts
            self._note(f"the model of {run}/{task.training} is not served: {error}")
            return
        with self._saving:
            if self._live is not None and self._live.digest == live.digest:
                return
            with self._predicting:
                self._install(live)
            self._save()

    def _install(self, live: Live) -> None:
        """Put a model in the place of the one before; between two predictions."""
        text = f"model {live.version}"
        if self._live is not None:
            for kind, count in (self._live.guard.events if self._live.guard else {}).items():
                self._events[kind] = self._events.get(kind, 0) + count
            text += f" in place of {self._live.version}; what was learned from {self._live.samples} samples is dropped"
        self._note(text)
        self._live, self._saved_at, self._tried_at = live, 0, 0
        self._changed, self._model_saved = True, False

    def _save(self) -> None:
        """Save what is not saved; a failure is noted, predictions go on, and the next interval tries again."""
        with self._saving:
            if self._live is None or (self._model_saved and not self._changed):
                return
            try:
                self.snapshot()
            except (OSError, ValueError) as error:
                self._note(f"not saved: {error}")

    def _save_when_due(self) -> None:
        """Save every so many samples and seconds, until the agent is closed."""
        while not self._closed:
            self._due.wait(self.config.save_every_seconds)
            self._due.clear()
            if not self._closed:
                self._save()


def _told(entry: Entry, live: Live) -> Saved:
    return Saved(entry.name, live.version, entry.samples)
