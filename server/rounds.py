"""One round of requests and replies, repeated once if need be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedtta.messages.arrays import Arrays, array_bytes
from fedtta.messages.flower import NodesView, held_record, requests_of, strategy_config
from fedtta.messages.record import with_arrays
from fedtta.messages.requests import Identify, Request
from fedtta.messages.store import Store, StoreError
from fedtta.messages.transport import Addressed, Answer
from fedtta.server.aggregation import AGGREGATED, most_examples, needed_replies
from fedtta.server.events import Events, NoReplies, QuorumMissed, RunError
from fedtta.server.limits import Limits
from fedtta.server.nodes import Nodes, gather, grouped
from fedtta.server.observation import Observation
from fedtta.server.privacy import RELEASED_BY
from fedtta.server.validation import Check
from fedtta.settings import Settings, to_json
from fedtta.strategies import Collaborative


@dataclass(frozen=True)
class Replied:
    """A usable reply, with its partition and node, and the bytes of its arrays on the wire."""

    partition: int
    node: int
    reply: Any
    bytes_up: int


@dataclass(frozen=True)
class Outcome:
    """The last attempt of a round.

    Parameters
    ----------
    asked : list of int
        Partitions, in the clients' order.
    requests : list of Request
    replies : list of Replied
        Usable ones, in the clients' order.
    """

    asked: list[int]
    requests: list[Request]
    replies: list[Replied]

    @property
    def replied(self) -> list[int]:
        """Return the partitions of the usable replies."""
        return [one.partition for one in self.replies]

    @property
    def bytes_down(self) -> int:
        """Return the bytes of all arrays in the requests."""
        return sum(message_bytes(request) for request in self.requests)

    @property
    def bytes_up(self) -> int:
        """Return the bytes of all arrays in the usable replies."""
        return sum(one.bytes_up for one in self.replies)


@dataclass(frozen=True)
class Federation:
    """The clients of a run and how to ask them. Lists of them are in name order.

    Parameters
    ----------
    nodes : Nodes
    settings : Settings
    run : str
        Identity of the run, for clients' private state.
    events : Events
    checkpoint_rounds : callable
        Training or cell → the rounds that the server could resume from; clients keep private state of these.
    secure : callable, optional
        Secure aggregation (`fedtta.server.secure.SecureAggregation`).
    observation : Observation, optional
        Asks the clients for telemetry between rounds.
    folder : Path, optional
        Where replies are that have no room in memory; None: the folder of temporary files.
    """

    nodes: Nodes
    settings: Settings
    run: str
    events: Events
    checkpoint_rounds: Callable[[str], list[int]] = lambda _: []
    secure: Callable[..., tuple[list[Replied], list[str]]] | None = None
    observation: Observation | None = None
    folder: Path | None = None

    @property
    def sources(self) -> list[int]:
        """Partitions that train; they have labels."""
        return [one for one in self.nodes.ordered() if self._role(one) != "target" and self.labelled(one)]

    @property
    def testers(self) -> list[int]:
        """Partitions that test, with or without labels."""
        return [one for one in self.nodes.ordered() if self._role(one) != "source"]

    def labelled(self, partition: int) -> bool:
        """Return whether a client has labels."""
        identity = self.nodes.identities.get(partition)
        return identity is None or identity.labelled

    def _role(self, partition: int) -> str:
        identity = self.nodes.identities.get(partition)
        return "both" if identity is None else identity.role

    def names(self, partitions: Iterable[int]) -> list[str]:
        """Return the names of clients."""
        return [self.nodes.name(partition) for partition in partitions]

    def update(self, training: str, round: int, strategy: Strategy | None = None, join: bool = True) -> None:
        """Report clients that left, let those that came back rejoin, and, between rounds, let others join.

        Parameters
        ----------
        strategy : Strategy, optional
            A collaborative one keeps its clients' arrays by node id; they move with a client that rejoins as another
            node. Other strategies send an unknown node all that it needs.
        """
        before = dict(self.nodes.by_partition)
        request, about = Identify(**self.common(training)), {"training": training, "round": round}
        replaced = self.nodes.update(request, self.settings.node_timeout, self.events, about, join)
        if replaced and isinstance(strategy, Collaborative):
            strategy.move(before, self.nodes.by_partition)
        if join and self.observation is not None:
            connected = set(self.nodes.transport.nodes())
            present = {node: one for one, node in self.nodes.by_partition.items() if node in connected}
            self.observation.ask({node: self.nodes.name(partition) for node, partition in present.items()})
            self.observation.tell()

    def common(self, key: str) -> dict[str, Any]:
        """Return the fields that every request has; `key` is the training or the cell."""
        return {
            "settings": to_json(self.settings),
            "run": self.run,
            "checkpoint_rounds": self.checkpoint_rounds(key),
        }

    def addressed(self, partitions: Sequence[int], request: Callable[[int], Request]) -> list[Addressed]:
        """Address the requests of these partitions to the nodes that hold them at the moment."""
        return [Addressed(self.nodes.by_partition[partition], request(partition)) for partition in partitions]

    def configured(
        self, strategy: Strategy, round: int, arrays: Arrays, template: Request, partitions: Sequence[int]
    ) -> list[Addressed]:
        """Let a strategy configure a round for the nodes that hold these partitions at the moment.

        Parameters
        ----------
        arrays : dict
            The `arrays` of `Strategy.configure_train`.
        template : Request
            Without arrays; the strategy fills in what it decides.
        """
        config = strategy_config(template, self.settings.flat())  # strategies write into it
        view = NodesView([self.nodes.by_partition[partition] for partition in partitions])
        return requests_of(strategy.configure_train(round, held_record(arrays), config, view))


@dataclass(frozen=True)
class Round:
    """One round of requests of one kind.

    Parameters
    ----------
    federation : Federation
    check : Check
        What the replies are validated against.
    training : str
    number : int
    phase : str
        Name of the round in messages to users.
    strategy : Strategy, optional
        See `Federation.update`.
    limits : Limits, optional
        What one client may do to the round's means.
    least : int
        Usable replies that it needs, whatever the settings say.
    """

    federation: Federation
    check: Check
    training: str
    number: int
    phase: str
    strategy: Strategy | None = None
    limits: Limits | None = None
    least: int = 1

    def ask(self, make: Callable[[], list[Addressed]]) -> Outcome:
        """Send the requests, and once more if too few replies are usable.

        With fewer usable replies than `needed_replies` and `least` ask for, wait at most `node-timeout` seconds until
        enough of the nodes are connected, and repeat the round once, with new requests: a node that did not reply gets
        all that it may lack. Failed, late and refused nodes are reported as events and left out.

        Parameters
        ----------
        make : callable
            Makes the requests, for the nodes that hold the partitions at that moment.

        Raises
        ------
        NoReplies
            No reply is usable.
        QuorumMissed
            Too few are, or fewer clients are asked than replies are needed.
        RunError
            There is no room on the disk for the replies (`fedtta.messages.store`).
        """
        nodes, settings = self.federation.nodes, self.federation.settings
        self._rejoin()
        requests = make()
        asked = nodes.ordered(nodes.partitions[one.node] for one in requests)
        needed = max(self.least, needed_replies(settings, type(requests[0].request), len(asked)) if requests else 1)
        if len(asked) < needed:
            raise QuorumMissed(f"{self._name}: {len(asked)} clients are asked, {needed} replies are needed")
        usable, lost = self._exchange(requests, needed)
        if len(usable) < needed:
            connected = nodes.wait_for(asked, needed, settings.node_timeout, self._rejoin)
            if connected < needed:
                patience = f"after {settings.node_timeout:g} s"
                lost.append(f"{patience} {connected} of the {len(asked)} clients are connected")
                raise self._missed(usable, needed, lost)
            reasons = "; ".join((self._problem(usable, needed), *lost))
            self.federation.events("note", text=f"{reasons}; the round is repeated")
            requests, usable = make(), []  # those of the first attempt need no room during the second
            usable, lost = self._exchange(requests, needed)
        if len(usable) < needed:
            raise self._missed(usable, needed, lost)
        return Outcome(asked, [one.request for one in requests], self._limited(usable))

    @property
    def _name(self) -> str:
        return f"{self.phase}, round {self.number}"

    @property
    def _about(self) -> dict[str, Any]:
        return {"training": self.training, "round": self.number}

    def _problem(self, usable: list[Replied], needed: int) -> str:
        return f"{self._name}: {len(usable) or 'no'} usable repl{'y' if len(usable) < 2 else 'ies'}, {needed} needed"

    def _missed(self, usable: list[Replied], needed: int, lost: Sequence[str]) -> QuorumMissed:
        kind = QuorumMissed if usable else NoReplies
        return kind("; ".join((self._problem(usable, needed), *lost)))

    def _rejoin(self) -> None:
        """Let clients that came back as other nodes replace their old nodes; new ones join between rounds only."""
        self.federation.update(self.training, self.number, self.strategy, join=False)

    def _exchange(self, requests: Sequence[Addressed], needed: int) -> tuple[list[Replied], list[str]]:
        """Exchange requests once; replies that are aggregated go through secure aggregation, if it is on."""
        self._tell_attempt(requests)
        secure = self.federation.secure
        if secure is None or not requests or type(requests[0].request) not in AGGREGATED:
            return self._once(requests)

        def send(asked: Sequence[Addressed], check: Check) -> tuple[list[Replied], list[str]]:
            return replace(self, check=check, limits=None)._once(asked)

        return secure(requests, self.check, send, needed)

    def _tell_attempt(self, requests: Sequence[Addressed]) -> None:
        """Send the event of what clients are asked to release, before they are, if replies have noise."""
        released = RELEASED_BY.get(type(requests[0].request)) if requests else None
        if released and self.federation.settings.differential_privacy:
            asked = sorted(self.federation.nodes.partitions[one.node] for one in requests)
            self.federation.events("attempt", **self._about, releases=released, asked=asked)

    def _once(self, requests: Sequence[Addressed]) -> tuple[list[Replied], list[str]]:
        """Return the usable replies, and a line for each reason why others are missing."""
        nodes, settings, events = self.federation.nodes, self.federation.settings, self.federation.events
        partitions = {nodes.by_partition[partition]: partition for partition in nodes.ordered()}
        position = {node: index for index, node in enumerate(partitions)}
        ordered = sorted(requests, key=lambda one: position[one.node])
        kind = type(ordered[0].request) if ordered else Request
        store, largest = Store(self.federation.folder), dict[int, float]()

        def arrived(answer: Answer) -> Answer:
            """Check a reply alone, and keep it where there is room; a refused one is not kept."""
            if answer.reply is None:
                return answer
            partition = partitions[answer.node]
            examples = most_examples(settings, kind, nodes.identities.get(partition))
            labelled = self.federation.labelled(partition)
            reason, largest[answer.node] = self.check.alone(
                answer.reply, examples, settings.update_norm_bound, labelled
            )
            if reason:
                return Answer(answer.node, None, "refused", reason)
            return replace(answer, reply=with_arrays(answer.reply, store.keep))

        with self._on_disk():
            answers = gather(
                nodes.transport, ordered, partitions, settings.round_timeout, events, self.phase, self.number, arrived
            )
        usable = [one for one in answers if one.reply is not None]
        replies = [Replied(partitions[one.node], one.node, one.reply, one.bytes) for one in usable]
        refusals = self.check.among([one.reply for one in replies], [largest[one.node] for one in replies])
        reasons = {one.node: reason for one, reason in zip(replies, refusals, strict=True) if reason}
        reasons |= self._beyond_limits([one for one in replies if one.node not in reasons])
        lost: dict[str, dict[str, str]] = {"late": {}, "failed": {}, "refused": {}}
        for answer in answers:
            if answer.kind or answer.node in reasons:
                self._report(answer, partitions[answer.node], reasons.get(answer.node, answer.reason), lost)
        lines = [line for event, clients in lost.items() for line in grouped(f"{event} client", clients)]
        return [one for one in replies if one.node not in reasons], lines

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Name the round in which there was no room for replies."""
        try:
            yield
        except StoreError as error:
            raise RunError(f"{self._name}: {error}") from error

    def _beyond_limits(self, replies: list[Replied]) -> dict[int, str]:
        """Return node id → reason for valid replies that do not count at all."""
        if self.limits is None:
            return {}
        identities = [self.federation.nodes.identities.get(one.partition) for one in replies]
        found = self.limits.refused([one.reply for one in replies], identities)
        return {one.node: reason for one, reason in zip(replies, found, strict=True) if reason}

    def _limited(self, replies: list[Replied]) -> list[Replied]:
        """Return the replies within the limits; those that are changed are events."""
        if self.limits is None:
            return replies
        with self._on_disk():
            limited = self.limits([one.reply for one in replies])
        for one, now in zip(replies, limited, strict=True):
            if now.reason:
                where = {**self._about, "phase": self.phase, "partition": one.partition, "node_id": one.node}
                self.federation.events("limited", **where, reason=now.reason)
        return [replace(one, reply=now.reply) for one, now in zip(replies, limited, strict=True)]

    def _report(self, answer: Answer, partition: int, reason: str, lost: dict[str, dict[str, str]]) -> None:
        event = answer.kind or "refused"
        lost[event][self.federation.nodes.name(partition)] = reason
        where = {**self._about, "phase": self.phase, "partition": partition, "node_id": answer.node}
        self.federation.events(event, **where, reason=reason)


def message_bytes(message: Request) -> int:
    """Return the bytes of all arrays in a request."""
    return sum(array_bytes(arrays) for arrays in message.to_record().arrays.values())
