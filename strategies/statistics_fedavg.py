"""FedAvg that also averages what clients know about their features.

FedTHE (Jiang & Lin, ICLR 2023), section 4.2: "the server generates the global descriptor via averaging all local
descriptors"; BTFL (Zhou & Liu, KDD 2025), section 4.1: the server "averages the local DLEs". Deviation from both
published codes: the means belong to the final global model, from one statistics round after the last training
round, instead of to the model of the round before.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from strategies.average import weighted_mean
from strategies.robust import Named, Rule

#: Message type of the statistics round.
STATISTICS_MESSAGE = "train.statistics"


class StatisticsFedAvg(FedAvg):
    """FedAvg plus the means of named statistics records (descriptor, DLE, entropies).

    Training rounds are Flower's; replies may carry a statistics record beside the model, which is averaged too. After
    the last training round, `configure_statistics` and `aggregate_statistics` make the statistics round over all
    nodes. The last means are in `statistics`.

    Parameters
    ----------
    weighting : {"uniform", "examples"}
        Clients count alike (FedTHE: "averaging all local descriptors"), or by their number of examples.
    statistics_key : str
        Name of the statistics record in replies.
    rule : Rule, optional
        How statistics are joined instead; clients count alike then.
    distributions : collection of str
        Names of statistics whose numbers sum to one; what the rule makes of them is scaled to sum to one again.
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        The weighting is unknown, or none for the rule.
    """

    def __init__(
        self,
        weighting: Literal["uniform", "examples"] = "uniform",
        statistics_key: str = "statistics",
        rule: Rule | None = None,
        distributions: Collection[str] = (),
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if weighting not in ("uniform", "examples"):
            raise ValueError(f"unknown weighting {weighting!r}; there are: uniform, examples")
        if rule is not None and weighting != "uniform":
            raise ValueError(f"weighting = {weighting!r}: allowed with {rule} is uniform only")
        self.rule: Rule | None = rule
        self.distributions = distributions
        self.weighting = weighting
        self.statistics_key = statistics_key
        self.statistics: ArrayRecord | None = None

    def configure_statistics(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every node, whatever the sampled fraction, for its statistics under `arrays`."""
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, list(grid.get_node_ids()), STATISTICS_MESSAGE)

    def aggregate_statistics(self, server_round: int, replies: Iterable[Message]) -> ArrayRecord | None:
        """Average the statistics records of the replies; None when no reply has one."""
        contents = [reply.content for reply in replies if not reply.has_error()]
        means = self._mean([content for content in contents if self.statistics_key in content])
        self.statistics = means if means is not None else self.statistics
        return means

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average statistics that replies carry, then the rest as FedAvg does."""
        replies = list(replies)
        self.aggregate_statistics(server_round, replies)
        return super().aggregate_train(server_round, [self._without_statistics(reply) for reply in replies])

    def _without_statistics(self, reply: Message) -> Message:
        """Return the reply as FedAvg wants it, with one array record; the original is left whole."""
        if reply.has_error() or self.statistics_key not in reply.content:
            return reply
        rest = {name: record for name, record in reply.content.items() if name != self.statistics_key}
        stripped = copy.copy(reply)
        stripped.content = RecordDict(rest)
        return stripped

    def _mean(self, contents: list[RecordDict]) -> ArrayRecord | None:
        if not contents:
            return None
        arrays = [
            {name: array.numpy() for name, array in content.array_records[self.statistics_key].items()}
            for content in contents
        ]
        if self.rule is not None:
            return _record(_rescaled(self.rule(arrays), self.distributions))
        weights = None
        if self.weighting == "examples":
            weights = [self._examples(content) for content in contents]
        return _record(weighted_mean(arrays, weights))

    def _examples(self, content: RecordDict) -> float:
        metrics = next(iter(content.metric_records.values()))
        return float(metrics[self.weighted_by_key])  # type: ignore[arg-type]


def _record(arrays: Named) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def _rescaled(joined: Named, distributions: Collection[str]) -> Named:
    """Scale distributions to sum to one, which medians of each number do not; ValueError where nothing is left."""
    for name in set(distributions) & set(joined):
        if not (total := joined[name].sum()) > 0:
            raise ValueError(f"{name}: the rule leaves 0 everywhere, since most clients lack each class")
        joined[name] = joined[name] / total
    return joined
