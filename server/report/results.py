"""Results of a run: all its events, checked and sorted by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    Membership,
    Note,
    Rates,
    RatesRound,
    Resumed,
    Round,
    RunInfo,
    Served,
    parse_event,
)
from fedtta.server.report.journal import METRICS_FILE, read_lines, restored
from fedtta.settings import name_order

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Member:
    """A client of a run.

    Parameters
    ----------
    partition : int
    name : str
    sizes : list of [train, validation, test]
    role : str
        "both", "source" or "target"; empty where it was not recorded.
    data : dict
        See `events.Clients`; empty where it was not recorded.
    joined : Membership or None
        None for a client that was there at the start.
    counts : list [K] or None
        Training samples of each class; None where labels stay on the device.
    """

    partition: int
    name: str
    sizes: list[int]
    role: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    joined: Membership | None = None
    counts: list[int] | None = None

    @property
    def labelled(self) -> bool:
        """Whether its samples have labels."""
        return bool(self.data.get("labelled", True))


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
    memberships: list[Membership] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
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
            memberships=_of_kind(seen, Membership),
            served=_distinct(seen, Served),
            leak_checks=_distinct(seen, LeakCheck),
            rates_rounds=_distinct(seen, RatesRound),
            rates=_distinct(seen, Rates),
            adapt_rounds=_distinct(seen, AdaptRound),
            adapted=adapted,
            notes=[note.text for note in _of_kind(seen, Note)],
            end=_last(seen, End),
            starts=len(_of_kind(seen, RunInfo)) + len(_of_kind(seen, Resumed)),
        )

    @cached_property
    def members(self) -> dict[int, Member]:
        """Every client by partition, those of the start and those that joined, with the data that it had last."""
        found, start = {}, self.clients
        for partition, sizes in enumerate(start.sizes if start else []):
            assert start is not None
            found[partition] = Member(
                partition,
                *(_at(start.names, partition, str(partition)), sizes),
                *(_at(start.roles, partition, ""), _at(start.data, partition, {})),
                counts=_at(start.class_counts, partition, None),
            )
        for event in self.memberships:
            if event.event == "joined" and event.partition is not None and event.name is not None:
                about = (event.sizes or [0, 0, 0], event.role or "", event.data or {})
                found[event.partition] = Member(event.partition, event.name, *about, joined=event)
            elif event.event == "rejoined" and event.partition in found and event.sizes:
                before = found[event.partition]
                found[event.partition] = replace(before, sizes=event.sizes, data=event.data or before.data)
        return found

    def name(self, partition: int) -> str:
        """Return a client's name; its number where no name was recorded."""
        return self.members[partition].name if partition in self.members else str(partition)

    def columns(self, clients: int) -> list[int]:
        """Return the clients with labels among the first `clients` partitions, in name order."""
        found = [one for one in range(clients) if one not in self.members or self.members[one].labelled]
        return sorted(found, key=lambda partition: name_order(self.name(partition)))

    @property
    def without_labels(self) -> list[str]:
        """Names of the clients without labels, which have no accuracies."""
        names = (member.name for member in self.members.values() if not member.labelled)
        return sorted(names, key=name_order)

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
    """Read and check a metrics file; of a run folder's, damaged lines are read from the copy, and a note says so.

    Half a line at the end, which a killed run leaves, is ignored.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        A line is no valid event; the message names the file and, where possible, the line.
    """
    in_folder = path.name == METRICS_FILE
    content, damage = restored(path.parent) if in_folder else (path.read_bytes(), "")
    events: list[Event] = []
    for line in read_lines(content):
        try:
            if line.fault:
                raise ValueError(line.fault)
            event = parse_event(line.event)
        except ValueError as error:
            raise ValueError(f"{path}, line {line.number}: {error}") from error
        if event is not None:
            events.append(event)
    if damage:
        events.append(Note(damage))
    try:
        return Results.of(events)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _at(values: list[Any] | None, index: int, default: Any) -> Any:
    return values[index] if values and index < len(values) else default


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
