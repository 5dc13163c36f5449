"""The life cycle of a device's models: offered, checked, tried in shadow, approved, served, kept, restored.

    offered ─ check ─ [shadow] ─ [candidate: waits for approval] ─ served ─ kept ─ (restored: served)
                 └────────┴──────────────────┴ refused

What is decided is on disk before it holds: a process killed at any point starts with the model it served, and with a
candidate where there was one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.agent.candidate import Check, Samples, Shadow, check, comparable
from fedtta.client.agent.live import Live, as_floats
from fedtta.client.agent.log import EventLog
from fedtta.client.agent.manifest import Model, State
from fedtta.client.agent.observation import Recent
from fedtta.client.agent.store import UNREADABLE, Store
from fedtta.client.config import AgentConfig
from fedtta.client.served import ServedModel, version_of
from fedtta.messages.requests import AdapterRow

ROLLED_BACK, REJECTED = "rolled back by the operator", "rejected by the operator"
LOST = "lost"  # see `check`
FINAL = (ROLLED_BACK, REJECTED)  # a model that is offered again does not undo them
SUPERSEDED = "another model came before it was served"
OUTCOME: dict[State, str] = {"served": "promoted", "shadow": "shadow", "candidate": "waiting for approval"}


@dataclass(frozen=True)
class Changed:
    """A model after a decision of the operator.

    Parameters
    ----------
    version : str
    state : str
        "served" or "refused".
    samples : int
        Samples that its adapter has seen.
    """

    version: str
    state: str
    samples: int = 0


class Lifecycle:
    """The models of one device, on disk and in memory.

    Parameters
    ----------
    config : AgentConfig
    row : AdapterRow
        The adapter that models are served with.
    store : Store
    note : callable
        Called with a line of text for the owner.
    log : EventLog
    save : callable
        Saves the state of the live model's adapter; called with `saving` held, and does not raise.

    Attributes
    ----------
    live : Live or None
        The served model. It predicts, and is replaced, with `predicting` held.
    predicting, saving : RLock
        `saving` is held where the state directory is written, and is taken first where both are needed.
    """

    def __init__(
        self,
        config: AgentConfig,
        row: AdapterRow,
        store: Store,
        note: Callable[[str], None],
        log: EventLog,
        save: Callable[[], None],
    ) -> None:
        self.config, self.row, self.store, self.log = config, row, store, log
        self._note, self._save = note, save
        self.predicting, self.saving = threading.RLock(), threading.RLock()
        self.live: Live | None = None
        self._shadow: Shadow | None = None

    def start(self) -> None:
        """Serve what the state directory holds, and go on with a candidate; what does not fit is noted."""
        try:
            if self.store.served is None or self._start_with(self.store.served):
                self._resume()
        except OSError as error:
            self._note(f"the state directory cannot be written: {error}")

    def _start_with(self, served: Model) -> bool:
        """Serve a model, or an older one if its files cannot be read; return False if it does not fit the adapter."""
        for model in (served, *self._older()):
            found = self.store.load_model(model)
            if found is None:
                continue
            try:
                self.live = self._fitted(found)
            except ValueError as error:
                self._note(f"the model kept does not fit adapter = {self.config.adapter}: {error}; waiting for one")
                return False
            if model != served:
                self._note(f"model {served.version} cannot be read: {model.version} is served")
                self.store.promote(model.name, UNREADABLE)
            break
        return True

    def training_of(self, run: str) -> str:
        """Return the training of a run whose model was offered last; empty if that was of another run, or none."""
        before = self.store.models[-1].origin.split("/") if self.store.models else []
        return before[1] if len(before) == 3 and before[0] == run else ""

    def events(self) -> dict[str, int]:
        """Return how often the guard has acted, by kind, of all models; any thread may ask."""
        live = self.live
        if live is None:
            return {}
        events = dict(live.former_events)
        for kind, count in (live.guard.events if live.guard else {}).items():
            events[kind] = events.get(kind, 0) + count
        return events

    @property
    def waiting(self) -> str:
        """Return "shadow <version>" or "waiting for approval <version>"; empty without a candidate."""
        model = self.store.candidate
        return f"{OUTCOME[model.state]} {model.version}" if model else ""

    @property
    def refused(self) -> str:
        """Return "<version>: <reason>" of the last refused model; empty if there is none."""
        refused = [model for model in self.store.models if model.state == "refused"]
        return f"{refused[-1].version}: {refused[-1].reason}" if refused else ""

    @property
    def due(self) -> bool:
        """Return whether `conclude` has something to do at once."""
        return self._shadow is not None and self._shadow.ended and not self._shadow.postponed

    def shade(self, pixels: NDArray[Any], answered: NDArray[np.float32]) -> None:
        """Let the shadow predict what the live model has predicted; `predicting` is held. Never raises."""
        if self._shadow is not None:
            self._shadow.predict(as_floats(pixels), answered)

    def offer(self, served: ServedModel, samples: Samples, file: str = "") -> str:
        """Check a model, and serve it, try it in shadow or let it wait for approval.

        Parameters
        ----------
        served : ServedModel
        samples : Samples
            What it is checked on.
        file : str
            SHA-256 of the model file that it comes from, if any.

        Returns
        -------
        str
            "promoted <version>", "shadow <version>", "waiting for approval <version>" or "refused: <reason>".
        """
        digest = served.digest()
        version = version_of(served.origin, digest)
        known = next((model for model in self.store.models if model.digest == digest), None)
        if known is not None and known.state in OUTCOME and self._holds(known):
            return f"{OUTCOME[known.state]} {version}"
        self.log.write("offered", version=version, samples=len(samples.pixels), labels=samples.labels is not None)
        if known is not None and known.reason in FINAL:
            return self._refused(version, known.reason)
        told = None
        while told is None:  # once more where the operator serves another model meanwhile
            told = self._compared(served, digest, samples, file)
        return told

    def _compared(self, served: ServedModel, digest: str, samples: Samples, file: str) -> str | None:
        """Check a model and decide on it; None if the model that it was compared with is not in service any more."""
        version, live, model = version_of(served.origin, digest), self.live, self.store.served
        lost = model.check.get(LOST, 0.0) if model and not file else 0.0
        result = check(served, live.served if live else None, samples, self.config.acceptance, lost)
        with self.saving:
            if self.live is not live:
                return None
            try:
                if result.reason:
                    self.store.refuse(digest, served.origin, result.reason, result.figures)
                    return self._refused(version, result.reason, result)
                return self._admit(self._made(served), result, samples.labels is not None, file)
            except OSError as error:
                return self._refused(version, f"cannot be stored: {error}", result)

    def approve(self, version: str = "") -> Changed:
        """Serve the candidate, also one whose trial has not ended.

        Raises
        ------
        ValueError
            There is no candidate of that version, or it cannot be read.
        OSError
            The state directory cannot be written; nothing has changed.
        """
        with self.saving:
            model = self._candidate(version)
            if self._shadow is not None and self._shadow.failure:
                raise ValueError(f"model {model.version} {self._shadow.failure}")
            live = self._shadow.live if self._shadow else self._loaded(model)
            self._serve(live, lambda: self.store.promote(model.name, check=decided(model)), "promoted", approved=True)
            return Changed(live.version, "served", live.samples)

    def reject(self, version: str = "") -> Changed:
        """Drop the candidate; raises as `approve`."""
        with self.saving:
            model = self._candidate(version)
            self.store.refuse(model.digest, model.origin, REJECTED, model.check)
            self._end_shadow()
            self._refused(model.version, REJECTED)
            return Changed(model.version, "refused")

    def restore(self, version: str = "") -> Changed:
        """Serve an older model again, with what its adapter had learned; by default the one served before.

        Raises
        ------
        ValueError
            There is no such model, it cannot be read, or it does not fit the adapter.
        OSError
            The state directory cannot be written; nothing has changed.
        """
        with self.saving:
            kept = [model for model in self.store.models if model.state == "kept"]
            found = _named(kept, version) if version else self._older()
            if not found:
                there = ", ".join(model.version for model in kept) or "none"
                raise ValueError(f"no older model {version or 'that was served before'}; there are: {there}")
            live = self._loaded(found[0])
            self._serve(live, lambda: self.store.promote(found[0].name, ROLLED_BACK, decided(found[0])), "rolled back")
            self._try_again(live)
            return Changed(live.version, "served", live.samples)

    def conclude(self) -> None:
        """Promote or refuse a shadow whose trial has ended; on a disk that cannot be written, later."""
        with self.saving:
            shadow, model = self._shadow, self.store.candidate
            if shadow is None or model is None or not shadow.ended:
                return
            result = shadow.result(self.config.acceptance)
            if not shadow.postponed:
                self.log.write("shadow ended", version=model.version, **result.figures)
            figures = {**model.check, **result.figures}
            try:
                if result.reason:
                    self.store.refuse(model.digest, model.origin, result.reason, figures)
                    self._end_shadow()
                    self._refused(model.version, result.reason, result)
                elif self.config.approval:
                    self.store.mark(model.name, "candidate", figures)
                    self._end_shadow()
                    self.log.write("waiting for approval", version=model.version)
                else:
                    self._serve(shadow.live, lambda: self.store.promote(model.name, check=figures), "promoted")
            except OSError as error:
                shadow.postponed = True
                self._note(f"model {model.version} waits: {error}")

    def _admit(self, live: Live, result: Check, labelled: bool, file: str) -> str:
        """Store a model that has passed its check, and serve it unless it has to wait; `saving` is held."""
        state, former = self._next_state(live, bool(file)), self.store.candidate
        version, figures = live.version, result.figures
        if state == "served":
            self._serve(live, lambda: self.store.add(live.served, "served", figures, file), "promoted", check=figures)
        else:
            self.store.add(live.served, state, figures, file)
            self.log.write("accepted", version=version, state=state, check=figures)
        with self.predicting:
            self._shadow = None if state != "shadow" else Shadow(live, self.config.shadow_samples, labelled)
        if former is not None:
            self.log.write("refused", version=former.version, reason=SUPERSEDED)
        if state == "shadow":
            self.log.write("shadow begun", version=version, samples=self.config.shadow_samples)
        if state != "served":
            self._note(f"model {OUTCOME[state]}: {version}")
        return f"{OUTCOME[state]} {version}"

    def _next_state(self, live: Live, own: bool = False) -> State:
        """Return the state of a model that has passed its check; `own`: it is the owner's own file.

        One that takes other images, or images prepared otherwise, or knows other classes than the served one cannot be
        compared with it: a run could choose these to avoid the comparison.
        """
        alike = self.live is None or comparable(live.served, self.live.served)
        if not (alike or own or self.config.policy.serve == "any"):
            return "candidate"
        if self.config.shadow_samples and self.live is not None and alike:
            return "shadow"
        return "candidate" if self.config.approval else "served"

    def _resume(self) -> None:
        """Go on with the candidate of the process before: a trial begins again, from its first sample."""
        model = self.store.candidate
        if model is None or (model.state == "candidate" and self.config.approval):
            return
        try:
            live = self._loaded(model)
        except ValueError as error:
            self._note(f"candidate {model.version} refused: {error}")
            self.store.refuse(model.digest, model.origin, str(error), model.check)
            return
        state = self._next_state(live)
        if model.state == "candidate" and state == "shadow":  # it is no longer to be approved, and has had its trial
            state = "served"
        if state == "served":
            self._serve(live, lambda: self.store.promote(model.name), "promoted")
        elif state == "shadow":
            self._shadow = Shadow(live, self.config.shadow_samples, "accuracy" in model.check)
        else:
            self.store.mark(model.name, state, model.check)

    def _try_again(self, live: Live) -> None:
        """Begin a candidate's trial again, beside a model that was restored; one unlike that waits for approval."""
        shadow, model = self._shadow, self.store.candidate
        if shadow is None or model is None:
            return
        alike = comparable(shadow.live.served, live.served)
        with self.predicting:
            self._shadow = Shadow(shadow.live, self.config.shadow_samples, shadow.labelled) if alike else None
        if not alike:
            self.log.write("waiting for approval", version=model.version)
            try:
                self.store.mark(model.name, "candidate", model.check)
            except OSError as error:  # after a restart it waits, too
                self._note(f"model {model.version} waits: {error}")

    def _serve(self, live: Live, commit: Callable[[], object], event: str, **values: Any) -> None:
        """Put a model into service, on disk and then in memory; `saving` is held.

        Raises
        ------
        OSError
            As `commit`; nothing has changed.
        """
        self._save()  # what the former model's adapter has learned
        commit()
        with self.predicting:
            former = self.live
            live.former_events, live.recent = self.events(), Recent()  # of a model that was tried, too
            self.live = live
            if self._shadow is not None and self._shadow.live is live:
                self._shadow = None
        live.changed = True  # the newest snapshot is that of the served model
        self._note(f"model {live.version} " + (f"replaces {former.version}" if former else "is served"))
        self.log.write(event, version=live.version, former=former.version if former else "", **values)
        self._save()

    def _made(self, served: ServedModel) -> Live:
        watched = self.config.guard and self.config.adapter_name != "none"  # "none" does not adapt
        return Live(served, self.config.limits if watched else None, partial(self._guard, served))

    def _guard(self, served: ServedModel, text: str) -> None:
        """Tell what the guard of a model does, which may be one in its trial."""
        tried = self._shadow.live if self._shadow else None
        if tried is not None and tried.served is served:
            self._note(f"model {tried.version} in shadow: {text}")
            self.log.write("guard", what=text, version=tried.version)
        else:
            self._note(text)
            self.log.write("guard", what=text)

    def _fitted(self, served: ServedModel) -> Live:
        """Return a stored model with this device's adapter and its newest snapshot; ValueError if it does not fit."""
        if served.row.base != self.row.base:
            raise ValueError(f"its base is {served.row.base}")
        same = served.row.adapter == self.row.adapter
        live = self._made(replace(served, row=self.row, chosen=served.chosen if same else {}))
        if served.digest() != live.digest:
            self._note(f"the adapter was {served.row.adapter}: what that had learned from the stream is dropped")
        found = self.store.load(live.digest)
        if found is not None:
            entry, arrays = found
            try:
                live.load(arrays, entry.samples)
            except ValueError as error:
                self._note(f"snapshot {entry.name} refused: {error}")
        return live

    def _loaded(self, model: Model) -> Live:
        """Return a model from the state directory; ValueError if it cannot be read or does not fit."""
        served = self.store.load_model(model)
        if served is None:
            raise ValueError(f"model {model.version} cannot be read")
        return self._fitted(served)

    def _candidate(self, version: str) -> Model:
        """Return the candidate; ValueError if there is none, or one of another version."""
        model = self.store.candidate
        if model is None or (version and not _named([model], version)):
            there = f"; there is {model.version}" if model else ""
            raise ValueError(f"no model {version}{' ' if version else ''}waits to be served{there}")
        return model

    def _holds(self, model: Model) -> bool:
        """Return whether a model is in service, or can be put there; otherwise it is taken when it is offered again."""
        if model.state == "served":  # an older one is in service if its files cannot be read
            return self.live is not None and self.live.digest == model.digest
        return self.store.load_model(model) is not None

    def _older(self) -> list[Model]:
        """Return the models that were served before and not withdrawn, the last one first."""
        kept = [model for model in self.store.models if model.state == "kept" and not model.reason]
        return sorted(kept, key=lambda model: model.served_at, reverse=True)

    def _end_shadow(self) -> None:
        """End the trial, if there is one."""
        with self.predicting:
            self._shadow = None

    def _refused(self, version: str, reason: str, result: Check | None = None) -> str:
        """Note and log a refusal; return the reply's text."""
        self._note(f"model {version} refused: {reason}")
        self.log.write("refused", version=version, reason=reason, check=result.figures if result else {})
        return f"refused: {reason}"


def decided(model: Model) -> dict[str, float]:
    """Return the figures of a model that the owner has decided for: losses of accuracy count from it on."""
    return {**model.check, LOST: 0.0}


def _named(models: list[Model], version: str) -> list[Model]:
    """Return the models of a version, given whole or by its last part."""
    return [model for model in models if version in (model.version, model.version.rpartition("/")[2])]
