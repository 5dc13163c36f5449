"""q-FFL by q-FedAvg: "Fair Resource Allocation in Federated Learning", Li et al., ICLR 2020, Algorithm 2.

Clients on which the global model w is worse count more:
Δ_k = F_k^q L (w - w_k), h_k = q F_k^(q-1) ‖L (w - w_k)‖² + L F_k^q, w ← w - Σ Δ_k / Σ h_k,
with F_k the loss of w on client k's training data before it trains, and L = 1/learning rate.

Deviations and decisions
- The norm counts what has a gradient: running means and variances are moved by the same step but do not count.
  (Flower's `QFedAvg` and the published code count all arrays; without BatchNorm there is no difference.)
- F_k + 1e-10 in the powers, as the published code has it: a loss of zero is then no division by zero.
- float64 throughout; arrays are matched by name. The step is a convex combination of w and the w_k, and clipped into
  their range against rounding, so that a variance stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from strategies.average import require_alike
from strategies.broadcast import as_numpy

#: Endings of the names of arrays that have no gradient.
STATISTICS = ("running_mean", "running_var")
#: Added to every loss.
EPSILON = 1e-10


def q_fedavg(
    start: Mapping[str, NDArray[Any]],
    trained: Sequence[Mapping[str, NDArray[Any]]],
    losses: Sequence[float],
    q: float,
    lipschitz: float,
) -> dict[str, NDArray[Any]]:
    """Return the new global model, in the dtypes that came in.

    Parameters
    ----------
    start : mapping
        w, name → array.
    trained : sequence of mappings
        w_k, one a client; the same names, shapes and dtypes.
    losses : sequence of float
        F_k ≥ 0, of w at each client.
    q : float
        q ≥ 0; 0 gives the plain mean.
    lipschitz : float
        L > 0.

    Raises
    ------
    ValueError
        There is no client, something does not fit, or a loss is negative or not finite.
    """
    factors = np.asarray(losses, np.float64)
    if not trained or factors.shape != (len(trained),):
        raise ValueError(f"{len(factors)} losses do not fit {len(trained)} clients")
    if not np.isfinite(factors).all() or (factors < 0).any():
        raise ValueError(f"losses {factors.tolist()}; allowed are finite numbers, 0 or more")
    require_alike([start, *trained])
    learned = [name for name in start if not name.endswith(STATISTICS)]
    norms = np.array([sum(_squared(start[name], client[name]) for name in learned) for client in trained])
    powers = (factors + EPSILON) ** q  # F_k^q
    slopes = q * (factors + EPSILON) ** (q - 1) * lipschitz**2 * norms
    steps = lipschitz * powers / (slopes + lipschitz * powers).sum()  # w ← w - Σ steps_k (w - w_k); Σ steps_k ≤ 1
    new = {}
    for name, value in start.items():
        origin = value.astype(np.float64)
        moved, low, high = origin.copy(), origin, origin
        for step, client in zip(steps, trained, strict=True):
            term = client[name].astype(np.float64)
            moved -= step * (origin - term)
            low, high = np.minimum(low, term), np.maximum(high, term)
        new[name] = np.clip(moved, low, high).astype(value.dtype)
    return new


def _squared(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return ‖a - b‖² in float64, added up in C order: the sum must not depend on how arrays lie in memory."""
    return float(((a.astype(np.float64) - b) ** 2).ravel().sum())


class QFFL(FedAvg):
    """q-FedAvg; a client's reply has to say the loss of the model that it received, before training.

    Parameters
    ----------
    q : float
        Fairness; 1 as in ATP's Table 7, 0 is a plain mean of the clients.
    learning_rate : float, optional
        The clients' rate, 1/L. None: "learning-rate" in the config of each round.
    loss_key : str
        Metric with the loss.
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        `q` is negative, or `learning_rate` is not positive.
    """

    def __init__(
        self, q: float = 1.0, learning_rate: float | None = None, loss_key: str = "global-loss", **fedavg: Any
    ) -> None:
        super().__init__(**fedavg)
        if not 0 <= q < float("inf"):
            raise ValueError(f"q = {q!r}; allowed is a finite number, 0 or more")
        self.q, self.learning_rate, self.loss_key = q, learning_rate, loss_key
        if learning_rate is not None:
            _positive_rate(learning_rate)
        self._sent: dict[str, NDArray[Any]] = {}
        self._lipschitz = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model as FedAvg does, and remember it."""
        rate = config.get("learning-rate") if self.learning_rate is None else self.learning_rate
        self._sent, self._lipschitz = as_numpy(arrays), 1 / _positive_rate(rate)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make one step of q-FedAvg from the model that was sent; None without a reply.

        Raises
        ------
        ValueError
            `configure_train` was not called before, or a loss is missing or impossible.
        """
        valid, _ = self._check_and_log_replies(list(replies), is_train=True)
        if not valid:
            return None, None
        if not self._sent:
            raise ValueError("QFFL: configure_train has to come before aggregate_train")
        trained = [as_numpy(next(iter(reply.content.array_records.values()))) for reply in valid]
        losses = [self._loss(reply) for reply in valid]
        new = q_fedavg(self._sent, trained, losses, self.q, self._lipschitz)
        metrics = self.train_metrics_aggr_fn([reply.content for reply in valid], self.weighted_by_key)
        return ArrayRecord({name: Array(np.asarray(value)) for name, value in new.items()}), metrics

    def _loss(self, reply: Message) -> float:
        value = next(iter(reply.content.metric_records.values())).get(self.loss_key)
        if not isinstance(value, int | float):
            node = reply.metadata.src_node_id
            raise ValueError(f"node {node}: metric {self.loss_key} = {value!r}, expected the loss before training")
        return float(value)


def _positive_rate(rate: Any) -> float:
    """Return a learning rate, or raise ValueError unless it is a positive, finite number."""
    if not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise ValueError(f"learning rate {rate!r}; allowed is a positive, finite number")
    return float(rate)
