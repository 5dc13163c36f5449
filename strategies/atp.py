"""ATP: "Adaptive Test-Time Personalization for Federated Learning", Bao et al., NeurIPS 2023.

The server's part of Algorithm 1: in each of T rounds a cohort of source clients refines the rates α ∈ R^D on its
labelled validation data, and the server averages them. Only D numbers travel in each direction; the network w_G is sent
once to each client (section 4.3: D_w + 2TD numbers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedtta.strategies.aggregation import RobustAggregator
from fedtta.strategies.arrays import as_numpy, as_record, weighted_mean
from fedtta.strategies.broadcast import Broadcast, BroadcastStrategy

#: Message type of a round in which clients refine rates.
RATES_MESSAGE = "train.rates"


class ATPRates(BroadcastStrategy):
    """The mean of clients' adaptation rates.

    The `arrays` of `configure_train` are the rates, and so is the result of `aggregate_train`. A message carries the
    records "rates", "config" and, for a node that does not have it yet, "arrays" (the network); a reply has "rates".

    Parameters
    ----------
    network : ArrayRecord, optional
        w_G; `begin` may set it later.
    cohort : int
        How many of the nodes refine the rates in a round; 0 means all of them.
    seed : int
        The cohort of a round is drawn by position from (seed, round) alone.
    aggregator : RobustAggregator, optional
        Replaces the mean.

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
        aggregator: RobustAggregator | None = None,
    ) -> None:
        super().__init__(network)
        for name, value in (("cohort", cohort), ("seed", seed)):
            if value < 0:
                raise ValueError(f"{name} = {value}; allowed is 0 or more")
        self.cohort, self.seed, self.aggregator = cohort, seed, aggregator

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the rates to a cohort, and the network to its nodes that do not have it.

        Nodes are drawn by their position in the grid, since ids are random: list them in the order of their names.
        """
        nodes = self.sample(list(grid.get_node_ids()), server_round)
        return self._messages(server_round, {node: {"rates": arrays} for node in nodes}, config, RATES_MESSAGE)

    def sample(self, nodes: Sequence[int], server_round: int) -> list[int]:
        """Return the cohort of a round, in the order given."""
        if not 0 < self.cohort < len(nodes):
            return list(nodes)
        draw = np.random.default_rng([self.seed, server_round])
        return [nodes[i] for i in sorted(draw.choice(len(nodes), self.cohort, replace=False))]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, None]:
        """Return the aggregate of the replies' rates, in the order given; None without a reply.

        Raises
        ------
        ValueError
            There are fewer replies than the aggregator needs.
        """
        good = self._answered(replies)
        if not good:
            return None, None
        aggregate = self.aggregator or weighted_mean
        return as_record(aggregate([as_numpy(reply.content.array_records["rates"]) for reply in good.values()])), None

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> ATP: %s of adaptation rates", self.aggregator or "mean")
        log(INFO, "\t└── cohort: %s, seed: %d", self.cohort or "all nodes", self.seed)
