"""Test-time rounds: clients adapt to their streams, help each other, and each gets arrays of its own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flwr.app import ArrayRecord

from server.adapt_validation import AdaptReplies
from server.checkpoints import STRATEGY, Checkpoints, Place, memory_key
from server.methods import MethodRow, Training
from server.rounds import Federation, metrics_of
from server.world import World
from settings import Settings, SettingsError, assignments
from strategies import COLLABORATIONS, Collaborative
from strategies.broadcast import Broadcast, array_bytes
from tta.collaborator import Share
from tta.registry import ADAPTERS

#: W is written for every round up to this many clients.
WRITTEN = 100


@dataclass(frozen=True)
class Collaboration:
    """One way to help each other: a rule with its options, and what is mixed."""

    label: str
    rule: str
    options: dict[str, Any]
    share: str

    def strategy(self) -> Collaborative:
        """Return a fresh strategy.

        Raises
        ------
        SettingsError
            The rule has no such option, or its value is not allowed.
        """
        try:
            return COLLABORATIONS[self.rule](**self.options)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"collaborations: {self.label}: {error}") from error


def parse_collaborations(text: str, share: str) -> list[Collaboration]:
    """Parse the setting `collaborations`, e.g. `none,fedavg,pfedbbn[share=statistics;temperature=1]`.

    Raises
    ------
    SettingsError
        An unknown rule, option or share, or one that occurs twice; what exists is listed.
    """
    found: list[Collaboration] = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"([\w-]+)(?:\[(.*)\])?", part)
        if not match or match[1] not in COLLABORATIONS:
            raise SettingsError(f"collaborations: unknown rule {part!r}; there are: {', '.join(COLLABORATIONS)}")
        options = dict(assignments(match[2] or "", f"collaborations: {match[1]}"))
        mixed = str(options.pop("share", share))
        label = part.replace(" ", "")
        if mixed not in get_args(Share):
            raise SettingsError(f"collaborations: {label}: share = {mixed!r}; allowed: {', '.join(get_args(Share))}")
        if any(other.label == label for other in found):
            raise SettingsError(f"collaborations: {label} is named twice")
        found.append(Collaboration(label, match[1], options, mixed))
        found[-1].strategy()
    return found


def check_collaborations(settings: Settings, trainings: Sequence[Training]) -> list[Collaboration]:
    """Return the collaborations asked for; none without the setting.

    Raises
    ------
    SettingsError
        As `parse_collaborations`, the run would train on its streams, or a method cannot take part.
    """
    if not settings.collaborations:
        return []
    if settings.rounds:
        raise SettingsError(
            f"rounds = {settings.rounds}: allowed with collaborations is 0, since streams are drawn from all images of "
            "the data set; init names a network that was trained on others"
        )
    alone = [row.label for training in trainings for row in training.rows if not row.collaborates]
    if alone:
        fitting = ", ".join(name for name, info in ADAPTERS.items() if info.collaborates)
        raise SettingsError(f"methods: {', '.join(alone)} cannot take part in collaborations; fitting: {fitting}")
    return parse_collaborations(settings.collaborations, settings.share)


def rounds_of(settings: Settings, available: int) -> int:
    """Return how many test-time rounds there are: to the end of the streams, or fewer if that is asked for."""
    return min(settings.stream_rounds, available) if settings.stream_rounds else available


def cells(training: Training, how: Sequence[Collaboration]) -> list[tuple[MethodRow, Collaboration]]:
    """Pair methods and collaborations; a method with nothing to share gets the first only: all would give the same."""
    return [
        (row, collaboration)
        for row in training.rows
        for collaboration in (how if ADAPTERS[row.method.adapter].shares else how[:1])
    ]


def adaptation_rounds(
    federation: Federation,
    training: Training,
    network: ArrayRecord,
    how: Sequence[Collaboration],
    world: World,
    checkpoints: Checkpoints,
) -> None:
    """Run every cell of the matrix, each from the start of the streams, or after the last round of `checkpoints`.

    Parameters
    ----------
    network : ArrayRecord
        What everyone starts from; it travels once to each client, not once for each cell.
    world : World
        Says how long the streams are.
    """
    last = rounds_of(federation.settings, world.stream_rounds)
    everyone = Broadcast(network)
    matrix = []
    for row, collaboration in cells(training, how):
        checks = AdaptReplies(len(world.classes), len(world.corruptions))
        matrix.append(Cell(training.name, row, collaboration, collaboration.strategy(), checks, world.corruptions))
    keys = [cell.key for cell in matrix]
    for cell in matrix[keys.index(checkpoints.place.part) if checkpoints.place.stage == "cell" else 0 :]:
        cell.strategy.begin(everyone)
        done = checkpoints.done("cell", cell.key)
        if done:
            cell.load(checkpoints, federation)
        for round in range(done + 1, last + 1):
            _round(federation, cell, round)
            if checkpoints.due(round, last):
                cell.save(checkpoints, federation, round)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a method under a collaboration, with what lasts from round to round."""

    training: str
    row: MethodRow
    collaboration: Collaboration
    strategy: Collaborative
    checks: AdaptReplies
    corruptions: Sequence[str]

    @property
    def name(self) -> str:
        """Return what it is called in messages to people."""
        return f"{self.row.label}@{self.collaboration.label}"

    @property
    def key(self) -> str:
        """Return what its memory is called on the clients."""
        return memory_key(self.row.label, self.collaboration.label)

    def save(self, checkpoints: Checkpoints, federation: Federation, round: int) -> None:
        """Write a checkpoint: what the strategy goes on from, and what the clients' replies have to look like."""
        records = {STRATEGY: self.strategy.state_arrays(federation.nodes)}
        notes = {"signature": self.checks.signature}
        checkpoints.save(Place(self.training, "cell", self.key, round), records, notes)

    def load(self, checkpoints: Checkpoints, federation: Federation) -> None:
        """Go on from a checkpoint."""
        self.strategy.load_state_arrays(checkpoints.records[STRATEGY], federation.nodes)
        for record, names in checkpoints.notes["signature"].items():
            self.checks.signature[record] = {name: (tuple(shape), dtype) for name, (shape, dtype) in names.items()}

    @property
    def envelope(self) -> dict[str, Any]:
        """Return what its messages say beside the settings."""
        return {
            "cell": self.key,
            "mixed": self.collaboration.share,
            "labels": [self.row.label],
            "adapters": [self.row.method.adapter],
            "options": [json.dumps(self.row.options)],
        }


def required(strategy: Collaborative) -> list[str]:
    """Return the array records that a rule needs of every reply of its next round."""
    wanted = ["shared"]
    if strategy.needs_statistics:
        wanted.append("normalisation")
    if strategy.needs_start and strategy.start_arrays is None:
        wanted.append("start")
    return wanted


def _round(federation: Federation, cell: Cell, round: int) -> None:
    """Run one round of a cell; what the clients did and how they were mixed are events."""
    start = time.perf_counter()
    strategy = cell.strategy
    config = federation.config(cell.training, **cell.envelope)
    cell.checks.records = required(strategy)
    testers = federation.testers
    _, replies = federation.ask(strategy, round, ArrayRecord(), config, testers, cell.checks, cell.training, cell.name)
    strategy.aggregate_train(round, [reply for _, reply in replies])
    about = {"method": cell.row.label, "collaboration": cell.collaboration.label, "round": round}
    metrics = [(partition, metrics_of(reply)) for partition, reply in replies]
    for partition, values in metrics:
        federation.events(
            "adapted",
            **about,
            partition=partition,
            corruption=cell.corruptions[int(values["corruption"])],
            correct=[int(n) for n in values["correct"]],
            total=[int(n) for n in values["total"]],
            seconds=float(values["seconds"]),
        )
    weights = strategy.weights
    assert weights is not None, "collect returns at least one reply"
    federation.events(
        "adapt_round",
        **about,
        replied=[partition for partition, _ in replies],
        weights=weights.tolist() if len(weights) <= WRITTEN else [],
        wall_seconds=time.perf_counter() - start,
        bytes_down=strategy.sent_bytes,
        bytes_up=sum(array_bytes(record) for _, reply in replies for record in reply.content.array_records.values()),
        context_bytes=int(sum(values["context-bytes"] for _, values in metrics)),
    )
