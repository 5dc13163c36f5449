"""What happens in a run, as one stream of events that files, progress and tests listen to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Events:
    """Sends every event to all listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, /, **values: Any) -> None:
        """Send one event; `values` must be JSON values."""
        message = {"event": event, "at": round(time.time(), 3), **values}
        for listener in self.listeners:
            listener(message)


class JsonLines:
    """A listener that appends each event to a file as one JSON line, synced, so that a killed run keeps it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: Event) -> None:
        """Append one line; NaN and infinity are refused by json, not written."""
        if event["event"] in ("phase", "answered"):
            return  # progress only
        line = json.dumps(event, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
