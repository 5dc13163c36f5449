"""The device's log: what happened to its models, and on whose behalf, one JSON object a line."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtta.settings.files import Lines
from fedtta.settings.logs import line_of

LOG = logging.getLogger("fedtta.agent")
ROTATED = ".1"  # ending of the former file
#: Events of another level than info.
LEVELS = {
    "refused": logging.WARNING,
    "request refused": logging.WARNING,
    "guard": logging.WARNING,
    "note": logging.WARNING,
    "not saved": logging.ERROR,
    "not written": logging.ERROR,
}
#: Values that say what happened, in the order in which a line's message takes one.
SAID = ("error", "reason", "text", "what")


class EventLog:
    """A file of JSON lines as the logs of agent and server have them (`fedtta.settings.logs`), each with its `event`.

    A write never raises: a full disk must not fail a prediction. Events that could not be written are counted, and the
    next one that can be follows an event "not written" with their number.

    Parameters
    ----------
    path : Path
    limit : int
        Bytes at which the file is renamed to `<name>.1`, in place of a former one.
    device : str
        The device's name.

    Attributes
    ----------
    version : callable
        Returns the version of the served model, "" without one; a line about another model names that one.
    """

    def __init__(self, path: Path, limit: int, device: str = "") -> None:
        self.path, self.limit, self.device = path, limit, device
        self.version: Callable[[], str] = str
        self._lock = threading.Lock()
        self._lines = Lines(path, sync=False)
        self._lost = 0

    def fields(self) -> dict[str, str]:
        """Return the fields of every line of this agent."""
        return {"device": self.device, "version": self.version()}

    def write(self, event: str, **values: Any) -> None:
        """Append an event; values that JSON does not have are written as text."""
        with self._lock:
            try:
                lost = self._line("not written", {"count": self._lost}) if self._lost else b""
                line = lost + self._line(event, values)
                if self.path.exists() and self.path.stat().st_size + len(line) > self.limit:
                    self.path.replace(self.path.with_name(self.path.name + ROTATED))
                self._lines.append(line)
                self._lost = 0
            except Exception as error:
                self._lost += 1
                if self._lost == 1:  # said once
                    LOG.warning("%s cannot be written: %s", self.path, error)

    def _line(self, event: str, values: dict[str, Any]) -> bytes:
        """Return an event as a line."""
        said = next((str(values[key]) for key in SAID if values.get(key)), "")
        level = logging.ERROR if values.get("error") else LEVELS.get(event, logging.INFO)
        fields = {**self.fields(), "event": event, **values}
        return (line_of(level, LOG.name, f"{event}: {said}" if said else event, fields) + "\n").encode()
