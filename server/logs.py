"""A run's events as lines of the log: the listener that takes the place of the terminal's progress."""

from __future__ import annotations

import logging
import time
from typing import Any

from fedtta.messages.record import PROSE_LENGTH, printable
from fedtta.server.events import TRANSIENT, Event

LOG = logging.getLogger("fedtta.run")
#: Events of another level than info.
LEVELS = {
    **dict.fromkeys((*TRANSIENT, "evaluation", "adapted"), logging.DEBUG),  # many a round
    **dict.fromkeys(("late", "failed", "refused", "limited", "left", "left_alone"), logging.WARNING),
}
#: Values that say what happened, in the order in which a line's message takes one.
SAID = ("reason", "text", "status", "served")


class EventLines:
    """Logs each event with its numbers and texts; what has lists or tables of them stands in `metrics.jsonl`.

    A client is called `device`. Events from before a resumed run tell the clients' names only.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._start = round(time.time(), 3)

    def __enter__(self) -> EventLines:
        """Do nothing, as there is nothing to draw."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __call__(self, event: Event) -> None:
        """Log one event."""
        kind = str(event["event"])
        if kind == "clients":
            self._names = dict(enumerate(event.get("names") or []))
        if kind == "joined":
            self._names[event["partition"]] = event["name"]
        if event["at"] < self._start:
            return
        level = logging.ERROR if kind == "end" and event["status"] != "completed" else LEVELS.get(kind, logging.INFO)
        fields = {key: _plain(value) for key, value in event.items() if isinstance(value, bool | int | float | str)}
        if event.get("partition") in self._names:
            fields["device"] = self._names[event["partition"]]
        said = next((fields[key] for key in SAID if fields.get(key)), "")
        del fields["at"]
        LOG.log(level, "%s", f"{kind}: {said}" if said else kind, extra={"fields": fields})


def _plain(value: Any) -> Any:
    """Return a value of an event; a node may have chosen a text."""
    return printable(value, PROSE_LENGTH) if isinstance(value, str) else value
