"""How the page says things: numbers, durations, and which model an accuracy belongs to at which moment."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from server.report.results import Results


def text(value: Any) -> str:
    """Write any value as escaped text; floats short, nothing for an empty string but a dash."""
    if isinstance(value, float):
        return escape(f"{value:g}")
    return escape(str(value)) if value not in (None, "") else "–"


def duration(seconds: float) -> str:
    """Write seconds as people say them: 4.2 s, 2 min 3 s, 1 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def instant(written: str) -> str:
    """Write an ISO 8601 time to the minute, in UTC where it names a zone; any other text as it is."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return written
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def size(count: float) -> str:
    """Write bytes with a decimal unit: 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def counted(number: int, noun: str) -> str:
    """Write a number and its noun: 1 client, 2 clients."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(results: Results) -> str:
    """Say which trained state the test accuracies belong to, as escaped text.

    Every method is tested on the state that its training left behind; where no round was run, that is
    the model the run started from.
    """
    last: dict[str, int] = {}
    for entry in results.rounds:
        last[entry.training] = max(last.get(entry.training, 0), entry.round)
    tested = dict.fromkeys(entry.training for entry in results.evaluations)
    if not any(training in last for training in tested):
        start = results.setting("init")
        origin = f"read from {escape(str(start))}" if start else "as it was initialised"
        return f"Model: no round was trained in this run, so the model {origin}"
    states = [
        f"{escape(name)}: after round {last[name]}" if name in last else f"{escape(name)}: no round trained here"
        for name in tested
    ]
    return f"Model: the state at the end of training ({'; '.join(states)})"
