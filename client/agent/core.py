"""The agent: predictions in order of arrival, federated requests beside them, state that survives the process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from numpy.typing import NDArray

from fedtta.client.agent.audit import Audit
from fedtta.client.agent.backend import UNSERVED, Backend, Offer
from fedtta.client.agent.encoded import Encoded
from fedtta.client.agent.lifecycle import Changed, Lifecycle
from fedtta.client.agent.live import Live, as_floats, checked
from fedtta.client.agent.log import EventLog
from fedtta.client.agent.manifest import Model
from fedtta.client.agent.observation import Observation
from fedtta.client.agent.predictions import NoModel, Prediction, joined, parts_of
from fedtta.client.agent.scans import Scan, Scans
from fedtta.client.agent.status import Saved, Status, of_any_adapter
from fedtta.client.agent.store import Store
from fedtta.client.agent.work import Work
from fedtta.client.config import AgentConfig
from fedtta.client.state import forget_runs
from fedtta.messages.replies import Evaluated, Identity, Reply, Telemetry
from fedtta.messages.requests import AdapterRow, Base, Evaluate, Observe, Request
from fedtta.models.deadline import Deadline, Stopped
from fedtta.models.exported import file_digest
from fedtta.settings import logs
from fedtta.settings.memory import return_freed_memory

LOG = logging.getLogger("fedtta.agent")
NOTES = 100  # notes kept, the newest ones
ATTEMPTS = 2  # to save before the agent stops
LOG_FILE = "agent.log"


class Agent:
    """A device's models, adapter and private state.

    Predictions run one after the other in order of arrival, federated requests run one at a time, and both run
    concurrently. A background thread saves the adapter's state and ends the trials of new models; another scans the
    device's own data when the agent starts, for which the first request of a run waits, but no prediction.

    Parameters
    ----------
    config : AgentConfig
    clock : callable
        Monotonic time in seconds.

    Attributes
    ----------
    log : EventLog
        `<state-dir>/agent.log`.
    observation : Observation
        What it counts since it began.
    trouble : str
        Why the adapter's state could not be saved the last time; empty: it could.

    Raises
    ------
    StateInUse
        Another agent uses the state directory.
    ValueError
        A newer version of the agent wrote the state directory, the device does not exist, or the model file cannot be
        served and there is no other model.
    """

    def __init__(self, config: AgentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._clock, self._start = config, clock, clock()
        self._notes: deque[str] = deque(maxlen=NOTES)
        name, base = config.adapter_name, cast(Base, config.base)
        self._row = AdapterRow(name, name, config.adapter_options, base)
        self._current, self._working = "", threading.Lock()
        self.trouble = ""
        self.log = EventLog(config.state_folder / LOG_FILE, config.log_mb << 20, config.name)
        self.backend = _backend(config, self._row, self._note)
        self._scans = Scans(config, self.log, self._note, self.backend.scan, clock)
        kept = config.snapshots_kept, self._note, config.models_kept
        self._store = Store(config.state_folder, *kept, self.backend.load)
        self.observation = Observation(config, clock)
        self.audit = Audit(config.state_folder, config.log_mb << 20)
        self._work = Work(config.policy, self.backend.check, config.private_folder, self.audit)
        self._models = Lifecycle(config, self._row, self._store, self._note, self.log, self._save)
        self.log.version = lambda: self.version
        try:
            self._models.start()
            if config.model:
                self._offer_file(Path(config.model))
        except BaseException as error:
            self.log.write("stop", error=str(error))
            self.backend.close()
            self._store.close()
            raise
        self.log.write("start", adapter=config.adapter)
        self._due, self._closed = threading.Event(), False
        self._saver = threading.Thread(target=self._save_when_due, name="save", daemon=True)
        self._saver.start()
        self._scans.begin(lambda: self._live.served if self._live else None)

    @property
    def per(self) -> Literal["sample", "batch"]:
        """Return "sample" if requests may be joined into one batch, otherwise "batch"."""
        live = self._live
        return "batch" if live is None else live.adapter.per

    @property
    def version(self) -> str:
        """Return the version of the model in service; empty if there is none."""
        return self._live.version if self._live else ""

    @property
    def serving(self) -> AbstractContextManager[object]:
        """Return a context in which the model in service is not replaced; a thread may enter it within itself."""
        return self._models.predicting

    def check(self, pixels: NDArray[Any] | Encoded) -> NDArray[Any]:
        """Return images [B, C, H, W] that the network can take, uint8 or float32 in [0, 1].

        Raises
        ------
        NoModel
            There is no model yet.
        ValueError
            Type, shape or a value is not allowed, or a file cannot be decoded; the message names it.
        """
        served = self._model().served
        if isinstance(pixels, Encoded):
            pixels = pixels.prepared(served.preprocessing, self.config.max_megapixels)
        return checked(pixels, served.shape)

    def predict(self, pixels: NDArray[Any]) -> Prediction:
        """Adapt to images in order of arrival and predict them.

        Many images are predicted in parts (`parts_of`), each of which is a batch for the adapter: what a request needs
        beside its images is bounded.

        Parameters
        ----------
        pixels : [B, C, H, W]
            uint8, or float32 in [0, 1]; B at least 1.

        Raises
        ------
        NoModel, ValueError
            As `check`, or the network's output is not finite. The adapter is unchanged then.
        """
        with self._models.predicting:
            live = self._model()
            position, known = live.samples, checked(pixels, live.served.shape)
            parts = parts_of(known, self.per, self.config.batch_limit)
            with live.undone_on_error() if len(parts) > 1 else nullcontext():
                answers = [live.predict(as_floats(part)) for part in parts]
            live.changed = True
            for part, answer in zip(parts, answers, strict=True):
                self._models.shade(part, answer[0])
            waiting = live.samples - max(live.saved, live.tried)
            self.observation.predicted(len(known))
        if waiting >= self.config.save_every_samples or self._models.due:
            self._due.set()
        return joined(answers, live.version, position)

    def status(self) -> Status:
        """Return the state of the agent between two predictions."""
        with self._models.predicting:
            return self._status(self._live)

    def telemetry(self) -> Telemetry:
        """Return what the device tells of itself, which waits for no prediction and no request; any thread may ask."""
        live = self._live
        return self.observation.telemetry(
            self._status(live),
            live.recent if live else None,
            live.guard if live else None,
            self._check_of(live),
            bool(self.trouble),
        )

    def _check_of(self, live: Live | None) -> Mapping[str, float]:
        """Return the figures of the live model's check; none while another one replaces it.

        Of a model that was checked with another adapter they are those of the network alone.
        """
        model = self._store.served
        if live is None or model is None or model.origin != live.served.origin:
            return {}
        return model.check if model.digest == live.digest else of_any_adapter(model.check)

    def _status(self, live: Live | None) -> Status:
        """Return the state of the agent; numbers are those of one moment while `predicting` is held."""
        choice, reason = live.choice if live else ("", "")
        return Status(
            version=live.version if live else "",
            adapter=self.config.adapter,
            classes=live.served.classes if live else (),
            samples=live.samples if live else 0,
            unsaved_samples=max(0, live.samples - live.saved) if live else 0,
            holding=bool(live and live.guard and live.guard.holding),
            guard_events=self._models.events(),
            snapshots=self._store.names,
            notes=list(self._notes),
            uptime=self._clock() - self._start,
            training=self._current,
            shape=live.served.shape if live else (),
            candidate=self._models.waiting,
            refused=self._models.refused,
            data_samples=self._scans.found.samples,
            data_skipped=self._scans.found.skipped,
            data_notes=self._scans.notes,
            estimated_accuracy=live.recent.accuracy(self._check_of(live), self.config.policy.rounded) if live else (),
            choice=choice,
            choice_reason=reason,
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
        with self._models.saving:
            with self._models.predicting:
                live = self._model()
                arrays, samples = live.state(), live.samples
                live.changed, live.tried = False, samples
            try:
                if self._store.served is None or self._store.served.digest != live.digest:
                    self._store.refit(live.served)  # another adapter, or an older model
                entry = self._store.save(arrays, samples, live.digest)
            except BaseException:
                live.changed = True
                raise
            live.saved, recovered, self.trouble = samples, bool(self.trouble), ""
        if recovered:
            self._note("saved again")
        self.log.write("saved", version=live.version, snapshot=entry.name, samples=samples)
        return Saved(entry.name, live.version, entry.samples)

    def rollback(self, name: str = "") -> Saved:
        """Restore a snapshot of the served model, by default the newest one, and remove newer ones.

        Raises
        ------
        NoModel
            There is no model yet.
        ValueError
            There is no such snapshot, or it cannot be read; the message names it.
        OSError
            The newer snapshots could not be removed; nothing has changed.
        """
        with self._models.saving, self._models.predicting:
            live = self._model()
            found = self._store.load(live.digest, name)
            if found is None:
                raise ValueError("there is no snapshot to go back to")
            entry, arrays = found
            before = live.saved, live.tried, live.changed
            try:
                with live.undone_on_error():
                    live.load(arrays, entry.samples)
                    self._store.forget_after(entry)
            except OSError:
                live.saved, live.tried, live.changed = before
                raise
        self._note(f"rolled back to snapshot {entry.name}")
        self.log.write("adapter rolled back", version=live.version, snapshot=entry.name, samples=entry.samples)
        return Saved(entry.name, live.version, entry.samples)

    def reset(self) -> Saved:
        """Reset the adapter to its state before the stream, and save that; raises as `snapshot` does."""
        with self._models.saving:
            with self._models.predicting:
                self._model().reset()
            self._note("reset: the adapter's history of the stream is dropped")
            self.log.write("adapter reset")
            return self.snapshot()

    def models(self) -> list[tuple[Model, list[str]]]:
        """Return the device's models in the order in which they were offered, each with its snapshots' names."""
        with self._models.saving:
            return [(model, self._store.snapshots(model.digest)) for model in self._store.models]

    def approve(self, version: str = "") -> Changed:
        """Serve the candidate; raises as `Lifecycle.approve`."""
        return self._models.approve(version)

    def reject(self, version: str = "") -> Changed:
        """Drop the candidate; raises as `Lifecycle.reject`."""
        return self._models.reject(version)

    def restore_model(self, version: str = "") -> Changed:
        """Serve an older model again; raises as `Lifecycle.restore`."""
        return self._models.restore(version)

    def rescan(self) -> Scan:
        """Look at the device's own data again.

        Raises
        ------
        ValueError
            The device has no data of its own, or they cannot be read.
        """
        return self._scans.scan("rescan", self._live.served if self._live else None)

    @property
    def scanning(self) -> bool:
        """Return whether the device's own data are being scanned outside a run."""
        return self._scans.running

    def perform(self, request: Request, deadline: Deadline | None = None) -> Reply:
        """Answer a federated request; after an evaluation of the served training, offer its model.

        Requests are answered one at a time, but for `Observe`, which is answered at once.

        Raises
        ------
        PolicyError, Stopped, OSError
            As `Work.perform`.
        SettingsError, ValueError, FloatingPointError
            As `fedtta.client.node.perform`.
        """
        if isinstance(request, Observe):
            return self._work.observe(request, self.telemetry)
        with self._working, logs.about(run=request.run, round=getattr(request, "round", None)):
            self._current = request.kind.rpartition(".")[2]
            start, failed = self._clock(), ""
            try:
                reply = self._work.perform(request, self._answer, deadline)
            except BaseException as error:
                failed = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._current = ""
                seconds = round(self._clock() - start, 3)
                self.log.write("request", kind=request.kind, seconds=seconds, error=failed)
        return reply

    def _answer(self, request: Request) -> Reply:
        """Answer a request that the policy allows."""
        serves = isinstance(request, Evaluate) and self._serves(request)
        reply, offer = self.backend.answer(request, self._row if serves else None)
        if isinstance(request, Evaluate) and isinstance(reply, Evaluated):
            reply = replace(reply, served=self._take_over(request, offer))
        if isinstance(reply, Identity):
            self._scans.take(reply)
        self._forget_runs(request.run)
        return reply

    def _forget_runs(self, current: str) -> None:
        """Remove the private state of old runs; a failure does not affect the reply."""
        try:
            for run in forget_runs(
                self.config.private_folder, current, self.config.runs_kept, self.config.policy.least_days_kept
            ):
                self._note(f"run {run} forgotten: it is not among the last {self.config.runs_kept}")
        except OSError as error:
            self._note(f"old runs could not be removed: {error}")

    def close(self) -> str:
        """Save unsaved state and release the state directory; predictions must have ended.

        Returns
        -------
        str
            What could not be saved, and why; empty: everything is saved.
        """
        if self._closed:
            return ""
        self._closed = True
        self._due.set()
        self._saver.join()
        try:
            for _ in range(ATTEMPTS):
                self._save()
            live, lost = self._live, ""
            if live is not None and live.changed:
                learned = f"what it learned from {live.samples - live.saved} samples is lost"
                lost = f"the adapter's state is not saved: {self.trouble}; {learned}"
            self.log.write("stop", error=lost)
            return lost
        finally:
            self.backend.close()
            self._store.close()

    def _note(self, text: str) -> None:
        """Keep a note and log it, unless it repeats the last one."""
        if not self._notes or self._notes[-1] != text:
            self._notes.append(text)
            LOG.warning("%s", text)
            self.log.write("note", text=text)

    @property
    def _live(self) -> Live | None:
        return self._models.live

    def _model(self) -> Live:
        if self._live is None:
            raise NoModel("no model yet: the evaluation that ends a training brings one")
        return self._live

    def _serves(self, request: Evaluate) -> bool:
        """Return whether the model of an evaluation is to be offered: it is of the served training."""
        training = self.config.training or self._models.training_of(request.run)
        return self.config.policy.serve != "never" and request.task.training == (training or request.task.training)

    def _take_over(self, request: Evaluate, offer: Offer | str) -> str:
        """Offer the model of an evaluation; return what became of it."""
        run, training = request.run, request.task.training
        if self.config.policy.serve == "never":
            return "refused: policy serve: no new model is served here"
        if not offer:
            return ""
        try:
            if isinstance(offer, str):
                raise ValueError(offer)
            return self._offer(offer)
        except Stopped:
            raise
        except UNSERVED as error:  # the evaluation itself has succeeded, and its result counts
            self._note(f"the model of {run}/{training} is not served: {error}")
            self.log.write("refused", version=f"{run}/{training}/{request.round}", reason=str(error))
            return f"refused: {error}"

    def _offer(self, offer: Offer) -> str:
        try:
            return self._models.offer(offer.served, offer.samples, offer.file)
        finally:
            offer.discard()

    def _offer_file(self, path: Path) -> None:
        """Offer the model file of the config, unless its content was accepted before."""
        try:
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            if file_digest(path) != self._store.file or self._live is None:  # its copy here may be damaged
                self._offer(self.backend.from_file(path))
        except UNSERVED as error:
            if self._live is None:
                raise ValueError(f"model = {path}: {error}") from error
            self._note(f"model = {path} is not served: {error}")
            self.log.write("refused", version=str(path), reason=str(error))

    def _save(self) -> None:
        """Save unsaved state; a failure is noted and retried after the next interval."""
        with self._models.saving:
            if self._live is None or not self._live.changed:
                return
            try:
                self.snapshot()
            except Exception as error:  # whatever it is, the agent goes on
                self._not_saved(error)

    def _not_saved(self, error: Exception) -> None:
        self.trouble = str(error) or type(error).__name__
        self._note(f"not saved: {error}")
        self.log.write("not saved", error=str(error))

    def _save_when_due(self) -> None:
        """Save after the configured numbers of samples and seconds, and return freed memory, until the end."""
        while not self._closed:
            self._due.wait(self.config.save_every_seconds)
            self._due.clear()
            if self._closed:
                return
            try:
                self._models.conclude()
                self._save()
                return_freed_memory()
            except Exception as error:  # this thread must go on
                self._not_saved(error)


def _backend(config: AgentConfig, row: AdapterRow, note: Callable[[str], None]) -> Backend:
    """Return what does the agent's work."""
    if config.runtime == "onnx":
        from fedtta.client.agent.light import Light

        return Light(config, row, note)
    from fedtta.client.agent.local import Local  # imports torch, which the other one does without

    return Local(config, row, note)
