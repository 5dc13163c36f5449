"""Which node holds which partition while a run goes on.

A node that was restarted without a key of its own has another id. When a node is missing and one is there that nobody
knows, the latter is asked who it is, once; if it holds the missing one's data it takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from server.events import Events
from server.nodes import IDENTIFY, gather
from server.world import difference
from strategies import Collaborative

Identity = Mapping[str, Any]
NOBODY = -1  # the partition of a node that has not said which it is


@dataclass
class Members:
    """The nodes of a run.

    Parameters
    ----------
    grid : Grid
    nodes : dict
        partition → node id; brought up to date in place.
    identities : mapping
        partition → what the client said of itself at first. A client that is not in it cannot come back as another
        node.
    strangers : dict
        node id → what a node said that is not one of `nodes`; empty for one that did not say who it is.
    clock, sleep : callable
        Seconds, and waiting for some.
    """

    grid: Grid
    nodes: dict[int, int]
    identities: Mapping[int, Identity] = field(default_factory=dict)
    strangers: dict[int, Identity] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def missing(self) -> list[int]:
        """Return the partitions whose nodes are not there, as the grid says."""
        there = set(self.grid.get_node_ids())
        return [partition for partition, node in sorted(self.nodes.items()) if node not in there]

    def rejoin(
        self, config: ConfigRecord, timeout: float, events: Events, about: Mapping[str, Any], strategy: Strategy | None
    ) -> None:
        """Let nodes that came take the places of those that are missing.

        Parameters
        ----------
        config : ConfigRecord
            Of the message that asks a node who it is.
        timeout : float
            Seconds to wait for the answers.
        about : mapping
            What the events say beside the node: training, round.
        strategy : Strategy, optional
            A collaborative one keeps its clients' arrays by node id and is told of the new ones. Others send a node
            that they do not know all that it needs.
        """
        missing = set(self.missing())
        there = sorted(self.grid.get_node_ids())
        unknown = [node for node in there if node not in self.nodes.values()]
        if not missing or not unknown:
            return
        self._introduce([node for node in unknown if node not in self.strangers], config, timeout, events, about)
        before = dict(self.nodes)
        for node in unknown:
            identity = self.strangers[node]
            partition = _partition(identity)
            if partition is not None and partition in missing and not self._refusal(identity):
                missing.remove(partition)
                del self.strangers[node]
                self.nodes[partition] = node
                events("rejoined", **about, partition=partition, node_id=node, old_node_id=before[partition])
        if isinstance(strategy, Collaborative) and self.nodes != before:
            strategy.load_state_arrays(strategy.state_arrays(before), self.nodes)

    def wait_for(
        self, partitions: list[int], number: int, timeout: float, look: Callable[[], None], poll: float = 0.2
    ) -> int:
        """Wait until a number of the partitions' nodes are there, and return how many are.

        Parameters
        ----------
        timeout : float
            Seconds to wait at most.
        look : callable
            Called before each count, to let nodes rejoin.
        """
        end = self.clock() + timeout
        while True:
            look()
            found = len(set(partitions) - set(self.missing()))
            if found >= number or self.clock() >= end:
                return found
            self.sleep(poll)

    def _introduce(
        self, nodes: list[int], config: ConfigRecord, timeout: float, events: Events, about: Mapping[str, Any]
    ) -> None:
        """Ask nodes who they are and keep what they say; whoever is of no use is named in an event."""
        content = RecordDict({"config": config})
        messages = [Message(content, dst_node_id=node, message_type=IDENTIFY) for node in nodes]
        nobody = dict.fromkeys(nodes, NOBODY)
        answers = gather(self.grid, messages, nobody, timeout, events, "identify", self.clock, self.sleep)
        for answer in answers:
            identity: Identity = {}
            kind, reason = answer.kind, answer.reason
            if answer.reply is not None:
                identity = dict(answer.reply.content.config_records.get("identity") or {})
                kind, reason = "refused", self._refusal(identity) or self._taken(identity)
            self.strangers[answer.node_id] = identity
            if reason:
                where = {**about, "phase": "identify", "partition": _partition(identity)}
                events(kind, **where, node_id=answer.node_id, reason=reason)

    def _taken(self, identity: Identity) -> str:
        """Say which node holds a stranger's partition; empty when none does."""
        holder = self.nodes[int(identity["partition-id"])]
        return f"node {holder} holds this partition and is there" if holder in self.grid.get_node_ids() else ""

    def _refusal(self, identity: Identity) -> str:
        """Say why a node cannot take a place, whoever is missing; empty if it can."""
        partition = _partition(identity)
        if partition not in self.nodes or partition not in self.identities:
            return f"partition-id = {partition!r}: allowed are {', '.join(map(str, sorted(self.identities)))}"
        return difference(self.identities[partition], identity)


def _partition(identity: Identity) -> int | None:
    """Return the partition that a node says it holds; None when that is no number."""
    value = identity.get("partition-id")
    return value if type(value) is int else None
