"""ATP: "Adaptive Test-Time Personalization for Federated Learning", Bao et al., NeurIPS 2023.

The server's part of Algorithm 1: in each of T rounds a cohort of source clients gets the rates α ∈ R^D, refines them on
its labelled validation data, and the server takes the plain mean. Only D numbers go up and down; the network w_G is
sent once to each client (section 4.3: D_w + 2TD numbers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from strategies.average import weighted_mean
from strategies.broadcast import Broadcast, BroadcastStrategy, array_bytes, as_numpy
from strategies.robust import Rule

#: Message type of a round in which clients refine rates.
RATES_MESSAGE = "train.rates"


class ATPRates(BroadcastStrategy):
    """Average clients' adaptation rates.

    Here the `arrays` of `configure_train` are the rates, and so is what `aggregate_train` returns. A message carries
    records "rates", "config" and, to a node that does not have it yet, "arrays" (the network); a reply carries "rates".

    Parameters
    ----------
    network : ArrayRecord, optional
        w_G; it may be given to `begin` instead.
    cohort : int
        How many of the nodes refine the rates in a round; 0 means all of them.
    seed : int
        The cohort of a round is drawn by position from (seed, round) alone.
    rule : Rule, optional
        How rates are joined instead of by the plain mean.

    Raises
    ------
    ValueError
        `cohort` or `seed` is negative.
    """

    def __init__(
        self,
        network: ArrayRecord | Broadcast | None = None,
        cohort: int = 0,
        seed: int = 0,
        rule: Rule | None = None,
    ) -> None:
        super().__init__(network)
        for name, value in (("cohort", cohort), ("seed", seed)):
            if value < 0:
                raise ValueError(f"{name} = {value}; allowed is 0 or more")
        self.cohort, self.seed = cohort, seed
        self.rule: Rule | None = rule

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the rates to a cohort, and the network to those of it that do not have it.

        Nodes are drawn by their position in the grid, whose ids are random: list them in the order of partitions.
        """
        nodes = self.sample(list(grid.get_node_ids()), server_round)
        ours: dict[str, Any] = {"server-round": server_round, "network": self.network.digest}
        envelope = ConfigRecord({**config, **ours})
        messages = []
        self.sent_bytes = 0
        for node, needed in self._addressed(nodes).items():
            records = {"rates": arrays, **needed}
            self.sent_bytes += sum(array_bytes(record) for record in records.values())
            content = RecordDict({**records, "config": envelope})
            messages.append(Message(content, dst_node_id=node, message_type=RATES_MESSAGE))
        return messages

    def sample(self, nodes: Sequence[int], server_round: int) -> list[int]:
        """Return the cohort of a round, in the order given."""
        if not 0 < self.cohort < len(nodes):
            return list(nodes)
        draw = np.random.default_rng([self.seed, server_round])
        return [nodes[i] for i in sorted(draw.choice(len(nodes), self.cohort, replace=False))]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, None]:
        """Return the mean of the replies' rates, in the order given, or what the rule makes of them.

        None without a reply; ValueError with fewer than the rule needs.
        """
        good = self._answered(replies)
        if not good:
            return None, None
        join = self.rule or weighted_mean
        means = join([as_numpy(reply.content.array_records["rates"]) for reply in good.values()])
        return ArrayRecord({name: Array(np.asarray(value)) for name, value in means.items()}), None

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> ATP: %s of adaptation rates", self.rule or "mean")
        log(INFO, "\t└── cohort: %s, seed: %d", self.cohort or "all nodes", self.seed)
