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

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedtta.strategies.aggregation import NumpyAggregation, TrainReply
from fedtta.strategies.arrays import RUNNING_STATISTICS, Arrays, Named, require_alike

#: Added to every loss.
EPSILON = 1e-10
#: Metric of a training reply: the loss of the received model on the client's training data, before training.
LOSS = "global-loss"


def q_fedavg(start: Arrays, trained: Sequence[Arrays], losses: Sequence[float], q: float, lipschitz: float) -> Named:
    """Return the new global model, in the dtypes of the arrays.

    Parameters
    ----------
    start : mapping
        w, name → array.
    trained : sequence of mappings
        w_k, one a client; the same names, shapes and dtypes.
    losses : sequence of float
        F_k ≥ 0, the loss of w at each client.
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
    learned = [name for name in start if not name.endswith(RUNNING_STATISTICS)]
    norms = np.array([sum(_squared(start[name], client[name]) for name in learned) for client in trained])
    factors = factors + EPSILON
    powers = (factors / factors.max()) ** q  # F_k^q but for a factor that cancels: a float holds no 3^1000
    slopes = q * powers / factors * lipschitz**2 * norms
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
    """Return ‖a - b‖² in float64, summed in C order: the sum must not depend on the memory layout."""
    return float(((a.astype(np.float64) - b) ** 2).ravel().sum())


class QFFL(NumpyAggregation):
    """q-FedAvg; a client's reply holds the loss of the model that it received, before training.

    Parameters
    ----------
    q : float
        Fairness; 1 as in ATP's Table 7, 0 is a plain mean of the clients.
    learning_rate : float, optional
        The clients' rate, 1/L. None: "learning-rate" in the config of each round.
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        `q` is negative, or `learning_rate` is not positive.
    """

    options: ClassVar = {"q": "fairness"}
    client_metrics = (LOSS,)

    def __init__(self, q: float = 1.0, learning_rate: float | None = None, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        if not 0 <= q < float("inf"):
            raise ValueError(f"q = {q!r}; allowed is a finite number, 0 or more")
        self.q = q
        self.learning_rate = None if learning_rate is None else _positive_rate(learning_rate)
        self._lipschitz = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model as FedAvg does, and remember it and L."""
        rate = config.get("learning-rate") if self.learning_rate is None else self.learning_rate
        self._lipschitz = 1 / _positive_rate(rate)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate(self, replies: Sequence[TrainReply]) -> Named:
        """Return one step of q-FedAvg from the model that was sent; ValueError when a loss is missing or impossible."""
        return q_fedavg(
            self.sent, [one.arrays for one in replies], [_loss(one) for one in replies], self.q, self._lipschitz
        )


def _loss(reply: TrainReply) -> float:
    """Return the loss that a reply reports; ValueError when it is missing."""
    value = reply.metrics.get(LOSS)
    if not isinstance(value, int | float):
        raise ValueError(f"node {reply.node}: metric {LOSS} = {value!r}, expected the loss before training")
    return float(value)


def _positive_rate(rate: Any) -> float:
    """Return a learning rate, or raise ValueError unless it is a positive, finite number."""
    if not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise ValueError(f"learning rate {rate!r}; allowed is a positive, finite number")
    return float(rate)
