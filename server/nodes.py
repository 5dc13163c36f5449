"""The nodes of a run: their partitions, their clients' data, and the sample of each round.

A node that was restarted without a key of its own has another id. When a node is missing and an unknown one is
connected, the unknown node is asked to identify itself, once; if it holds the missing node's data it replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from fedtta.messages.replies import Identity
from fedtta.messages.requests import Identify
from fedtta.messages.transport import Addressed, Answer, Transport
from fedtta.server.events import Events, NodesMissing, RunError

#: Fields of `Identity` that all clients must agree on.
COMMON = (
    "num_partitions", "classes", "channels", "mean", "std", "shifts", "note", "corruptions", "stream_rounds",
)  # fmt: skip
#: What else a client that comes back must report unchanged.
OWN = ("sizes", "role")
POLL = 0.2  # seconds between two looks at the connected nodes
UNIDENTIFIED = -1  # the partition of a node that has not reported one


@dataclass(frozen=True)
class FederationInfo:
    """What the server knows of the clients' data: sizes and kinds, no label counts.

    Parameters
    ----------
    classes : list of str
    channels : int
    mean, std : list of float
        Normalization of the images, per channel.
    shifts : list of str
        Test distributions that the settings stand for.
    note : str
        See `fedtta.messages.replies.Identity`.
    sizes : list of [int, int, int]
        Samples for training, validation and test, by partition.
    roles : list of str
        "both", "source" or "target", by partition.
    corruptions : list of str
        Of the test-time streams; empty without collaborations.
    stream_rounds : int
        Length of these streams; 0 without collaborations.
    """

    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    shifts: list[str]
    note: str
    sizes: list[list[int]]
    roles: list[str] = field(default_factory=list)
    corruptions: list[str] = field(default_factory=list)
    stream_rounds: int = 0

    @classmethod
    def agree(cls, identities: Mapping[int, Identity]) -> Self:
        """Return what the clients report, by partition.

        Raises
        ------
        RunError
            They disagree; the message names the first client that differs, and the field.
        """
        first = identities[min(identities)]
        for partition, identity in sorted(identities.items()):
            for name in COMMON:
                if getattr(identity, name) != getattr(first, name):
                    value, other = getattr(identity, name), getattr(first, name)
                    raise RunError(f"client {partition}: {_key(name)} = {value!r}, others have {other!r}")
        common = {name: getattr(first, name) for name in COMMON if name != "num_partitions"}
        ordered = [identity for _, identity in sorted(identities.items())]
        return cls(sizes=[list(one.sizes) for one in ordered], roles=[one.role for one in ordered], **common)


def difference(before: Identity, now: Identity) -> str:
    """Return how a client that came back differs from its first identity; empty if no difference matters."""
    for name in (*COMMON, *OWN):
        if getattr(now, name) != getattr(before, name):
            return f"{_key(name)} = {getattr(now, name)!r}, at first it was {getattr(before, name)!r}"
    return ""


def _key(name: str) -> str:
    return name.replace("_", "-")


@dataclass
class Nodes:
    """The nodes of a run by partition, and a clock.

    Parameters
    ----------
    transport : Transport
    by_partition : dict
        partition → node id; updated in place when a client comes back as another node.
    identities : mapping
        partition → the client's identity at the start. A client that is not in it cannot come back as another node.
    clock, sleep : callable
        Seconds, and waiting for some.

    Attributes
    ----------
    unknown : dict
        node id → identity of a connected node that is not in `by_partition`; None for one that did not identify itself.
    """

    transport: Transport
    by_partition: dict[int, int]
    identities: Mapping[int, Identity] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    unknown: dict[int, Identity | None] = field(default_factory=dict)

    @property
    def partitions(self) -> dict[int, int]:
        """Return node id → partition."""
        return {node: partition for partition, node in self.by_partition.items()}

    def missing(self) -> list[int]:
        """Return the partitions whose nodes are not connected."""
        connected = set(self.transport.nodes())
        return [partition for partition, node in sorted(self.by_partition.items()) if node not in connected]

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

    def rejoin(self, request: Identify, timeout: float, events: Events, about: Mapping[str, Any]) -> dict[int, int]:
        """Let connected nodes that hold a missing node's partition replace it.

        Parameters
        ----------
        request : Identify
            Sent to the nodes that have not been asked before.
        timeout : float
            Seconds to wait for the replies.
        about : mapping
            Further fields of the events: training, round.

        Returns
        -------
        dict
            partition → id of the node that was replaced.
        """
        missing = set(self.missing())
        others = sorted(set(self.transport.nodes()) - set(self.by_partition.values()))
        if not missing or not others:
            return {}
        self._identify([node for node in others if node not in self.unknown], request, timeout, events, about)
        replaced: dict[int, int] = {}
        for node in others:
            identity = self.unknown[node]
            if identity is None or identity.partition_id not in missing or self._refusal(identity):
                continue
            partition = identity.partition_id
            missing.remove(partition)
            del self.unknown[node]
            replaced[partition], self.by_partition[partition] = self.by_partition[partition], node
            events("rejoined", **about, partition=partition, node_id=node, old_node_id=replaced[partition])
        return replaced

    def _identify(
        self, nodes: Sequence[int], request: Identify, timeout: float, events: Events, about: Mapping[str, Any]
    ) -> None:
        """Ask unknown nodes for their identity; one that cannot replace any node is reported as an event."""
        addressed = [Addressed(node, request) for node in nodes]
        for answer in gather(self.transport, addressed, {}, timeout, events, "identify"):
            identity = answer.reply if isinstance(answer.reply, Identity) else None
            self.unknown[answer.node] = identity
            kind, reason = answer.kind or "refused", answer.reason
            if identity is not None:
                reason = self._refusal(identity) or self._conflict(identity)
            if reason:
                partition = None if identity is None else identity.partition_id
                events(kind, **about, phase="identify", partition=partition, node_id=answer.node, reason=reason)

    def _conflict(self, identity: Identity) -> str:
        """Return which connected node already holds an unknown node's partition; empty when none does."""
        holder = self.by_partition[identity.partition_id]
        return f"node {holder} holds this partition and is connected" if holder in self.transport.nodes() else ""

    def _refusal(self, identity: Identity) -> str:
        """Return why a node cannot replace another, whichever is missing; empty if it can."""
        partition = identity.partition_id
        if partition not in self.by_partition or partition not in self.identities:
            return f"partition-id = {partition!r}: allowed are {', '.join(map(str, sorted(self.identities)))}"
        return difference(self.identities[partition], identity)


def wait_for_nodes(transport: Transport, expected: int, timeout: float) -> list[int]:
    """Wait until `expected` nodes are connected: a ServerApp starts before all nodes are registered.

    Raises
    ------
    NodesMissing
        Fewer are connected after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while len(nodes := transport.nodes()) < expected:
        if time.monotonic() > end:
            raise NodesMissing(f"{len(nodes)} of {expected} nodes are connected after {timeout:g} s")
        time.sleep(min(POLL, timeout))
    return nodes


def identify(
    transport: Transport, nodes: Sequence[int], request: Identify, timeout: float, events: Events
) -> tuple[dict[int, int], dict[int, Identity]]:
    """Ask nodes which partition they hold.

    Returns
    -------
    by_partition, identities
        partition → node id, and partition → identity.

    Raises
    ------
    NodesMissing
        A node did not reply or failed, or two hold the same partition; all are named.
    """
    by_partition: dict[int, int] = {}
    identities: dict[int, Identity] = {}
    doubled: list[str] = []
    failures: dict[int, str] = {}
    for answer in gather(transport, [Addressed(node, request) for node in nodes], {}, timeout, events, "identify"):
        identity = answer.reply
        if not isinstance(identity, Identity):
            failures[answer.node] = answer.reason
        elif (partition := identity.partition_id) in by_partition:
            doubled.append(f"nodes {by_partition[partition]} and {answer.node} both hold partition {partition}")
        else:
            by_partition[partition], identities[partition] = answer.node, identity
    if problems := grouped("node", failures) + doubled:
        raise NodesMissing("; ".join(problems))
    return by_partition, identities


def gather(
    transport: Transport,
    requests: Sequence[Addressed],
    partitions: Mapping[int, int],
    timeout: float,
    events: Events,
    phase: str,
) -> list[Answer]:
    """Return the answers to requests, sorted by partition: sums must not depend on the order of arrival.

    Parameters
    ----------
    partitions : mapping
        node id → partition; nodes that are not in it come first, by id.
    phase : str
        Name for progress.
    """
    events("phase", name=phase, total=len(requests))
    answers: list[Answer] = []
    for answer in transport.exchange(requests, timeout):
        answers.append(answer)
        if answer.kind != "late":
            events("answered", phase=phase, partition=partitions.get(answer.node, UNIDENTIFIED))
    return sorted(answers, key=lambda answer: (partitions.get(answer.node, UNIDENTIFIED), answer.node))


def grouped(kind: str, reasons: Mapping[int, str]) -> list[str]:
    """Return one line for each different reason, with the numbers of all that have it."""
    by_reason: dict[str, list[int]] = {}
    for number, reason in reasons.items():
        by_reason.setdefault(reason, []).append(number)
    return [
        f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {reason}"
        for reason, numbers in by_reason.items()
    ]


def cohort_size(clients: int, fraction: float) -> int:
    """Return how many clients a fraction of them is, at least one."""
    return max(1, int(clients * fraction))


def sample(partitions: Sequence[int], fraction: float, seed: int, round: int) -> list[int]:
    """Sample a fraction of the partitions, at least one, from (seed, round) alone; sorted."""
    ordered = sorted(partitions)
    size = cohort_size(len(ordered), fraction)
    if size == len(ordered):
        return ordered
    draw = np.random.default_rng([seed, round])
    return sorted(int(i) for i in draw.choice(ordered, size, replace=False))
