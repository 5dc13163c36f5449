"""What was found in the device's own data outside a run: at the agent's start, on request, and by runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedtta.client.agent.log import EventLog
from fedtta.client.config import AgentConfig
from fedtta.client.served import ServedModel
from fedtta.messages.replies import Identity

SCANNING = "its data are being scanned"


@dataclass(frozen=True)
class Scan:
    """What a scan of the device's own data has found.

    Parameters
    ----------
    samples, used, skipped : int
        Samples, those in use, and all others.
    notes : tuple of str
        Counts by reason, then the skipped samples by name.
    """

    samples: int = 0
    used: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


class Scans:
    """What was found in the device's own data the last time; one scan at a time.

    Parameters
    ----------
    config : AgentConfig
    log : EventLog
    note : callable
        Called with a line of text for the owner.
    look : callable
        Scans the data as the served model would read them, if there is one.
    clock : callable
        Monotonic time in seconds.

    Attributes
    ----------
    found : Scan
    """

    def __init__(
        self,
        config: AgentConfig,
        log: EventLog,
        note: Callable[[str], None],
        look: Callable[[ServedModel | None], Scan],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.found = config, Scan()
        self._log, self._note, self._look, self._clock = log, note, look, clock
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Return whether the data are being scanned outside a run."""
        return self._lock.locked()

    @property
    def notes(self) -> list[str]:
        """Return what the owner should know of the data."""
        return [*([SCANNING] if self.running else []), *self.found.notes]

    def scan(self, event: str, served: ServedModel | None) -> Scan:
        """Scan the data, and log it as `event`; raises as `scan`."""
        with self._lock:
            start = self._clock()
            found = self._look(served)
            counts = {"samples": found.samples, "used": found.used, "skipped": found.skipped}
            self._log.write(event, **counts, seconds=round(self._clock() - start, 3))
            self.found = found
        return found

    def begin(self, served: Callable[[], ServedModel | None]) -> None:
        """Scan the data on a thread of their own: the first scan of many files takes longer than a run waits for it."""

        def first() -> None:
            try:
                self.scan("scan", served())
            except Exception as error:  # a run says it, too
                self._note(f"its data cannot be used: {error}")
                self._log.write("scan", error=str(error))

        if self.config.data:
            threading.Thread(target=first, name="scan", daemon=True).start()

    def take(self, identity: Identity) -> None:
        """Take over what a run has found in the data."""
        if identity.own_data:
            hidden = identity.labelled and identity.classes_present is None  # from the server, not from its owner
            notes = self.found.notes if hidden else tuple(identity.notes)
            self.found = Scan(identity.samples, identity.samples - identity.skipped, identity.skipped, notes)
