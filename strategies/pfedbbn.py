"""pFedBBN: Personalized Federated Test-Time Adaptation with Balanced Batch Normalization, section 3.2.

Clients with similar normalization statistics are in similar domains and give each other more weight. Equation 7 is the
distance of two clients' statistics, equation 8 the weights, equation 9 the mixtures (`fedtta.strategies.arrays.mix`).
The statistics describe the balanced layers of the student, and reveal a client's domain; the adapter decides what is
mixed.

Decisions where the paper is silent:
- τ is by default the median of the distances between different clients. At τ = 1 a small network's weights are nearly
  uniform: distances grow with the number of channels.
- A median of 0 (most pairs of clients are equal) stands for the limit τ → 0: a client shares equally with those at
  distance 0. So equal clients get the uniform W, and one client gets [[1]].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedtta.strategies.arrays import Float, require_alike
from fedtta.strategies.collaborative import Collaborative, Replies
from fedtta.strategies.distances import off_diagonal_median


def bn_distance(statistics: Sequence[Mapping[str, tuple[NDArray[Any], NDArray[Any]]]]) -> Float:
    """Return D [N, N] of equation 7: symmetric, zero on the diagonal.

    D_ij is the mean over layers of (‖μ_i - μ_j‖₂ + ‖σ²_i - σ²_j‖₂)/2, from exact differences.

    Parameters
    ----------
    statistics : sequence of mappings
        One a client: layer → (mean [C], variance [C]).

    Raises
    ------
    ValueError
        There is no client or no layer, layers or shapes differ, a value is not finite, or a variance is negative.
    """
    from scipy.spatial.distance import pdist, squareform  # 20 MB, which other strategies do without

    if not statistics or not statistics[0]:
        raise ValueError("there is nothing to compare: no client, or no layer")
    named = [_by_name(client) for client in statistics]
    require_alike(named)
    pairs = np.zeros(len(named) * (len(named) - 1) // 2)
    for name in named[0]:
        rows = np.stack([client[name].reshape(-1) for client in named])  # (N, C)
        if not np.isfinite(rows).all():
            raise ValueError(f"{name}: values that are not finite")
        if name.endswith(".variance") and (rows < 0).any():
            raise ValueError(f"{name}: negative variances")
        pairs += pdist(rows) / 2
    return squareform(pairs / len(statistics[0]))


def _by_name(client: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> dict[str, Float]:
    """Return one client's statistics as `<layer>.mean` and `<layer>.variance`, in float64."""
    return {
        f"{layer}.{part}": np.asarray(value, np.float64)
        for layer, pair in client.items()
        for part, value in zip(("mean", "variance"), pair, strict=True)
    }


def similarity_weights(distance: NDArray[Any], temperature: float | Literal["median"] = "median") -> Float:
    """Return W [N, N] of equation 8 from D [N, N].

    As printed, W_ii = ω_i = 1/(1 + Σ_{k≠i} e^(-D_ik/τ)) and W_ij = (1 - ω_i) e^(-D_ij/τ) / Σ_{k≠i} e^(-D_ik/τ). Since
    D_ii = 0 this is the softmax of -D_i/τ over all j.

    Parameters
    ----------
    distance : [N, N]
        Finite, non-negative, zero on the diagonal.
    temperature : positive float or "median"
        τ; "median" is the median distance between different clients. With a small τ only very similar clients share.

    Raises
    ------
    ValueError
        D is no distance matrix, or τ is neither positive and finite nor "median".
    """
    distance = np.asarray(distance, np.float64)
    if distance.ndim != 2 or distance.shape[0] != distance.shape[1] or not distance.size:
        raise ValueError(f"distances of shape {distance.shape}; allowed is [N, N]")
    if not np.isfinite(distance).all() or (distance < 0).any() or np.diag(distance).any():
        raise ValueError("distances must be finite, not negative, and zero on the diagonal")
    tau = require_temperature(temperature)
    if tau == "median":
        tau = off_diagonal_median(distance)
    if tau == 0:
        close = (distance == 0).astype(np.float64)
    else:
        with np.errstate(over="ignore"):  # a quotient that overflows has weight e^-∞ = 0
            close = np.exp(-distance / tau)
    return close / close.sum(axis=1, keepdims=True)


def require_temperature(temperature: float | str) -> float | Literal["median"]:
    """Return τ, or raise ValueError unless it is "median" or a positive, finite number."""
    if temperature == "median":
        return "median"
    if isinstance(temperature, str) or not 0 < temperature < float("inf"):
        raise ValueError(f"temperature = {temperature!r}; allowed is a positive, finite number or 'median'")
    return float(temperature)


class PFedBBN(Collaborative):
    """Mix by the similarity of normalization statistics.

    Parameters
    ----------
    network : ArrayRecord, optional
        See `Collaborative`.
    temperature : positive float or "median"
        τ, see `similarity_weights`.

    Raises
    ------
    ValueError
        `temperature` is neither "median" nor a positive, finite number.
    """

    needs_statistics = True

    def __init__(self, network: ArrayRecord | None = None, temperature: float | Literal["median"] = "median") -> None:
        super().__init__(network)
        self.temperature = require_temperature(temperature)

    def weigh(self, replies: Replies) -> Float:
        """Return W over the nodes' domain statistics."""
        return similarity_weights(bn_distance(replies.normalisation), self.temperature)
