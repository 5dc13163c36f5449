"""FedAvg, FedProx and FedAvgM: Flower's strategies with the defaults of their papers.

- FedAvg: "Communication-Efficient Learning of Deep Networks from Decentralized Data", McMahan et al., AISTATS 2017.
- FedProx: "Federated Optimization in Heterogeneous Networks", Li et al., MLSys 2020. The client adds
  (μ/2)‖w - w_received‖² to its loss. μ = 0.01, as in ATP's Table 7 (Flower's default is 0, plain FedAvg).
- FedAvgM: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", Hsu et al.,
  2019. Momentum 0.9 (Flower's default is 0, plain FedAvg). Deviation: running means and variances of BatchNorm have no
  gradient and get no momentum, which would overshoot; they are averaged, weighted by examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy

from fedtta.strategies.aggregation import Aggregation
from fedtta.strategies.arrays import RUNNING_STATISTICS, Named, as_numpy, as_record, reply_arrays, weighted_mean


class FedAvg(Aggregation):
    """The mean of the clients' models, weighted by examples."""

    aggregates_partial = True
    from_mean = True


class FedProx(Aggregation, strategy.FedProx):
    """FedAvg on the server, a proximal term on the clients.

    Parameters
    ----------
    proximal_mu : float
        μ ≥ 0.
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        `proximal_mu` is negative or not finite.
    """

    from_mean = True
    options: ClassVar = {"proximal_mu": "proximal_mu"}

    def __init__(self, proximal_mu: float = 0.01, **fedavg: Any) -> None:
        if not 0 <= proximal_mu < float("inf"):
            raise ValueError(f"proximal_mu = {proximal_mu!r}; allowed is a finite number, 0 or more")
        super().__init__(proximal_mu=proximal_mu, **fedavg)


class FedAvgM(Aggregation, strategy.FedAvgM):
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

    from_mean = True
    options: ClassVar = {"server_momentum": "server_momentum"}

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
            trained = [reply_arrays(next(iter(content.array_records.values()))) for content in contents]
            statistics = [{name: one[name] for name in one if name.endswith(RUNNING_STATISTICS)} for one in trained]
            counts = [next(iter(content.metric_records.values()))[self.weighted_by_key] for content in contents]
            for name, value in weighted_mean(statistics, [float(n) for n in counts]).items():  # type: ignore[arg-type]
                arrays[name] = Array(value)
        return arrays, metrics

    def state_arrays(self) -> dict[str, Named]:
        """Return the current model and, from the first round on, the momentum of each array."""
        if self.current_arrays is None:
            return {}
        current = as_numpy(self.current_arrays)
        if self.momentum_vector is None:
            return {"current": current}
        return {"current": current, "momentum": dict(zip(current, self.momentum_vector, strict=True))}

    def load_state_arrays(self, state: Mapping[str, Named]) -> None:
        """See `Aggregation`."""
        super().load_state_arrays({group: state[group] for group in state.keys() - {"current", "momentum"}})
        if "current" in state:
            self.current_arrays = as_record(state["current"])
            momentum = state.get("momentum")
            self.momentum_vector = None if momentum is None else [momentum[name] for name in state["current"]]
