"""The device's log: what happened to its models, and on whose behalf, one JSON object a line."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtta.settings.files import Lines

LOG = logging.getLogger("fedtta.agent")
ROTATED = ".1"  # ending of the former file


class EventLog:
    """A file of JSON lines, each with `time` (ISO 8601, UTC) and `event`.

    A write never raises: a full disk must not fail a prediction. Events that could not be written are counted, and the
    next one that can be follows an event "not written" with their number.

    Parameters
    ----------
    path : Path
    limit : int
        Bytes at which the file is renamed to `<name>.1`, in place of a former one.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self._lock = threading.Lock()
        self._lines = Lines(path, sync=False)
        self._lost = 0

    def write(self, event: str, **values: Any) -> None:
        """Append an event; values that JSON does not have are written as text."""
        with self._lock:
            try:
                lost = _line("not written", {"count": self._lost}) if self._lost else b""
                line = lost + _line(event, values)
                if self.path.exists() and self.path.stat().st_size + len(line) > self.limit:
                    self.path.replace(self.path.with_name(self.path.name + ROTATED))
                self._lines.append(line)
                self._lost = 0
            except Exception as error:
                self._lost += 1
                if self._lost == 1:  # said once
                    LOG.warning("%s cannot be written: %s", self.path, error)


def _line(event: str, values: Mapping[str, Any]) -> bytes:
    """Return an event as a line."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return (json.dumps({"time": now, "event": event, **values}, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else str(value)
