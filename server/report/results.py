"""Results of a run: all its events, checked and sorted by kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedtta.server.report.events import (
    Adapted,
    AdaptRound,
    Clients,
    End,
    Evaluation,
    Event,
    Incident,
    LeakCheck,
    Note,
    Rates,
    RatesRound,
    Resumed,
    Round,
    RunInfo,
    parse_event,
)

METRICS_FILE = "metrics.jsonl"
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Results:
    """Everything a run has written so far. Missing parts are None or empty.

    When a resumed run repeats a round or an evaluation, the later event counts.
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
    starts: int = 0  # more than 1: the run was resumed

    @classmethod
    def of(cls, events: Iterable[Event]) -> Results:
        """Collect events in the order in which they were written.

        Raises
        ------
        ValueError
            Clients count their predictions over different numbers of classes.
        """
        seen = list(events)
        clients = _last(seen, Clients)
        adapted = _distinct(seen, Adapted)
        _check_classes(clients, adapted)
        return cls(
            run=_last(seen, RunInfo),
            clients=clients,
            rounds=_distinct(seen, Round),
            evaluations=_distinct(seen, Evaluation),
            incidents=_of_kind(seen, Incident),
            leak_checks=_distinct(seen, LeakCheck),
            rates_rounds=_distinct(seen, RatesRound),
            rates=_distinct(seen, Rates),
            adapt_rounds=_distinct(seen, AdaptRound),
            adapted=adapted,
            notes=[note.text for note in _of_kind(seen, Note)],
            end=_last(seen, End),
            starts=len(_of_kind(seen, RunInfo)) + len(_of_kind(seen, Resumed)),
        )

    def trainings(self) -> list[str]:
        """Return the names of the trainings, in order of their first round or evaluation."""
        parts = (self.rounds, self.rates_rounds, self.evaluations)
        return list(dict.fromkeys(entry.training for part in parts for entry in part))

    def by_training(self) -> dict[str, list[Round]]:
        """Group the rounds by training, sorted by number."""
        groups: dict[str, list[Round]] = {}
        for entry in sorted(self.rounds, key=lambda entry: entry.round):
            groups.setdefault(entry.training, []).append(entry)
        return {name: groups[name] for name in self.trainings() if name in groups}

    def setting(self, name: str) -> Any:
        """Value of a setting, written ``with_underscores`` or ``with-hyphens``; None if the run has no such setting."""
        settings = self.run.settings if self.run else {}
        return settings.get(name, settings.get(name.replace("_", "-")))


def read_results(path: Path) -> Results:
    """Read and check a metrics file.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        A line is no valid event; the message names the file and, where possible, the line.
    """
    events: list[Event] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            event = parse_event(json.loads(line.decode("utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if event is not None:
            events.append(event)
    try:
        return Results.of(events)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _of_kind(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def _last(events: list[Event], kind: type[Kind]) -> Kind | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _distinct(events: list[Event], kind: type[Kind]) -> list[Kind]:
    """Return the last event of each key, in the position of the first."""
    found = {tuple(getattr(event, name) for name in kind.key): event for event in _of_kind(events, kind)}
    return list(found.values())


def _check_classes(clients: Clients | None, adapted: list[Adapted]) -> None:
    for entry in adapted:
        number = len(clients.classes) if clients and clients.classes else len(adapted[0].total)
        if len(entry.total) != number:
            raise ValueError(
                f"adapted ({entry.method}, {entry.collaboration}, round {entry.round}, client {entry.partition}): "
                f"'total' must have {number} numbers, one for each class, not {len(entry.total)}"
            )
