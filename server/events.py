"""Events of a run, which files, progress and tests listen to, and the errors that end a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtta.server.report.journal import Journal

Event = dict[str, Any]
Listener = Callable[[Event], None]

#: Events that only progress listens to.
TRANSIENT = ("phase", "answered")
#: Events that count as a step of the plan.
STEPS = ("round", "statistics", "rates_round", "adapt_round", "leak_check")


class RunError(RuntimeError):
    """A run cannot continue."""


class NodesMissing(RunError):
    """Nodes that a run needs are not connected, or cannot be identified."""


class QuorumMissed(RunError):
    """A round brought too few usable replies, and could not be repeated or was repeated in vain."""


class NoReplies(QuorumMissed):
    """A round brought no usable reply at all."""


class Leak(RunError):
    """A test stream holds a sample that was trained on."""


class Events:
    """Sends every event to all listeners, in order.

    Parameters
    ----------
    *listeners : callable
        Each is called with the event, a dict of JSON values.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: str, /, **values: Any) -> None:
        """Send one event; `values` must be JSON values."""
        message = {"event": event, "at": round(time.time(), 3), **values}
        for listener in self.listeners:
            listener(message)


class JsonLines:
    """A listener that appends each event to a run's journal as one JSON line, synced, so that a killed run keeps it.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)

    def __call__(self, event: Event) -> None:
        """Append one line.

        Raises
        ------
        ValueError
            A number is not finite.
        OSError
            The line could not be written; the file is as before.
        """
        if event["event"] not in TRANSIENT:
            self._journal.append(event)
