"""FedAvg, and the means of the clients' feature statistics.

FedTHE (Jiang & Lin, ICLR 2023), section 4.2: "the server generates the global descriptor via averaging all local
descriptors"; BTFL (Zhou & Liu, KDD 2025), section 4.1: the server "averages the local DLEs". Deviation from both
published codes: the means belong to the final global model, from one statistics round after the last training
round, instead of to the model of the round before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedtta.strategies.aggregation import RobustAggregator
from fedtta.strategies.arrays import Named, as_record, reply_arrays, weighted_mean
from fedtta.strategies.fedavg import FedAvg

#: Message type of the statistics round.
STATISTICS_MESSAGE = "train.statistics"


class StatisticsFedAvg(FedAvg):
    """FedAvg plus the means of named statistics records (descriptor, DLE, entropies).

    Training rounds are FedAvg's. After the last one, `configure_statistics` and `aggregate_statistics` run the
    statistics round over all nodes.

    Parameters
    ----------
    weighting : {"uniform", "examples"}
        Clients count alike (FedTHE: "averaging all local descriptors"), or by their number of examples.
    statistics_key : str
        Name of the statistics record in replies.
    aggregator : RobustAggregator, optional
        Replaces the means; clients count alike then.
    distributions : collection of str
        Statistics whose numbers sum to one. The result of an aggregator is scaled to sum to one again.
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        The weighting is unknown, or does not fit the aggregator.
    """

    def __init__(
        self,
        weighting: Literal["uniform", "examples"] = "uniform",
        statistics_key: str = "statistics",
        aggregator: RobustAggregator | None = None,
        distributions: Collection[str] = (),
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if weighting not in ("uniform", "examples"):
            raise ValueError(f"unknown weighting {weighting!r}; there are: uniform, examples")
        if aggregator is not None and weighting != "uniform":
            raise ValueError(f"weighting = {weighting!r}: allowed with {aggregator} is uniform only")
        self.aggregator = aggregator
        self.weighting = weighting
        self.statistics_key = statistics_key
        self.distributions = distributions

    def configure_statistics(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every node, regardless of the sampled fraction, for its statistics under `arrays`."""
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, list(grid.get_node_ids()), STATISTICS_MESSAGE)

    def aggregate_statistics(self, server_round: int, replies: Iterable[Message]) -> ArrayRecord | None:
        """Return the means of the statistics records of the replies; None when no reply has one."""
        contents = [reply.content for reply in replies if not reply.has_error()]
        contents = [content for content in contents if self.statistics_key in content]
        return as_record(self._mean(contents)) if contents else None

    def _mean(self, contents: list[RecordDict]) -> Named:
        arrays = [reply_arrays(content.array_records[self.statistics_key]) for content in contents]
        if self.aggregator is not None:
            return _normalized(self.aggregator(arrays), self.distributions)
        if self.weighting == "uniform":
            return weighted_mean(arrays)
        counts = [next(iter(content.metric_records.values()))[self.weighted_by_key] for content in contents]
        return weighted_mean(arrays, [float(count) for count in counts])  # type: ignore[arg-type]


def _normalized(aggregated: Named, distributions: Collection[str]) -> Named:
    """Scale distributions to sum to one, which medians of each number do not; ValueError where all numbers are 0."""
    for name in set(distributions) & set(aggregated):
        if not (total := aggregated[name].sum()) > 0:
            raise ValueError(f"{name}: robust aggregation leaves 0 everywhere, since most clients lack each class")
        aggregated[name] = aggregated[name] / total
    return aggregated
