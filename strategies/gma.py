"""GMA: "Gradient Masked Averaging for Federated Learning", Tenison et al., 2022 (arXiv 2201.11986).

Values move less where clients disagree on the direction. Δ_k = w_k - w; A = |Σ_k p_k sign(Δ_k)| elementwise, the
agreement, in [0, 1]; M = 1 where A ≥ τ, and A elsewhere (the paper's soft mask); w ← w + M ⊙ Σ_k p_k Δ_k. The server's
rate is 1.

Default: τ = 0.1, the best of 0.1 to 1 in FedTHE (ICLR 2023, appendix C.2).

Decisions and deviations
- p_k is the share of examples, in A and in the mean. The paper and FedTHE's code count clients alike, which is the same
  for clients of equal size.
- Running means and variances have no gradient: they are averaged plainly.
- Integer counts are summed and divided once: 11 clients against 9 of equal size agree by exactly 0.1, which is τ.
- float64 throughout; the result lies between w and the w_k, and is clipped into their range against rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fedtta.strategies.aggregation import NumpyAggregation, TrainReply
from fedtta.strategies.arrays import RUNNING_STATISTICS, Arrays, Named, require_alike, weighted_mean


def masked_mean(start: Arrays, trained: Sequence[Arrays], weights: Sequence[float], threshold: float) -> Named:
    """Return the new global model, in the dtypes of the arrays.

    Parameters
    ----------
    start : mapping
        w, name → array.
    trained : sequence of mappings
        w_k, one a client; the same names, shapes and dtypes.
    weights : sequence of float
        Non-negative, not all zero; p_k is their share.
    threshold : float
        τ in [0, 1]; 0 gives the plain mean.

    Raises
    ------
    ValueError
        There is no client, something does not fit, or a number is out of range.
    """
    _check_threshold(threshold)
    means = weighted_mean(trained, weights)
    require_alike([start, *trained])
    factors = np.asarray(weights, np.float64)
    new = {}
    for name, value in start.items():
        if name.endswith(RUNNING_STATISTICS):
            new[name] = means[name]
            continue
        origin = value.astype(np.float64)
        votes, moved = np.zeros(value.shape), np.zeros(value.shape)
        low, high = origin, origin
        for factor, client in zip(factors, trained, strict=True):
            term = client[name].astype(np.float64)
            votes += factor * np.sign(term - origin)
            moved += factor * (term - origin)
            low, high = np.minimum(low, term), np.maximum(high, term)
        agreement = np.abs(votes) / factors.sum()
        mask = np.where(agreement >= threshold, 1.0, agreement)
        new[name] = np.clip(origin + mask * moved / factors.sum(), low, high).astype(value.dtype)
    return new


class GMA(NumpyAggregation):
    """FedAvg whose steps are masked by how much the clients agree on their signs.

    Parameters
    ----------
    threshold : float
        τ in [0, 1].
    **fedavg
        Flower's own parameters.

    Raises
    ------
    ValueError
        `threshold` is outside [0, 1].
    """

    options: ClassVar = {"threshold": "mask_threshold"}

    def __init__(self, threshold: float = 0.1, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        _check_threshold(threshold)
        self.threshold = threshold

    def aggregate(self, replies: Sequence[TrainReply]) -> Named:
        """Return one masked step from the model that was sent."""
        counts = [float(reply.metrics[self.weighted_by_key]) for reply in replies]
        return masked_mean(self.sent, [reply.arrays for reply in replies], counts, self.threshold)


def _check_threshold(threshold: float) -> None:
    """Raise ValueError unless τ is in [0, 1]."""
    if not 0 <= threshold <= 1:  # also refuses NaN
        raise ValueError(f"threshold = {threshold!r}; allowed is a number from 0 to 1")
