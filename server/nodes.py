"""The nodes of a run: who takes part, who joins, leaves and comes back, and the sample of each round.

A client is known by its name. On the server it also has a partition, an index that stays the same for the whole run:
its position in name order at the start, the next free index if it joins later. Its node may change: a SuperNode that is
restarted without a key of its own has another id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtta.messages.record import printable
from fedtta.messages.replies import Identity
from fedtta.messages.requests import Identify
from fedtta.messages.transport import Addressed, Answer, Transport
from fedtta.server.events import Events, NodesMissing
from fedtta.server.identification import Identification
from fedtta.server.members import FederationInfo, data_of, difference
from fedtta.settings import Settings, exactly, name_order

POLL = 0.2  # seconds between two looks at the connected nodes
UNIDENTIFIED = -1  # the partition of a node that has not reported one
#: A node whose answer was of such a kind is asked again after so many seconds, then after twice the time, and so on; so
#: often in all while it stays connected. A node that was not reached may be well: its heartbeat was late.
TRANSIENT, AGAIN, ASKED = ("failed", "late"), 60.0, 6


@dataclass(frozen=True)
class Wanted:
    """Which clients a run waits for at its start.

    Parameters
    ----------
    clients : int
        How many it waits for.
    least : int
        How many are enough when the time is over.
    most : int
        How many may take part, with those that join later; 0: any number.
    members : list of str
        Names by partition of a run that is resumed, which waits for these; empty: the run is new.
    """

    clients: int
    least: int
    most: int = 0
    members: Sequence[str] = ()


@dataclass
class Nodes:
    """The nodes of a run by partition, and a clock.

    Parameters
    ----------
    transport : Transport
    by_partition : dict
        partition → node id; updated in place when a client joins, or comes back as another node.
    identities : dict
        partition → the client's identity; updated with it.
    clock, sleep : callable
        Seconds, and waiting for some.
    most : int
        Clients that may take part, with those that join later; 0: any number.
    unfit : callable
        Returns why a client cannot take part in what the run does, or an empty text. Without it one client with another
        role, or without data of its own, would end a run for all.
    barred : callable
        Returns why a client that has not been there since the run was resumed cannot come back, although its data are
        the same, or an empty text.

    Attributes
    ----------
    unknown : dict
        node id → identity of a connected node that is not in `by_partition`, in the order of arrival; None for one that
        could not be identified. One whose answer was refused is asked once while it is connected; one whose answer
        failed or was late, `ASKED` times, after longer and longer waits; one that failed also when a run's start ends.
    """

    transport: Transport
    by_partition: dict[int, int] = field(default_factory=dict)
    identities: dict[int, Identity] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    most: int = 0
    unfit: Callable[[Identity], str] = lambda identity: ""
    barred: Callable[[Identity], str] = lambda identity: ""
    unknown: dict[int, Identity | None] = field(default_factory=dict)
    # node id → times asked in vain, when next, kind of the last answer
    _again: dict[int, tuple[int, float, str]] = field(default_factory=dict)
    _reasons: dict[int, str] = field(default_factory=dict)  # node id → why it does not take part
    _told: set[tuple[int, str]] = field(default_factory=set)  # node id and reason of the events so far
    _away: set[int] = field(default_factory=set)  # partitions that have been reported as gone
    _identification: Identification = field(init=False)

    def __post_init__(self) -> None:
        self._identification = Identification(self.transport, self.sleep)

    @property
    def partitions(self) -> dict[int, int]:
        """Return node id → partition."""
        return {node: partition for partition, node in self.by_partition.items()}

    @property
    def info(self) -> FederationInfo:
        """Return what the run knows of the data of all who ever took part."""
        return FederationInfo.of([self.identities[partition] for partition in sorted(self.identities)])

    def name(self, partition: int) -> str:
        """Return a client's name."""
        return self.identities[partition].name if partition in self.identities else str(partition)

    def ordered(self, partitions: Iterable[int] | None = None) -> list[int]:
        """Return partitions (None: all) in the order of their names; without joiners that is their own order."""
        chosen = self.by_partition if partitions is None else partitions
        return sorted(chosen, key=lambda partition: name_order(self.name(partition)))

    def missing(self) -> list[int]:
        """Return the partitions whose nodes are not connected."""
        connected = set(self.transport.nodes())
        return [partition for partition in self.ordered() if self.by_partition[partition] not in connected]

    def wait_for(self, partitions: Sequence[int], number: int, timeout: float, look: Callable[[], None]) -> int:
        """Wait at most `timeout` seconds until `number` of the partitions' nodes are connected; return how many are.

        `look` is called before each count, to let nodes rejoin.
        """
        end = self.clock() + timeout
        while True:
            look()
            found = len(set(partitions) - set(self.missing()))
            if found >= number or self.clock() >= end:
                return found
            self.sleep(POLL)

    # -- the start of a run

    def assemble(self, request: Identify, wanted: Wanted, timeout: float, events: Events) -> dict[str, int]:
        """Identify the connected nodes and wait until the clients that a run wants are there.

        Returns name → node id of those that fit, in name order; their identities are in `unknown`.

        Nodes that cannot be identified, do not fit, or have the name of an earlier one are left alone; where no client
        fits what the run does (`unfit`), all are returned, and the run refuses its settings. Waiting ends early when as
        many nodes as `wanted.clients` are connected and none of them can be identified.

        Raises
        ------
        NodesMissing
            Fewer than `wanted.least` clients that fit are there after `timeout` seconds; the message names them, and
            why others do not fit.
        """
        end, number = self.clock() + timeout, len(wanted.members) or wanted.clients
        while True:
            over = self.clock() >= end
            connected = dict.fromkeys(self.transport.nodes())  # in their order, found by hash
            # a node that was killed while it was asked comes back under the same id, and is asked again
            self.unknown = {node: one for node, one in self.unknown.items() if one is not None or node in connected}
            fresh = self._to_ask(connected, last=over)
            found = self._fitting(wanted, connected)
            if fresh and (over or len(found) + len(fresh) >= number):
                addressed = [Addressed(node, request) for node in fresh]
                self._note(gather(self.transport, addressed, {}, timeout, events, "identify"), events, {})
                found = self._fitting(wanted, connected)
                if len(found) < number:  # before the time that the run waits for others
                    self._leave_misfits_alone(events)
            hopeless = not found and len(self.unknown) >= number
            if len(found) >= number or over or hopeless:
                break
            self.sleep(POLL)
        if len(found) < wanted.least:
            there = f": {', '.join(found)}" if found else ""
            others = grouped("node", {node: self._reasons[node] for node in sorted(self._reasons)})
            after = "" if hopeless else f" after {timeout:g} s"
            what = f"{len(found)} of {number} clients are there{after}{there}"
            absent = [name for name in wanted.members if name not in found]
            raise NodesMissing("; ".join((what, *([f"missing: {', '.join(absent)}"] if absent else []), *others)))
        return {name: node for name, (node, _) in found.items()}

    def begin(self, nodes: Mapping[str, int], identities: Mapping[str, Identity], wanted: Wanted) -> None:
        """Give clients their partitions.

        Parameters
        ----------
        nodes : mapping
            Name → node id, from `assemble`.
        identities : mapping
            Name → identity, of all members of a run that is resumed: one that is not there may come back later.
        """
        self.most = wanted.most
        for partition, name in enumerate(list(wanted.members) or list(nodes)[: wanted.most or None]):
            absent = -1 - partition  # an id that no node has
            self._admit(partition, nodes.get(name, absent), identities[name])

    def leave_others_alone(self, events: Events) -> None:
        """Report the identified nodes that do not take part, and cannot join later."""
        connected, info = set(self.transport.nodes()), self.info if self.identities else None
        for node, identity in self.unknown.items():
            if identity is not None:
                self._leave_alone(node, identity.name, self._refusal(identity, connected, info), events, {})

    def _leave_misfits_alone(self, events: Events) -> None:
        """Report the identified nodes that do not fit; one may yet, where those to come decide what the run is like."""
        for node, reason in self._reasons.items():
            if identity := self.unknown.get(node):
                self._leave_alone(node, identity.name, reason, events, {})

    def _fitting(self, wanted: Wanted, connected: Collection[int]) -> dict[str, tuple[int, Identity]]:
        """Return the identified clients that fit, in name order; note why the others do not."""
        first: dict[str, tuple[int, Identity]] = {}
        for node, identity in self.unknown.items():
            if identity is None or node not in connected:
                continue
            self._reasons.pop(node, None)  # of an answer before, or beside other nodes
            if wanted.members and identity.name not in wanted.members:
                self._reasons[node] = f"{identity.name}: no client of the run that is resumed"
            elif identity.name in first:
                self._reasons[node] = _same_name(identity.name, first[identity.name][0])
            else:
                first[identity.name] = node, identity
        ordered = {name: first[name] for name in sorted(first, key=name_order)}
        if not ordered:
            return {}
        info = FederationInfo.agreed([identity for _, identity in ordered.values()])
        misfits = {name: info.misfit(identity) for name, (_, identity) in ordered.items()}
        unfit = {name: self.unfit(identity) for name, (_, identity) in ordered.items()}
        if not all(unfit.values()):
            misfits = {name: reason or unfit[name] for name, reason in misfits.items()}
        self._reasons |= {ordered[name][0]: _named(name, reason) for name, reason in misfits.items() if reason}
        return {name: one for name, one in ordered.items() if not misfits[name]}

    # -- between rounds

    def update(
        self, request: Identify, timeout: float, events: Events, about: Mapping[str, Any], join: bool = True
    ) -> dict[int, int]:
        """Report clients that left, let those that came back take their places, and let others join.

        This waits for new nodes for a few seconds (`fedtta.server.identification`); one that answers later does so at a
        later update.

        Parameters
        ----------
        request : Identify
            Sent to the nodes that have not been asked before.
        timeout : float
            Seconds that a node has for its reply.
        about : mapping
            Further fields of the events: training, round.
        join : bool
            Whether new clients may join now.

        Returns
        -------
        dict
            partition → id of the node that was replaced.
        """
        connected = set(self.transport.nodes())
        self._report_absences(connected, events, about)
        others = sorted(connected - set(self.by_partition.values()))
        self._identification.ask(self._to_ask(others), request, timeout)
        self._note(self._identification.answers(), events, about)
        self.unknown = {node: identity for node, identity in self.unknown.items() if node in connected}
        replaced: dict[int, int] = {}
        identified = [(node, identity) for node, identity in self.unknown.items() if identity is not None]
        # of a thousand clients once, not once for each node
        info = self.info if identified and self.identities else None
        for node, identity in identified:
            partition = self._partition_of(identity.name)
            if reason := self._refusal(identity, connected, info):
                self._leave_alone(node, identity.name, reason, events, about)
            elif partition is not None:
                replaced[partition] = self._rejoin(partition, node, identity, events, about)
            elif join:
                self._join(node, identity, events, about)
                info = self.info
        return replaced

    def _report_absences(self, connected: set[int], events: Events, about: Mapping[str, Any]) -> None:
        """Report once that a client has left, and that its node is connected again."""
        for partition in self.ordered():
            node, was_away = self.by_partition[partition], partition in self._away
            if (node not in connected) == was_away:
                continue
            who = {"partition": partition, "name": self.name(partition), "node_id": node}
            if was_away:
                self._away.remove(partition)
                events("rejoined", **about, **who, old_node_id=node)
            else:
                self._away.add(partition)
                events("left", **about, **who)

    def _rejoin(self, partition: int, node: int, identity: Identity, events: Events, about: Mapping[str, Any]) -> int:
        """Let a node take the place of a client's old node, whose id is returned."""
        old = self.by_partition[partition]
        self._admit(partition, node, identity)
        who = {"partition": partition, "name": identity.name, "node_id": node, "old_node_id": old}
        events("rejoined", **about, **who, sizes=list(identity.sizes), data=data_of(identity))
        return old

    def _join(self, node: int, identity: Identity, events: Events, about: Mapping[str, Any]) -> None:
        """Give a new client the next free partition."""
        partition = 1 + max(self.by_partition, default=-1)
        self._admit(partition, node, identity)
        who = {"partition": partition, "name": identity.name, "node_id": node}
        own = {"sizes": list(identity.sizes), "role": identity.role, "data": data_of(identity)}
        events("joined", **about, **who, **own)

    def _admit(self, partition: int, node: int, identity: Identity) -> None:
        self.by_partition[partition], self.identities[partition] = node, identity
        self.unknown.pop(node, None)
        self._reasons.pop(node, None)
        self._away.discard(partition)

    def _to_ask(self, connected: Iterable[int], last: bool = False) -> list[int]:
        """Return the nodes, of those that are connected, that are to be asked who they are, now.

        If it is the last time, those that failed are asked again: their agents may have started since.
        """
        now, known = self.clock(), list(connected)
        self._again = {node: self._again[node] for node in known if node in self._again}
        due = {node for node, (_, when, kind) in self._again.items() if when <= now or (last and kind == "failed")}
        return [node for node in known if node in due or node not in self.unknown]

    def _note(self, answers: Iterable[Answer], events: Events, about: Mapping[str, Any]) -> None:
        """Note who unknown nodes are; one that cannot be identified is left alone, some of them for a while."""
        now = self.clock()
        for answer in answers:
            identity = answer.reply if isinstance(answer.reply, Identity) else None
            self.unknown[answer.node] = identity
            times, *_ = self._again.pop(answer.node, (0,))
            if answer.kind in TRANSIENT and times + 1 < ASKED:
                self._again[answer.node] = times + 1, now + AGAIN * 2**times, answer.kind
            if identity is None:
                self._leave_alone(answer.node, None, answer.reason or "no identity", events, about)

    def _partition_of(self, name: str) -> int | None:
        """Return the partition of the client of this name; None if there is none."""
        found = (partition for partition, identity in self.identities.items() if identity.name == name)
        return next(found, None)

    def _refusal(self, identity: Identity, connected: Collection[int], info: FederationInfo | None) -> str:
        """Return why an unknown node does not take part; empty if it may.

        `info` is that of the run at the moment; None: it has no clients yet.
        """
        partition = self._partition_of(identity.name)
        if partition is not None:
            holder = self.by_partition[partition]
            if holder in connected:
                return _same_name(identity.name, holder)
            barred = self.barred(identity) if holder < 0 else ""  # see `begin`
            return _named(identity.name, difference(self.identities[partition], identity) or barred)
        if info is None:
            return ""
        if reason := info.misfit(identity) or self.unfit(identity):
            return _named(identity.name, reason)
        if self.most and len(self.identities) >= self.most:
            return _named(identity.name, f"max-clients = {self.most}, and the run has that many clients")
        return ""

    def _leave_alone(self, node: int, name: str | None, reason: str, events: Events, about: Mapping[str, Any]) -> None:
        """Report once why a node does not take part; its name may be unknown."""
        if reason:
            self._reasons[node] = reason
        if reason and (node, reason) not in self._told:
            self._told.add((node, reason))
            events("left_alone", **about, node_id=node, name=name, reason=reason)


def _same_name(name: str, holder: int) -> str:
    return f"{name}: node {holder} has this name, too, and came first"


def _named(name: str, reason: str) -> str:
    return printable(f"{name}: {reason}") if reason else ""


def gather(
    transport: Transport,
    requests: Sequence[Addressed],
    partitions: Mapping[int, int],
    timeout: float,
    events: Events,
    phase: str,
    round: int | None = None,
    arrived: Callable[[Answer], Answer] = lambda answer: answer,
) -> list[Answer]:
    """Return the answers to requests, in the clients' order: sums must not depend on the order of arrival.

    Parameters
    ----------
    partitions : mapping
        node id → partition, in the order of the answers; nodes that are not in it come first, by id.
    phase, round
        Name and number for progress.
    arrived : callable
        Called with each answer when it comes; what it returns takes its place.
    """
    asked = [partitions[one.node] for one in requests if one.node in partitions]
    events("phase", name=phase, round=round, total=len(requests), asked=asked)
    answers: list[Answer] = []
    for answer in transport.exchange(requests, timeout):
        came, node = answer.kind != "late", answer.node
        answers.append(arrived(answer))
        del answer  # its arrays may be in a file now, and need not be in memory while the next ones come
        if came:
            events("answered", phase=phase, partition=partitions.get(node, UNIDENTIFIED))
    position = {node: index for index, node in enumerate(partitions)}
    return sorted(answers, key=lambda answer: (position.get(answer.node, UNIDENTIFIED), answer.node))


def grouped(kind: str, reasons: Mapping[Any, str]) -> list[str]:
    """Return one line for each different reason, with the names or numbers of all that have it."""
    by_reason: dict[str, list[Any]] = {}
    for number, reason in reasons.items():
        by_reason.setdefault(reason, []).append(number)
    return [
        f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {reason}"
        for reason, numbers in by_reason.items()
    ]


def cohort_size(clients: int, fraction: float) -> int:
    """Return how many clients a fraction of them is; at least one."""
    return max(1, int(clients * exactly(fraction)))


def cohorts(settings: Settings, sources: int) -> dict[str, int]:
    """Return how many of the source clients a round asks, by what says so: rounds of training, and of rates."""
    fraction, rates = settings.fraction_train, settings.rates_clients
    return {
        f"fraction-train = {fraction:g} of clients = {sources} samples": cohort_size(sources, fraction),
        f"rates-clients = {rates} samples": min(rates or sources, sources),
    }


def sample(partitions: Sequence[int], fraction: float, seed: int, round: int) -> list[int]:
    """Sample a fraction of the partitions, at least one, by position from (seed, round) alone; in the order given."""
    size = cohort_size(len(partitions), fraction)
    if size == len(partitions):
        return list(partitions)
    draw = np.random.default_rng([seed, round])
    return [partitions[i] for i in sorted(draw.choice(len(partitions), size, replace=False))]
