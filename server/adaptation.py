"""Test-time rounds: clients adapt to their streams, and the server sends each its own mixture of what they share."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from fedtta.messages.arrays import Arrays
from fedtta.messages.flower import strategy_reply
from fedtta.messages.replies import Adapted
from fedtta.messages.requests import Adapt
from fedtta.server.checkpoints import STRATEGY, Checkpoints, Position, memory_key
from fedtta.server.events import RunError
from fedtta.server.limits import SharedLimits
from fedtta.server.members import FederationInfo
from fedtta.server.methods import MethodRow, Training
from fedtta.server.rounds import Federation, Outcome, Replied, Round
from fedtta.server.validation import AdaptCheck
from fedtta.settings import Settings, SettingsError, assignments
from fedtta.strategies import COLLABORATIONS, Collaborative
from fedtta.strategies.broadcast import Broadcast
from fedtta.strategies.collaborative import NORMALISATION, START
from fedtta.tta.collaborator import Share
from fedtta.tta.registry import ADAPTERS

#: W is written for every round up to this many clients.
WRITTEN = 100
#: Field of `Adapted` → record that a collaborative strategy reads.
RECORDS = {"shared": "shared", "normalization": NORMALISATION, "start": START}
#: Names of fields in checkpoints of earlier versions.
EARLIER = {"normalisation": "normalization"}


@dataclass(frozen=True)
class Collaboration:
    """A collaboration rule with its options, and what clients share."""

    label: str
    rule: str
    options: dict[str, Any]
    share: str

    def strategy(self) -> Collaborative:
        """Return a new strategy.

        Raises
        ------
        SettingsError
            The rule has no such option, or its value is not allowed.
        """
        try:
            return COLLABORATIONS[self.rule](network=None, **self.options)  # which is no option
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
    if settings.rounds and not (settings.devices or settings.classes):
        raise SettingsError(_trained_on(settings))
    alone = [row.label for training in trainings for row in training.rows if not row.collaborates]
    if alone:
        fitting = ", ".join(name for name, info in ADAPTERS.items() if info.collaborates)
        raise SettingsError(f"methods: {', '.join(alone)} cannot take part in collaborations; fitting: {fitting}")
    return parse_collaborations(settings.collaborations, settings.share)


def check_streams(settings: Settings, collaborations: Sequence[Collaboration], info: FederationInfo) -> None:
    """Refuse to train on images of the streams: only devices with data of their own keep their test images apart.

    Raises
    ------
    SettingsError
        The run trains, and a client has part of a divided data set.
    """
    divided = [name for name, data in zip(info.names, info.data, strict=True) if not data.get("own_data")]
    if collaborations and settings.rounds and divided:
        raise SettingsError(f"{_trained_on(settings)}; no data of their own have {', '.join(divided[:10])}")


def _trained_on(settings: Settings) -> str:
    return (
        f"rounds = {settings.rounds}: allowed with collaborations is 0, since streams are drawn from all images of the "
        "data set; init names a network that was trained on others"
    )


def rounds_of(settings: Settings, available: int) -> int:
    """Return how many test-time rounds there are: to the end of the streams, or fewer if that is asked for."""
    return min(settings.stream_rounds, available) if settings.stream_rounds else available


def cells(training: Training, how: Sequence[Collaboration]) -> list[tuple[MethodRow, Collaboration]]:
    """Pair methods and collaborations; a method that shares nothing gets only the first, since all give the same."""
    return [
        (row, collaboration)
        for row in training.rows
        for collaboration in (how if ADAPTERS[row.method.adapter].shares else how[:1])
    ]


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a method under a collaboration, with its state from round to round."""

    training: str
    row: MethodRow
    collaboration: Collaboration
    strategy: Collaborative
    check: AdaptCheck
    corruptions: Sequence[str]

    @property
    def name(self) -> str:
        """Return its name in messages to users."""
        return f"{self.row.label}@{self.collaboration.label}"

    @property
    def key(self) -> str:
        """Return the key of its private state on the clients."""
        return memory_key(self.row.label, self.collaboration.label)

    @property
    def about(self) -> dict[str, str]:
        """Return the fields that its events have in common."""
        return {"method": self.row.label, "collaboration": self.collaboration.label}

    def save(self, checkpoints: Checkpoints, federation: Federation, round: int) -> None:
        """Write a checkpoint: the strategy's state, and the expected layout of the clients' replies."""
        records = {STRATEGY: self.strategy.state_arrays(federation.nodes.by_partition)}
        checkpoints.save(Position(self.training, "cell", self.key, round), records, {"signature": self.check.signature})

    def load(self, checkpoints: Checkpoints, federation: Federation) -> None:
        """Restore a checkpoint."""
        self.strategy.load_state_arrays(checkpoints.records[STRATEGY], federation.nodes.by_partition)
        for record, names in checkpoints.notes["signature"].items():
            shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in names.items()}
            self.check.signature[EARLIER.get(record, record)] = shapes

    def template(self, federation: Federation, round: int) -> Adapt:
        """Return the request of a round, before the strategy has configured it."""
        return Adapt(
            **federation.common(self.key),
            round=round,
            cell=self.key,
            row=self.row.as_requested(),
            share=self.collaboration.share,
            network="",
        )


def adaptation_rounds(
    federation: Federation,
    training: Training,
    network: Broadcast,
    how: Sequence[Collaboration],
    info: FederationInfo,
    checkpoints: Checkpoints,
) -> None:
    """Run every cell of the matrix, each from the start of the streams, or after the last round of `checkpoints`.

    Parameters
    ----------
    network : Broadcast
        The network that all clients start from; it travels once to each client, not once for each cell.
    info : FederationInfo
        Has the length of the streams.
    """
    last = rounds_of(federation.settings, info.stream_rounds)
    matrix = []
    for row, collaboration in cells(training, how):
        check = AdaptCheck(len(info.classes), len(info.corruptions))
        matrix.append(Cell(training.name, row, collaboration, collaboration.strategy(), check, info.corruptions))
    keys = [cell.key for cell in matrix]
    first = keys.index(checkpoints.position.part) if checkpoints.position.stage == "cell" else 0
    for cell in matrix[first:]:
        cell.strategy.begin(network)
        done = checkpoints.done("cell", cell.key)
        if done:
            cell.load(checkpoints, federation)
        for round in range(done + 1, last + 1):
            _round(federation, cell, round)
            if checkpoints.due(round, last):
                cell.save(checkpoints, federation, round)


def needed_records(strategy: Collaborative) -> list[str]:
    """Return the fields of `Adapted` that a rule needs of every reply of its next round."""
    needed = ["shared"]
    if strategy.needs_statistics:
        needed.append("normalization")
    if strategy.needs_start and strategy.start_arrays is None:
        needed.append("start")
    return needed


def _round(federation: Federation, cell: Cell, round: int) -> None:
    """Run one round of a cell; each client's results and the mixing weights are events.

    Raises
    ------
    NoReplies, QuorumMissed
        As `Round.ask`.
    RunError
        The rule cannot weigh these replies.
    """
    start = time.perf_counter()
    strategy = cell.strategy
    federation.update(cell.training, round, strategy)
    clients = federation.testers
    template = cell.template(federation, round)
    cell.check.records = needed_records(strategy)
    limits = SharedLimits.of(federation.settings) if strategy.mixes else None
    outcome = Round(federation, cell.check, cell.training, round, cell.name, strategy, limits).ask(
        lambda: federation.configured(strategy, round, {}, template, clients)
    )
    try:
        strategy.aggregate_train(round, [strategy_message(one, cell.check.records) for one in outcome.replies])
    except ValueError as error:  # options that do not fit these clients, such as an α for which a weight is negative
        raise RunError(f"{cell.name}, round {round}: {error}") from error
    for one in outcome.replies:
        reply: Adapted = one.reply
        federation.events(
            "adapted",
            **cell.about,
            round=round,
            partition=one.partition,
            corruption=cell.corruptions[reply.corruption],
            correct=reply.correct,
            total=reply.total,
            seconds=float(reply.seconds),
        )
    _report(federation, cell, round, outcome, time.perf_counter() - start)


def strategy_message(replied: Replied, fields: Sequence[str]) -> Any:
    """Return a reply as a collaborative strategy aggregates it."""
    arrays: dict[str, Arrays] = {RECORDS[name]: getattr(replied.reply, name) for name in fields}
    return strategy_reply(replied.node, arrays, {"num-examples": replied.reply.num_examples})


def _report(federation: Federation, cell: Cell, round: int, outcome: Outcome, seconds: float) -> None:
    """Send the event of a round."""
    weights = cell.strategy.weights
    assert weights is not None, "a round has at least one usable reply"
    federation.events(
        "adapt_round",
        **cell.about,
        round=round,
        replied=outcome.replied,
        weights=weights.tolist() if len(weights) <= WRITTEN else [],
        wall_seconds=seconds,
        bytes_down=outcome.bytes_down,
        bytes_up=outcome.bytes_up,
        context_bytes=sum(one.reply.context_bytes for one in outcome.replies),
    )
