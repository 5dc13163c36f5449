"""The device's log: what happened to its models, and on whose behalf, one JSON object a line."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOG = logging.getLogger("fedtta.agent")
ROTATED = ".1"  # ending of the former file


class EventLog:
    """A file of JSON lines, each with `time` (ISO 8601, UTC) and `event`.

    A write never raises: a full disk must not fail a prediction.

    Parameters
    ----------
    path : Path
    limit : int
        Bytes at which the file is renamed to `<name>.1`, in place of a former one.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self._lock = threading.Lock()
        self._failing = False

    def write(self, event: str, **values: Any) -> None:
        """Append an event; values that JSON does not have are written as text."""
        try:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, "event": event, **values}, default=_plain) + "\n"
            with self._lock:
                if self.path.exists() and self.path.stat().st_size + len(line) > self.limit:
                    self.path.replace(self.path.with_name(self.path.name + ROTATED))
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
            self._failing = False
        except Exception as error:
            if not self._failing:  # said once
                LOG.warning("%s cannot be written: %s", self.path, error)
            self._failing = True


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else str(value)
