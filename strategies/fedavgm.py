"""FedAvgM: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (Hsu, 2019).

Flower's strategy with the paper's usual momentum, 0.9 (Flower's own default is 0, plain FedAvg). Deviation: a variance
of a BatchNorm layer that the momentum takes below zero is set to zero; no network could use it, and clients refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy

#: Ending of the names of variances.
VARIANCE = "running_var"


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
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            for name in [name for name in arrays if name.endswith(VARIANCE)]:
                arrays[name] = Array(np.maximum(arrays[name].numpy(), 0))
        return arrays, metrics
