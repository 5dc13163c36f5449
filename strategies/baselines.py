"""Baselines of collaborative adaptation: no mixing, and one mean for all nodes.

- none: W = I; every node continues from its own arrays.
- FedAvg (McMahan et al., AISTATS 2017) at test time: W = 1/N.
- FedProx (Li et al., MLSys 2020) at test time: FedAvg on the server; the nodes' adapters add
  (μ/2)‖θ - θ_received‖² to their loss. With one step a round its gradient is zero and it equals FedAvg exactly.
- FedAvgM (Hsu, Qi & Brown, 2019) at test time: v ← m v + (mean - previous), every node receives previous + v.

Means are uniform over clients, since the methods compared with them (pFedBBN, FedAMP) count clients and not samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord

from fedtta.strategies.arrays import Arrays, Float, Named, weighted_mean
from fedtta.strategies.collaborative import Collaborative, Replies

#: Endings of the names of arrays that hold variances.
VARIANCES = ("running_var", "variance")


class Local(Collaborative):
    """No mixing: W = I, and every node gets back the same bits that it sent."""

    mixes = False

    def weigh(self, replies: Replies) -> Float:
        """Return the identity."""
        return np.eye(len(replies.node_ids))

    def mixtures(self, weights: Float, replies: Replies) -> Sequence[Arrays]:
        """Return the nodes' own arrays."""
        return replies.shared


class FedAvgAtTestTime(Collaborative):
    """One mean for all nodes: W = 1/N."""

    def weigh(self, replies: Replies) -> Float:
        """Return 1/N everywhere."""
        size = len(replies.node_ids)
        return np.full((size, size), 1 / size)

    def mixtures(self, weights: Float, replies: Replies) -> Sequence[Arrays]:
        """Return the mean, computed once."""
        return [weighted_mean(replies.shared)] * len(replies.node_ids)


class FedProxAtTestTime(FedAvgAtTestTime):
    """FedAvg with a proximal term on the nodes.

    Parameters
    ----------
    network : ArrayRecord, optional
        See `Collaborative`.
    proximal : float
        μ. Messages carry it as "proximal-mu"; it is the adapters' option `proximal`.

    Raises
    ------
    ValueError
        `proximal` is negative or not finite.
    """

    def __init__(self, network: ArrayRecord | None = None, proximal: float = 0.01) -> None:
        super().__init__(network)
        if not 0 <= proximal < float("inf"):
            raise ValueError(f"proximal = {proximal!r}; allowed is a finite number, 0 or more")
        self.proximal = proximal


class FedAvgMAtTestTime(FedAvgAtTestTime):
    """FedAvg with momentum on the server: v ← m v + (mean - previous), every node that replied gets previous + v.

    `previous` is the last mixture that the server sent, θ_0 at first. Negative variances are set to zero.

    Parameters
    ----------
    network : ArrayRecord, optional
        See `Collaborative`.
    momentum : float
        m, in [0, 1); at 0 this is FedAvg.

    Raises
    ------
    ValueError
        `momentum` is out of its range.
    """

    needs_start = True

    def __init__(self, network: ArrayRecord | None = None, momentum: float = 0.9) -> None:
        super().__init__(network)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum!r}; allowed is 0 or more, less than 1")
        self.momentum = momentum
        self._velocity: Named = {}
        self._previous: Named = {}

    def mixtures(self, weights: Float, replies: Replies) -> Sequence[Arrays]:
        """Return previous + v for every node."""
        means = weighted_mean(replies.shared)
        previous = self._previous or self.start_arrays or {}
        velocity = {name: value - previous[name] for name, value in _wide(means).items()}
        for name, old in self._velocity.items():
            velocity[name] += self.momentum * old
        moved = {name: previous[name] + v for name, v in velocity.items()}
        sent = {
            name: np.maximum(value, 0 if name.endswith(VARIANCES) else -np.inf).astype(means[name].dtype)
            for name, value in moved.items()
        }
        self._velocity, self._previous = velocity, sent
        return [sent] * len(replies.node_ids)

    def _rule_state(self) -> dict[str, Named]:
        return {"velocity": self._velocity, "previous": self._previous}

    def _load_rule_state(self, groups: Mapping[str, Named]) -> None:
        self._velocity = dict(groups.get("velocity", {}))
        self._previous = dict(groups.get("previous", {}))


def _wide(arrays: Named) -> Named:
    """Return arrays in float64."""
    return {name: value.astype(np.float64) for name, value in arrays.items()}
