"""Reading `metrics.jsonl`: one JSON object a line, checked and sorted into one frozen `Results`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from server.report.events import (
    VARIANTS,
    WEIGHT_BINS,
    Adapted,
    AdaptRound,
    Clients,
    End,
    Evaluation,
    Incident,
    LeakCheck,
    Rates,
    RatesRound,
    Round,
    RunInfo,
)

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
    rates_rounds: list[RatesRound] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    adapt_rounds: list[AdaptRound] = field(default_factory=list)
    adapted: list[Adapted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    end: End | None = None
    starts: int = 0  # how often the run was started; more than 1: it was resumed

    def trainings(self) -> list[str]:
        """Names of the trainings in the order of their first round, then those only adapted or evaluated."""
        parts = (self.rounds, self.rates_rounds, self.evaluations)
        return list(dict.fromkeys(entry.training for part in parts for entry in part))

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


def _object_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


_TEXT: Check = (lambda value: isinstance(value, str), "a string")
_COUNT: Check = (_is_count, "a whole number, 0 or more")
_FRACTION: Check = (lambda value: _is_finite(value, high=1 + 1e-6), "a number from 0 to 1")  # float32 means
_SECONDS: Check = (_is_finite, "a finite number, 0 or more")
_OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
_COUNTS: Check = (_list_of(_is_count), "a list of whole numbers")
_ROWS: Check = (_list_of(_list_of(_is_count)), "a list of lists of whole numbers")
_HISTOGRAM: Check = (lambda v: _COUNTS[0](v) and len(v) == WEIGHT_BINS, f"a list of {WEIGHT_BINS} counts")

# A field means the same in every event, so one table serves them all; the exceptions are in `_OWN_CHECKS`.
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("time", "hardware", "training", "method", "shift", "reason", "status", "text"), _TEXT),
    **dict.fromkeys(("collaboration", "corruption"), _TEXT),
    **dict.fromkeys(("settings", "versions"), _OBJECT),
    **dict.fromkeys(("round", "correct", "total", "checked", "leaked"), _COUNT),
    **dict.fromkeys(("bytes_up", "bytes_down", "context_bytes"), _COUNT),
    **dict.fromkeys(("sampled", "replied"), _COUNTS),
    **dict.fromkeys(("validation_accuracy", "personal_validation_accuracy", "accuracy"), _FRACTION),
    **dict.fromkeys(("train_loss", "loss"), (_is_number, "a number")),
    "commit": _TEXT,
    "class_counts": _ROWS,
    "classes": (_list_of(lambda value: isinstance(value, (str, int))), "a list of names"),
    "sizes": (_list_of(lambda value: _COUNTS[0](value) and len(value) == 3), "a list of [train, val, test]"),
    "train_seconds": (_list_of(_is_finite), "a list of seconds"),
    "wall_seconds": _SECONDS,
    "seconds": _SECONDS,
    "partition": _COUNT,
    "node_id": (lambda value: isinstance(value, (int, str)), "a node id"),
    "weight_histogram": _HISTOGRAM,
    "weight_mean": _FRACTION,
    "roles": (_list_of(_TEXT[0]), "a list of strings"),
    "variant": (lambda value: value in VARIANTS, f"one of {', '.join(VARIANTS)}"),
    "rates": (_object_of(lambda v: _is_number(v) and math.isfinite(v)), "an object of finite numbers"),
    "weights": (_list_of(_list_of(_FRACTION[0])), "a list of lists of numbers from 0 to 1"),
}
_OWN_CHECKS: dict[type, dict[str, Check]] = {
    Rates: {"sizes": (_object_of(_is_count), "an object of whole numbers")},
    Adapted: dict.fromkeys(("correct", "total"), _COUNTS),
}


def _build(kind: type[Event], record: Mapping[str, Any]) -> Event:
    """Make the event from its known fields; a field that is missing or wrong is a ValueError naming it."""
    values = {}
    checks = _CHECKS | _OWN_CHECKS.get(kind, {})
    for known in fields(kind):  # type: ignore[arg-type]
        if known.name not in record:
            if known.default is MISSING:
                raise ValueError(f"'{known.name}' is missing")
            continue
        value = record[known.name]
        accepts, words = checks.get(known.name, _TEXT)
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
    "rates_round": ("rates_rounds", RatesRound),
    "rates": ("rates", Rates),
    "adapt_round": ("adapt_rounds", AdaptRound),
    "adapted": ("adapted", Adapted),
    **dict.fromkeys(("refused", "failed", "late"), ("incidents", Incident)),
}


def _note(record: Mapping[str, Any]) -> str:
    if not isinstance(record.get("text"), str):
        raise ValueError("'text' must be a string")
    return record["text"]


#: What makes two entries of a part the same thing, written again.
_KEYS: dict[str, tuple[str, ...]] = {
    "rounds": ("training", "round"),
    "evaluations": ("training", "method", "shift", "partition"),
    "leak_checks": ("training",),
    "rates_rounds": ("training", "variant", "round"),
    "rates": ("training", "variant"),
    "adapt_rounds": ("method", "collaboration", "round"),
    "adapted": ("method", "collaboration", "round", "partition", "corruption"),
}


def _latest(entries: list[Any], *key: str) -> list[Any]:
    """Keep the last entry of each key, at the place of the first."""
    return list({tuple(getattr(entry, name) for name in key): entry for entry in entries}.values())


def _check_classes(clients: Clients | None, adapted: list[Adapted]) -> None:
    """Refuse answers that are not counted in the same classes everywhere."""
    named = len(clients.classes) if clients and clients.classes else None
    for entry in adapted:
        number = named or len(adapted[0].total)
        if len(entry.total) != number:
            where = f"{entry.method}, {entry.collaboration}, round {entry.round}, client {entry.partition}"
            raise ValueError(
                f"adapted ({where}): 'total' must have {number} numbers, one a class, not {len(entry.total)}"
            )


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
            elif event == "resumed":
                starts += 1
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    try:
        _check_classes(single.get("clients"), many["adapted"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for name, key in _KEYS.items():
        many[name] = _latest(many[name], *key)
    parts: dict[str, Any] = {**single, **many}
    return Results(**parts, notes=notes, starts=starts)
