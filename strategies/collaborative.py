"""Collaborative adaptation at test time: every node gets its own mixture of the nodes' adapted arrays.

The base class of pFedBBN and similar methods. In each round a node adapts to one more batch and replies with the arrays
that it shares; the rule computes a row-stochastic matrix W [N, N]; node i receives Σ_j W_ij θ_j with its next message.
The frozen network travels once. Single samples, labels and histories never travel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedtta.messages.arrays import digest
from fedtta.strategies.arrays import (
    Arrays,
    Float,
    Named,
    as_numpy,
    as_record,
    mix,
    reply_arrays,
    require_alike,
    require_stochastic,
)
from fedtta.strategies.broadcast import BroadcastStrategy

#: Message type of a round of adaptation.
ADAPT_MESSAGE = "train.adapt"
#: Records in addition to "shared" that a node sends when its config says "send-normalisation", "send-start".
NORMALISATION, START = "normalisation", "start"
PARTS = ("mean", "variance")


@dataclass(frozen=True)
class Replies:
    """The replies of a round; position i is the same node everywhere.

    Parameters
    ----------
    node_ids : list of int
        In the order of the replies (of the clients' names, when the server sorts them).
    shared : list of mappings
        name → array; the same names, shapes and dtypes everywhere. Empty when the method has nothing to share. May be
        read from a file at each access.
    normalisation : list of dict
        layer → (mean [C], variance [C]) of the node's domain; empty unless the rule needs it.
    examples : [N] float64
        Number of samples that each node has adapted to in this round.
    """

    node_ids: list[int]
    shared: list[Arrays]
    normalisation: list[dict[str, tuple[NDArray[Any], NDArray[Any]]]]
    examples: Float


class Collaborative(BroadcastStrategy):
    """Mix the arrays that nodes share, with weights of each node's own. A subclass computes the weights in `weigh`.

    A message carries the records "config", "arrays" (the network, the first time only) and "shared" (the node's own
    mixture, from its second message on). Its config holds "server-round", "network" (digest), "proximal-mu",
    "send-normalisation" and "send-start". A reply carries "shared" (optional when there is nothing to share), one
    metric record with "num-examples", and on request "normalisation" (`<layer>.mean`, `<layer>.variance`) and "start"
    (the shared arrays before any adaptation).

    A node that does not reply keeps its last mixture and rejoins with it; one that joins late starts from the network.
    The server's memory grows with the number of nodes: it holds a mixture of each.
    All nodes in the grid take part in every round.

    Parameters
    ----------
    network : ArrayRecord, optional
        The frozen network. `begin` may set it later; otherwise it is the `arrays` of the first round.

    Attributes
    ----------
    weights : [N, N] or None
        W of the last round.
    node_ids : list of int
        The nodes that the rows and columns of `weights` stand for.
    personal : dict
        node id → its next mixture.
    proximal : float
        μ of (μ/2)‖θ - θ_received‖², which the nodes' adapters add to their loss; 0 for all rules but FedProx.
    """

    #: Whether a node gets anything of other nodes.
    mixes: ClassVar[bool] = True
    #: Whether the rule needs the nodes' domain statistics.
    needs_statistics: ClassVar[bool] = False
    #: Whether the rule needs θ_0, the shared arrays before any adaptation.
    needs_start: ClassVar[bool] = False

    def __init__(self, network: ArrayRecord | None = None) -> None:
        super().__init__(network)
        self.proximal = 0.0
        self.weights: Float | None = None
        self.node_ids: list[int] = []
        self.personal: dict[int, ArrayRecord] = {}
        self.start_arrays: Named | None = None

    @abstractmethod
    def weigh(self, replies: Replies) -> Float:
        """Return W [N, N]: non-negative, rows that sum to one."""

    def mixtures(self, weights: Float, replies: Replies) -> Sequence[Arrays]:
        """Return each node's mixture; a rule with state overrides this."""
        return mix(weights, replies.shared)

    def set_start(self, arrays: ArrayRecord | Arrays) -> None:
        """Set θ_0, the shared arrays before any adaptation; otherwise the first replies are asked for it."""
        self.start_arrays = as_numpy(arrays) if isinstance(arrays, ArrayRecord) else dict(arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send each node in the grid its own mixture; `arrays` is the network unless there is one already."""
        if self._network is None and arrays:
            self.begin(arrays)
        wanted = {
            "proximal-mu": self.proximal,
            "send-normalisation": self.needs_statistics,
            "send-start": self.needs_start and self.start_arrays is None,
        }
        own = {n: {"shared": self.personal[n]} if self.personal.get(n) else {} for n in grid.get_node_ids()}
        return self._messages(server_round, own, {**config, **wanted}, ADAPT_MESSAGE)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
        """Mix the shared arrays of the replies, in the order given. There is no global model to return.

        Raises
        ------
        ValueError
            A record that the rule needs is missing or does not fit, or W is not row-stochastic. W and the mixtures are
            then still those of the previous round.
        """
        good = self._answered(replies)
        if not good:
            return None, None
        unpacked = self._unpack(good)
        weights = require_stochastic(self.weigh(unpacked), len(unpacked.node_ids))
        mixed = self.mixtures(weights, unpacked)
        self.weights, self.node_ids = weights, unpacked.node_ids
        records = {id(mixture): as_record(mixture) for mixture in mixed}  # one record where all get the same mixture
        self.personal |= {node: records[id(mixture)] for node, mixture in zip(unpacked.node_ids, mixed, strict=True)}
        return None, None

    def _unpack(self, good: Mapping[int, Message]) -> Replies:
        """Read the records that the rule needs."""
        shared = [_shared(reply) for reply in good.values()]
        require_alike(shared)
        if self.needs_start and self.start_arrays is None:
            self.set_start(_usual_start(good) if shared[0] else {})
        if self.needs_start:
            require_alike([self.start_arrays or {}, shared[0]])
        normalisation = [_normalisation(node, reply) for node, reply in good.items()] if self.needs_statistics else []
        examples = np.array([_examples(node, reply) for node, reply in good.items()])
        return Replies(list(good), shared, normalisation, examples)

    def state_arrays(self, nodes: Mapping[int, int]) -> Named:
        """Return everything that the next round depends on except the network, as named arrays for a checkpoint.

        Parameters
        ----------
        nodes : mapping
            partition → node id; ids change from run to run. Other nodes are left out.
        """
        groups = {f"personal/{part}": as_numpy(self.personal[n]) for part, n in nodes.items() if n in self.personal}
        groups |= {START: self.start_arrays} if self.start_arrays is not None else {}
        groups |= self._rule_state()
        return {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}

    def load_state_arrays(self, arrays: Arrays, nodes: Mapping[int, int]) -> None:
        """Restore what `state_arrays` returned; the network has to be set again and is sent again.

        Raises
        ------
        ValueError
            A name belongs to no part of the state, or to a partition that is not in `nodes`.
        """
        groups: dict[str, Named] = {}
        for key, value in arrays.items():
            first, _, rest = key.partition("/")
            second, _, name = rest.partition("/") if first == "personal" else ("", "", rest)
            groups.setdefault(f"{first}/{second}" if second else first, {})[name] = value
        personal = {group: groups.pop(group) for group in list(groups) if group.startswith("personal/")}
        lost = sorted(group for group in personal if int(group.removeprefix("personal/")) not in nodes)
        start = groups.pop(START, None)
        unknown = sorted(set(groups) - set(self._rule_state()))
        if lost or unknown:
            raise ValueError(f"{type(self).__name__}: state of unknown clients: {lost}, unknown state: {unknown}")
        self.start_arrays = start
        self._load_rule_state(groups)
        self.personal = {nodes[int(g.removeprefix("personal/"))]: as_record(named) for g, named in personal.items()}

    def move(self, before: Mapping[int, int], now: Mapping[int, int]) -> None:
        """Let clients whose nodes have changed keep their mixtures; both are partition → node id."""
        self.personal = {now[part]: self.personal[node] for part, node in before.items() if node in self.personal}

    def _rule_state(self) -> dict[str, Named]:
        """Return what a rule keeps between rounds, by name; always the same names."""
        return {}

    def _load_rule_state(self, groups: Mapping[str, Named]) -> None:
        """Restore what `_rule_state` returned; a group without arrays is absent."""

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> %s: one mixture for each node", type(self).__name__)
        log(INFO, "\t└── domain statistics: %s, proximal μ: %s", self.needs_statistics, self.proximal)


def _shared(reply: Message) -> Arrays:
    """Return the arrays that a node shares; empty when it has nothing to share."""
    records = reply.content.array_records
    return reply_arrays(records["shared"]) if "shared" in records else {}


def _usual_start(good: Mapping[int, Message]) -> ArrayRecord:
    """Return the "start" that most replies have, of a tie the first: all nodes start from one network.

    Not simply the first reply's, which an attacker would choose for all.
    """
    found = [record for reply in good.values() if (record := reply.content.array_records.get(START)) is not None]
    if not found:
        raise ValueError(f"none of the nodes {list(good)} sent the record {START!r}, which this rule needs")
    digests = [digest(reply_arrays(record)) for record in found]
    return found[digests.index(Counter(digests).most_common(1)[0][0])]


def _normalisation(node: int, reply: Message) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return a node's domain statistics by layer; ValueError when they are missing or not in pairs."""
    records = reply.content.array_records
    if NORMALISATION not in records:
        raise ValueError(f"node {node} sent no record {NORMALISATION!r}, which this rule needs")
    arrays = as_numpy(records[NORMALISATION])
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in arrays))
    if set(arrays) != {f"{layer}.{part}" for layer in layers for part in PARTS} or not layers:
        raise ValueError(f"node {node}: {NORMALISATION} = {sorted(arrays)}; allowed is <layer>.mean, <layer>.variance")
    return {layer: (arrays[f"{layer}.mean"], arrays[f"{layer}.variance"]) for layer in layers}


def _examples(node: int, reply: Message) -> float:
    """Return the number of samples that a node reports; ValueError unless it is positive."""
    metrics: dict[str, Any] = {k: v for record in reply.content.metric_records.values() for k, v in record.items()}
    value = metrics.get("num-examples")
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"node {node}: num-examples = {value!r}, expected a positive number")
    return float(value)
