"""FedAvgM: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (Hsu, 2019).

Flower's strategy with the paper's usual momentum, 0.9 (Flower's own default is 0, plain FedAvg). Deviation: running
means and variances of BatchNorm have no gradient and get no momentum, which would overshoot and ruin the network: they
are averaged plainly, by examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy

from strategies.average import weighted_mean
from strategies.broadcast import as_numpy
from strategies.qffl import STATISTICS


class FedAvgM(strategy.FedAvgM):
    """FedAvg with momentum on the server.

    Parameters
    ----------
    server_momentum : float
        In [0, 1); 0 is FedAvg.
    **fedavgm
        Flower's own parameters.

    Raises
    ------
    ValueError
        `server_momentum` is out of its range.
    """

    def __init__(self, server_momentum: float = 0.9, **fedavgm: Any) -> None:
        if not 0 <= server_momentum < 1:
            raise ValueError(f"server_momentum = {server_momentum!r}; allowed is 0 or more, less than 1")
        super().__init__(server_momentum=server_momentum, **fedavgm)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the new model; None without a reply."""
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            contents = [reply.content for reply in replies if not reply.has_error()]
            trained = [as_numpy(next(iter(content.array_records.values()))) for content in contents]
            statistics = [{n: value for n, value in one.items() if n.endswith(STATISTICS)} for one in trained]
            counts = [next(iter(content.metric_records.values()))[self.weighted_by_key] for content in contents]
            for name, value in weighted_mean(statistics, [float(n) for n in counts]).items():  # type: ignore[arg-type]
                arrays[name] = Array(value)
        return arrays, metrics
