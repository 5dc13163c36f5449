"""The device's own data outside a run: counted at the agent's start and on request, read to check a model file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.config import AgentConfig
from fedtta.client.agent.log import EventLog
from fedtta.client.names import parse_class_map
from fedtta.client.own import role_of, scanning
from fedtta.client.serving import Served
from fedtta.data.sources import OwnData, open_source, own_data
from fedtta.messages.replies import Identity
from fedtta.models.preprocessing import Preprocessing

NAMED = 50  # skipped files that are named
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.found = config, Scan()
        self._log, self._note, self._clock = log, note, clock
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Return whether the data are being scanned outside a run."""
        return self._lock.locked()

    @property
    def notes(self) -> list[str]:
        """Return what the owner should know of the data."""
        return [*([SCANNING] if self.running else []), *self.found.notes]

    def scan(self, event: str, served: Served | None) -> Scan:
        """Scan the data, and log it as `event`; raises as `scan`."""
        with self._lock:
            start = self._clock()
            found = scan(self.config, served)
            counts = {"samples": found.samples, "used": found.used, "skipped": found.skipped}
            self._log.write(event, **counts, seconds=round(self._clock() - start, 3))
            self.found = found
        return found

    def begin(self, served: Callable[[], Served | None]) -> None:
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


def scan(config: AgentConfig, served: Served | None) -> Scan:
    """Scan the device's own data and fill the index that runs use, with or without a model.

    Raises
    ------
    ValueError
        There are no data of its own, or they cannot be used; the message says why.
    """
    if not config.data:
        raise ValueError("this device has no data of its own: its file says no data = ...")
    found = _own(config, _classes(config, served), served.preprocessing if served else Preprocessing())
    named = [f"{name!r}: {reason}" for name, reason in found.skipped.items()]
    more = [f"and {len(named) - NAMED} more"] if len(named) > NAMED else []
    notes = (*found.notes, *named[:NAMED], *more)
    return Scan(found.samples, found.used, found.samples - found.used, notes)


def samples_of(config: AgentConfig, served: Served) -> Samples:
    """Return the samples that a model without a run is checked on; none without data of the device's own."""
    if not config.data:
        return Samples.none(served.shape)
    found = _own(config, served.classes, served.preprocessing)
    return Samples.of_split(found.images, found.split, found.labelled)


def _classes(config: AgentConfig, served: Served | None) -> tuple[str, ...]:
    """Return the served model's classes and those of the data, for a scan must not fail where a run would."""
    renamed = parse_class_map(config.class_map)
    own = (renamed.get(name, name) for name in open_source(config.data).classes)
    found = dict.fromkeys((*(served.classes if served else ()), *renamed.values(), *own))
    return tuple(found) or ("unlabelled",)


def _own(config: AgentConfig, classes: tuple[str, ...], preprocessing: Preprocessing) -> OwnData:
    with scanning(config.index) as index:
        return own_data(
            config.data,
            classes=classes,
            class_map=parse_class_map(config.class_map),
            preprocessing=preprocessing,
            max_skipped=1.0,  # told, not refused: that is the run's decision
            max_megapixels=config.max_megapixels,
            role=role_of(config.role),
            index_file=index,
        )
