"""The round loop: strategies configure and aggregate, everything around it is here.

Flower's `Strategy.start` always begins at round 1 and has no statistics round and no per-node result; this loop calls
the same `configure_train` and `aggregate_train`, so Flower's strategies run in it unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from messages.held import held_record
from messages.layout import as_held
from server.attempts import Question, Replies
from server.checkpoints import Checkpoints, Place
from server.errors import NoReplies
from server.events import Events
from server.membership import Identity, Members
from server.methods import Training
from server.nodes import CohortGrid, sample
from server.strategy_state import load_strategy_records, strategy_records
from server.trainings import Phase
from server.validation import Expectation, Expected
from settings import Settings
from strategies import facts
from strategies.broadcast import array_bytes
from strategies.partial import shared_names

Arrays = Mapping[str, NDArray[Any]]
#: What `summarise` counts with, and of what the second is a share.
NUMBERS = ("train-loss", "seconds", "validation-total", "validation-correct")
SHARES = (("validation-correct", "validation-total"),)
PERSONAL = "personal-validation-correct"


@dataclass(frozen=True)
class Federation:
    """The nodes of a run and how to reach them.

    Parameters
    ----------
    grid : Grid
    nodes : dict
        partition → node id; changed in place when a client comes back as another node.
    settings : Settings
    run : str
        Identity of the run, for clients' private state.
    events : Events
    roles : mapping
        partition → "both", "source" or "target"; "both" where nothing is said.
    back_to : callable
        Training or cell → the rounds that its checkpoints could take the server back to, for clients' private state.
    identities, strangers, clock, sleep
        See `Members`. What clients said of their sizes bounds the examples that they may claim later.
    """

    grid: Grid
    nodes: dict[int, int]
    settings: Settings
    run: str
    events: Events
    roles: Mapping[int, str] = field(default_factory=dict)
    back_to: Callable[[str], list[int]] = lambda _: []
    identities: Mapping[int, Identity] = field(default_factory=dict)
    strangers: dict[int, Identity] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def members(self) -> Members:
        """Return who is there, and who comes back."""
        return Members(self.grid, self.nodes, self.identities, self.strangers, self.clock, self.sleep)

    @property
    def sources(self) -> list[int]:
        """Partitions that train."""
        return [partition for partition in sorted(self.nodes) if self.roles.get(partition) != "target"]

    @property
    def testers(self) -> list[int]:
        """Partitions that test."""
        return [partition for partition in sorted(self.nodes) if self.roles.get(partition) != "source"]

    def partitions_of(self, messages: Iterable[Message]) -> list[int]:
        """Return the partitions that messages are for, sorted."""
        partitions = {node: partition for partition, node in self.nodes.items()}
        return sorted(partitions[message.metadata.dst_node_id] for message in messages)

    def config(self, training: str = "", phase: Phase | None = None, **values: Any) -> ConfigRecord:
        """Return the config of a message: all settings, and what this message is about."""
        phase = phase or Phase()
        envelope = {"run": self.run, "training": training, "rule": phase.rule, "objective": phase.objective, **values}
        back = self.back_to(str(values.get("cell", training)))
        return ConfigRecord({**self.settings.flat(), **envelope, "checkpoint-rounds": back})

    def view(self, partitions: Sequence[int]) -> CohortGrid:
        """Return the grid as if only these partitions were there."""
        return CohortGrid(self.grid, [self.nodes[partition] for partition in partitions])

    def collect(
        self, messages: Iterable[Message], expected: Expectation, training: str, round: int, phase: str
    ) -> Replies:
        """Send messages and return the good replies; a round that is done again sends the same contents.

        Raises as `ask`.
        """
        partitions = {node: partition for partition, node in self.nodes.items()}
        contents = [(partitions[m.metadata.dst_node_id], m.content, m.metadata.message_type) for m in messages]

        def addressed() -> list[Message]:
            return [Message(content, dst_node_id=self.nodes[p], message_type=kind) for p, content, kind in contents]

        return Question(self, expected, training, round, phase).ask(addressed)[1]

    def ask(
        self,
        strategy: Strategy,
        round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        partitions: Sequence[int],
        expected: Expectation,
        training: str,
        phase: str,
    ) -> tuple[list[Message], Replies]:
        """Let a strategy configure a round for some partitions, and return its messages and the good replies.

        Failed, late and refused nodes are reported as events and left out. A round with too few good replies is done
        again, once: the strategy configures it anew, so that whoever did not reply gets all that it may lack.

        Raises
        ------
        NoReplies
            Not one reply is good.
        QuorumMissed
            Too few are, the second time as well.
        """

        def configured() -> list[Message]:
            own = ConfigRecord({**config})  # strategies write into it
            return list(strategy.configure_train(round, arrays, own, self.view(partitions)))

        return Question(self, expected, training, round, phase, strategy).ask(configured)


def train(
    federation: Federation,
    strategies: Sequence[Strategy],
    training: Training,
    arrays: ArrayRecord,
    checkpoints: Checkpoints | None = None,
) -> ArrayRecord:
    """Run all rounds of all phases, each with its strategy, and return the final model.

    With `checkpoints` it goes on after the last round that they know of; `arrays` is then the model of that round.

    Raises
    ------
    NoReplies
        A round brought no usable reply.
    """
    round, last = 0, training.recipe.rounds(federation.settings)
    done = 0 if checkpoints is None else checkpoints.trained(last)
    for phase, strategy in zip(training.recipe.phases, strategies, strict=True):
        for earlier in range(getattr(federation.settings, phase.rounds)):
            round += 1
            if round <= done:
                continue
            if checkpoints is not None and earlier and round == done + 1:
                load_strategy_records(strategy, checkpoints.records)
            arrays = train_round(federation, strategy, phase, arrays, training.name, round)
            if checkpoints is not None and checkpoints.due(round, last):
                place = Place(training.name, "training", round=round)
                checkpoints.save(place, {"arrays": to_numpy(arrays), **strategy_records(strategy)})
    return arrays


def train_round(
    federation: Federation,
    strategy: Strategy,
    phase: Phase,
    arrays: ArrayRecord,
    training: str,
    round: int,
) -> ArrayRecord:
    """Run one training round and return the new model; dtypes are those of the old one."""
    start = time.perf_counter()
    settings = federation.settings
    cohort = sample(federation.sources, settings.fraction_train, settings.seed, round)
    config = federation.config(training, phase)
    sent = to_numpy(arrays)
    personal = (PERSONAL,) if phase.makes_personal_head else ()
    numbers = (*NUMBERS, *personal, *facts(strategy).client_metrics)
    shares = (*SHARES, *((one, "validation-total") for one in personal))
    joined = set(shared_names(list(sent), phase.shared, phase.kept))
    wanted = {name: value for name, value in sent.items() if name in joined}
    expected = Expected.like("arrays", wanted, numbers=numbers, shares=shares)
    name = f"train {training}"
    messages, replies = federation.ask(strategy, round, arrays, config, cohort, expected, training, name)
    aggregated, _ = strategy.aggregate_train(round, [reply for _, reply in replies])
    if aggregated is None:
        raise NoReplies(f"train {training}, round {round}: the strategy returned no model")
    new = {name: value.astype(sent[name].dtype, copy=False) for name, value in to_numpy(aggregated).items()}
    federation.events(
        "round",
        training=training,
        round=round,
        sampled=cohort,
        replied=[partition for partition, _ in replies],
        **summarise([metrics_of(reply) for _, reply in replies]),
        wall_seconds=time.perf_counter() - start,
        bytes_down=sent_bytes(messages),
        bytes_up=sum(value.nbytes for value in wanted.values()) * len(replies),
    )
    return to_record(new)


def sent_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of all arrays in messages."""
    return sum(array_bytes(record) for message in messages for record in message.content.array_records.values())


def summarise(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the metrics of a round's replies: losses by examples, accuracies as means over clients."""
    examples = np.array([m["num-examples"] for m in metrics], dtype=np.float64)
    losses = np.array([m["train-loss"] for m in metrics], dtype=np.float64)
    return {
        "train_loss": float((losses * examples).sum() / examples.sum()),
        "validation_accuracy": _mean_accuracy(metrics, "validation-correct"),
        "personal_validation_accuracy": _mean_accuracy(metrics, PERSONAL),
        "train_seconds": [float(m["seconds"]) for m in metrics],
    }


def _mean_accuracy(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean accuracy over the clients that have validation samples and say it, None without any."""
    accuracies = [m[key] / m["validation-total"] for m in metrics if m["validation-total"] and key in m]
    return float(np.mean(accuracies)) if accuracies else None


def metrics_of(reply: Message) -> dict[str, Any]:
    """Return the one metric record of a validated reply."""
    return dict(next(iter(reply.content.metric_records.values())))


def to_numpy(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return an array record as numpy arrays."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return numpy arrays as an array record, by reference; nobody may change them afterwards."""
    return held_record({name: as_held(np.asarray(value)) for name, value in arrays.items()})
