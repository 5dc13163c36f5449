"""Arrays that every node receives once, such as the network of a method that exchanges a few numbers a round.

A node that has the arrays receives only their digest. A reply to a message with the digest confirms that the node has
them; a node that does not reply may have been restarted and receives them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedtta.messages.arrays import digest


def array_bytes(record: ArrayRecord) -> int:
    """Return the size of a record's numbers in bytes, without names and headers."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in record.values())


class Broadcast:
    """One set of arrays that every node receives once.

    Parameters
    ----------
    arrays : ArrayRecord
        Its digest is `digest`.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self.arrays = arrays
        self.digest = digest({name: array.numpy() for name, array in arrays.items()})
        self._holders: set[int] = set()

    def records(self, node_id: int) -> dict[str, ArrayRecord]:
        """Return the records that a message to this node must carry: {"arrays": the arrays}, or {} if it has them."""
        return {} if node_id in self._holders else {"arrays": self.arrays}

    def held(self, node_ids: Iterable[int]) -> None:
        """Mark these nodes as having the arrays."""
        self._holders |= set(node_ids)

    def lost(self, node_ids: Iterable[int]) -> None:
        """Mark these nodes as possibly lacking the arrays."""
        self._holders -= set(node_ids)


class BroadcastStrategy(Strategy):
    """A strategy whose nodes receive the network once, and then only what changes.

    Messages carry the records "config" (with "server-round" and "network", the digest) and, for a node that does not
    have it yet, "arrays" (the network); a subclass adds its own. There is no evaluation round.

    Parameters
    ----------
    network : ArrayRecord, optional
        The frozen network; `begin` may set it later.

    Attributes
    ----------
    sent_bytes : int
        Bytes of all arrays in the messages of the last round.
    """

    def __init__(self, network: ArrayRecord | Broadcast | None = None) -> None:
        self.sent_bytes = 0
        self._network: Broadcast | None = None
        self._asked: list[int] = []
        if network is not None:
            self.begin(network)

    def begin(self, network: ArrayRecord | Broadcast) -> None:
        """Set the network that all nodes work with.

        The `Broadcast` of an earlier strategy also says which nodes have it already.
        """
        broadcast = network if isinstance(network, Broadcast) else Broadcast(network)
        if not broadcast.arrays:
            raise ValueError("the network has no arrays")
        self._network, self._asked = broadcast, []

    @property
    def network(self) -> Broadcast:
        """Return the network; ValueError before `begin`."""
        if self._network is None:
            raise ValueError(f"{type(self).__name__} has no network yet: give it one, or call begin(network)")
        return self._network

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: nodes measure while they adapt."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Return None: there is no evaluation round."""
        return None

    def _messages(
        self, server_round: int, own: Mapping[int, Mapping[str, ArrayRecord]], config: Mapping[str, Any], kind: str
    ) -> list[Message]:
        """Return one message of a type for each node: its own records, and the network if it lacks it."""
        self.network.lost(self._asked)  # a round that was never aggregated
        self._asked, self.sent_bytes = list(own), 0
        envelope = ConfigRecord({**config, "server-round": server_round, "network": self.network.digest})
        messages = []
        for node, records in own.items():
            content = RecordDict({**self.network.records(node), **records, "config": envelope})
            self.sent_bytes += sum(array_bytes(record) for record in content.array_records.values())
            messages.append(Message(content, dst_node_id=node, message_type=kind))
        return messages

    def _answered(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return the good replies by node id, in the order given, and update which nodes have the network."""
        good = {reply.metadata.src_node_id: reply for reply in replies if not reply.has_error()}
        self.network.lost(set(self._asked) - set(good))
        self.network.held(good)
        self._asked = []
        return good
