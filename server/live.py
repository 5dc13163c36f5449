"""A listener that writes what a run is doing at the moment to `live.json`, for the page of `fedtta.watch`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedtta.server.events import STEPS, Event
from fedtta.server.report.live import LIVE_FILE, ClientState, Live, State

LOG = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds between two files, at least
HEARTBEAT = 5.0  # seconds after which the file is replaced though nothing has happened; see report.live.SILENCE
PACE = 10  # steps from which the time left is estimated


class RunState:
    """What a run is doing, from its events alone.

    A client is in exactly one state; a new phase asks some, and the others are idle, or gone until they come back.

    Parameters
    ----------
    started : float
        Seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self.started = started
        self.phase, self.since, self.round = "", started, None
        self.total = self.answered = self.steps = 0
        self.planned: int | None = None
        self.clients: dict[int, ClientState] = {}
        self._away: set[int] = set()
        self._marks: deque[float] = deque(maxlen=PACE + 1)  # ends of the last steps, and the begin of the first

    def __call__(self, event: Event) -> None:
        """Take note of one event; those that say nothing about it are ignored."""
        kind, at = event["event"], float(event.get("at", self.started))
        if kind in STEPS:
            self.steps += 1
            self._marks.append(at)
            return
        handler: Callable[[Event, float], None] | None = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event, at)

    def live(self, now: float) -> Live:
        """Return the state as it is written; `now` is in seconds since the epoch."""
        where = {"phase": self.phase, "since": self.since, "round": self.round}
        counts = {"total": self.total, "answered": self.answered, "steps": self.steps, "planned": self.planned}
        return Live(now, self.started, **where, **counts, end=self._end(), clients=dict(self.clients))  # type: ignore[arg-type]

    def _end(self) -> float | None:
        """Return when the run ends at the pace of its last steps."""
        if self.planned is None or len(self._marks) < 2:
            return None
        pace = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        return self._marks[-1] + max(0.0, pace) * max(0, self.planned - self.steps)

    def _set(self, partition: int, state: State, at: float) -> None:
        self.clients[partition] = ClientState(state, at)

    def _on_clients(self, event: Event, at: float) -> None:
        self.clients = {partition: ClientState("idle", at) for partition in range(len(event["sizes"]))}

    def _on_plan(self, event: Event, at: float) -> None:
        self.planned = max(0, int(event["steps"]))
        self._marks.append(at)

    def _on_resumed(self, event: Event, at: float) -> None:
        self._marks.clear()
        self._marks.append(at)

    def _on_phase(self, event: Event, at: float) -> None:
        self.phase, self.since, self.round = event["name"], at, event.get("round")
        self.total, self.answered = event["total"], 0
        asked = set(event.get("asked", ()))
        for partition, before in self.clients.items():
            state: State = "asked" if partition in asked else "gone" if partition in self._away else "idle"
            if before.state != state or state == "asked":
                self._set(partition, state, at)

    def _on_answered(self, event: Event, at: float) -> None:
        self.answered = min(self.answered + 1, self.total)
        known = self.clients.get(event["partition"])
        if known is not None and known.state == "asked":
            self._set(event["partition"], "answered", at)

    def _outcome(self, event: Event, at: float) -> None:
        if event["partition"] in self.clients:
            self._set(event["partition"], event["event"], at)

    _on_failed = _on_late = _on_refused = _on_limited = _outcome

    def _on_left(self, event: Event, at: float) -> None:
        self._away.add(event["partition"])
        self._set(event["partition"], "gone", at)

    def _on_joined(self, event: Event, at: float) -> None:
        self._away.discard(event["partition"])
        self._set(event["partition"], "idle", at)

    _on_rejoined = _on_joined


class LiveState:
    """Writes `live.json` of a run folder about once a second while it is entered, and removes it at the end.

    A thread writes it, so that a state is not held back until the next event. The file is replaced, but not flushed to
    the disk. One that cannot be written is logged once and does not affect the run.

    Parameters
    ----------
    folder : Path
        The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIVE_FILE
        self._temporary = folder / f".{LIVE_FILE}.tmp"
        self._state = RunState(time.time())
        self._lock = threading.Lock()
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="live state", daemon=True)
        self._told = False

    def __enter__(self) -> LiveState:
        """Begin to write."""
        self.write()  # in place of the file of a run that was killed
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        self._ended.set()
        self._changed.set()
        self._thread.join()
        for path in (self._temporary, self.path):
            with suppress(OSError):  # a reader takes a file that is not replaced for that of a stopped run
                path.unlink(missing_ok=True)

    def __call__(self, event: Event) -> None:
        """Take note of one event."""
        with self._lock:
            self._state(event)
        self._changed.set()

    def write(self) -> None:
        """Replace the file."""
        with self._lock:
            live = self._state.live(time.time())
        try:
            self._temporary.write_bytes(live.to_json())
            self._temporary.replace(self.path)
        except OSError as error:
            if not self._told:
                LOG.warning("the live page has no news: %s could not be written: %s", self.path, error)
            self._told = True

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._changed.wait(HEARTBEAT - INTERVAL)
            self._changed.clear()
            self.write()
