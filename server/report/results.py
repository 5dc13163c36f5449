"""Reading `metrics.jsonl`: one JSON object a line, checked and sorted into one frozen `Results`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from server.report.events import WEIGHT_BINS, Clients, End, Evaluation, Incident, LeakCheck, Round, RunInfo

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Results:
    """Everything a run wrote. Parts that it did not write are None or empty.

    Where a run that was resumed wrote the same round, or the same evaluation, again, the later one counts.
    """

    run: RunInfo | None = None
    clients: Clients | None = None
    rounds: list[Round] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    leak_checks: list[LeakCheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    end: End | None = None
    starts: int = 0  # how often the run was started; more than 1: it was resumed

    def trainings(self) -> list[str]:
        """Names of the trainings in the order of their first round, then those only evaluated."""
        named = [entry.training for entry in self.rounds] + [entry.training for entry in self.evaluations]
        return list(dict.fromkeys(named))

    def setting(self, name: str) -> Any:
        """Value of a setting, written ``with_underscores`` or ``with-hyphens``; None if it is not there."""
        settings = self.run.settings if self.run else {}
        return settings.get(name, settings.get(name.replace("_", "-")))


Check = tuple[Callable[[Any], bool], str]
Event = TypeVar("Event")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: Any, high: float = math.inf) -> bool:
    return _is_number(value) and math.isfinite(value) and 0 <= value <= high


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


_TEXT: Check = (lambda value: isinstance(value, str), "a string")
_COUNT: Check = (_is_count, "a whole number, 0 or more")
_FRACTION: Check = (lambda value: _is_finite(value, high=1 + 1e-6), "a number from 0 to 1")  # float32 means
_SECONDS: Check = (_is_finite, "a finite number, 0 or more")
_OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
_COUNTS: Check = (_list_of(_is_count), "a list of whole numbers")
_ROWS: Check = (_list_of(_list_of(_is_count)), "a list of lists of whole numbers")
_HISTOGRAM: Check = (lambda v: _COUNTS[0](v) and len(v) == WEIGHT_BINS, f"a list of {WEIGHT_BINS} counts")

# A field means the same in every event, so one table serves them all.
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("time", "hardware", "training", "method", "shift", "reason", "status", "text"), _TEXT),
    **dict.fromkeys(("settings", "versions"), _OBJECT),
    **dict.fromkeys(("round", "correct", "total", "checked", "leaked", "bytes_up", "bytes_down"), _COUNT),
    **dict.fromkeys(("sampled", "replied"), _COUNTS),
    **dict.fromkeys(("validation_accuracy", "personal_validation_accuracy"), _FRACTION),
    "commit": _TEXT,
    "class_counts": _ROWS,
    "classes": (_list_of(lambda value: isinstance(value, (str, int))), "a list of names"),
    "sizes": (_list_of(lambda value: _COUNTS[0](value) and len(value) == 3), "a list of [train, val, test]"),
    "train_loss": (_is_number, "a number"),
    "train_seconds": (_list_of(_is_finite), "a list of seconds"),
    "wall_seconds": _SECONDS,
    "seconds": _SECONDS,
    "partition": _COUNT,
    "node_id": (lambda value: isinstance(value, (int, str)), "a node id"),
    "weight_histogram": _HISTOGRAM,
    "weight_mean": _FRACTION,
}


def _build(kind: type[Event], record: Mapping[str, Any]) -> Event:
    """Make the event from its known fields; a field that is missing or wrong is a ValueError naming it."""
    values = {}
    for known in fields(kind):  # type: ignore[arg-type]
        if known.name not in record:
            if known.default is MISSING:
                raise ValueError(f"'{known.name}' is missing")
            continue
        value = record[known.name]
        accepts, words = _CHECKS.get(known.name, _TEXT)
        nullable = "None" in str(known.type)
        if not (accepts(value) or (nullable and value is None)):
            words = f"{words} or null" if nullable else words
            raise ValueError(f"'{known.name}' must be {words}, not {value!r}")
        values[known.name] = value
    return kind(**values)


_SINGLE: dict[str, type] = {"run": RunInfo, "clients": Clients, "end": End}
_MANY: dict[str, tuple[str, type]] = {
    "round": ("rounds", Round),
    "evaluation": ("evaluations", Evaluation),
    "leak_check": ("leak_checks", LeakCheck),
    **dict.fromkeys(("refused", "failed", "late"), ("incidents", Incident)),
}


def _note(record: Mapping[str, Any]) -> str:
    if not isinstance(record.get("text"), str):
        raise ValueError("'text' must be a string")
    return record["text"]


def _latest(entries: list[Any], *key: str) -> list[Any]:
    """Keep the last entry of each key, at the place of the first."""
    return list({tuple(getattr(entry, name) for name in key): entry for entry in entries}.values())


def read_results(path: Path) -> Results:
    """Read and check a metrics file.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        A line is no JSON object, or a field of a known event is missing or wrong; file and line number are
        named. Unknown events and unknown fields are ignored, so that newer writers can add some.
    """
    single: dict[str, Any] = {}
    many: dict[str, list[Any]] = {name: [] for name, _ in _MANY.values()}
    notes: list[str] = []
    starts = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                raise ValueError("expected a JSON object with a field 'event'")
            event = record["event"]
            if event in _SINGLE:
                single[event] = _build(_SINGLE[event], record)
                starts += event == "run"
            elif event in _MANY:
                name, kind = _MANY[event]
                many[name].append(_build(kind, record))
            elif event == "note":
                notes.append(_note(record))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    many["rounds"] = _latest(many["rounds"], "training", "round")
    many["evaluations"] = _latest(many["evaluations"], "training", "method", "shift", "partition")
    many["leak_checks"] = _latest(many["leak_checks"], "training")
    parts: dict[str, Any] = {**single, **many}
    return Results(**parts, notes=notes, starts=starts)
