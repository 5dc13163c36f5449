"""pFedGraph: "Personalized Federated Learning with Inferred Collaboration Graphs", Ye et al., ICML 2023.

Row i of W minimises ‖W_i - p‖² - α Σ_j W_ij cos_ij over the simplex: p are the data shares, cos_ij the cosine of
θ_i - θ_0 and θ_j - θ_0, the similarity of two clients' steps from the common start. Completing the square, it is the
point of the simplex nearest to p + (α/2) cos_i, found in closed form. Here at test time, over the shared arrays.

Decisions: a client that has not moved has cosine 0 with the others and 1 with itself. α = 1.25. Published code counts
cosines above 0.9 as 1, which the paper does not mention: `round_above=0.9`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedtta.strategies.arrays import Float
from fedtta.strategies.collaborative import Collaborative, Replies
from fedtta.strategies.distances import Client, Clients, cosines


def project_simplex(points: NDArray[Any]) -> Float:
    """Return for each row of `points` [N, M] the nearest point w of the simplex: w ≥ 0, Σ w = 1.

    w = max(v - t, 0); t follows from the sorted row: the largest k with v_(k) > (v_(1) + ... + v_(k) - 1)/k are kept
    (Duchi et al., ICML 2008, figure 1).

    Raises
    ------
    ValueError
        There is no column, or a value is not finite.
    """
    rows = np.asarray(points, np.float64)
    if rows.ndim != 2 or not rows.shape[1] or not np.isfinite(rows).all():
        raise ValueError(f"points of shape {rows.shape}; allowed are finite values [N, M] with M > 0")
    rows = rows - rows.max(axis=1, keepdims=True)  # the answer is the same, and large values lose no digits
    ordered = -np.sort(-rows, axis=1)  # (N, M), falling
    thresholds = (np.cumsum(ordered, axis=1) - 1) / np.arange(1, rows.shape[1] + 1)
    kept = (ordered > thresholds).sum(axis=1)  # at least 1: v_(1) > v_(1) - 1
    nearest = np.maximum(rows - thresholds[np.arange(len(rows)), kept - 1][:, None], 0.0)
    return nearest / nearest.sum(axis=1, keepdims=True)


def pfedgraph_weights(
    theta: Clients,
    start: Client,
    shares: Sequence[float] | NDArray[Any],
    alpha: float = 1.25,
    round_above: float = 1.0,
) -> Float:
    """Return W [N, N].

    Parameters
    ----------
    theta : [N, P] or sequence of mappings
        The arrays that each client shares.
    start : [P] or mapping
        θ_0.
    shares : [N]
        The clients' numbers of samples; p is their share of the sum.
    alpha : float
        α ≥ 0; 0 gives W_i = p, a large one gives weight only to clients that moved in the same direction.
    round_above : float
        A cosine above it counts as 1; in [-1, 1], and 1 changes none. The published code: 0.9.

    Raises
    ------
    ValueError
        α or `round_above` is out of range, a share is not positive, or the arrays do not fit each other.
    """
    _require_alpha(alpha)
    _require_cosine(round_above)
    cosine, p = cosines(theta, start), _require_shares(shares)
    cosine[cosine > round_above] = 1.0
    if len(p) != len(cosine):
        raise ValueError(f"{len(p)} data shares do not fit {len(cosine)} clients")
    return project_simplex(p + alpha / 2 * cosine)


def _require_alpha(alpha: float) -> float:
    """Return α, or raise ValueError when it is negative or not finite."""
    if not 0 <= alpha < float("inf"):
        raise ValueError(f"alpha = {alpha!r}; allowed is a finite number, 0 or more")
    return alpha


def _require_cosine(round_above: float) -> float:
    """Return the threshold, or raise ValueError when it is no cosine."""
    if not -1 <= round_above <= 1:
        raise ValueError(f"round_above = {round_above!r}; allowed is a number from -1 to 1")
    return round_above


def _require_shares(shares: Sequence[float] | NDArray[Any]) -> Float:
    """Return data shares p [N] that sum to one; ValueError when there are none or one is not positive."""
    counts = np.asarray(shares, np.float64)
    if counts.ndim != 1 or not len(counts) or not np.isfinite(counts).all() or (counts <= 0).any():
        raise ValueError(f"data shares {counts.tolist()}; allowed are positive, finite numbers, one a client")
    return counts / counts.sum()


class PFedGraph(Collaborative):
    """Mix by the similarity of the nodes' steps from θ_0, see `set_start`.

    Parameters
    ----------
    network : ArrayRecord, optional
        See `Collaborative`.
    alpha, round_above : float
        See `pfedgraph_weights`.

    Raises
    ------
    ValueError
        `alpha` is negative or not finite, or `round_above` is no cosine.
    """

    needs_start = True

    def __init__(self, network: ArrayRecord | None = None, alpha: float = 1.25, round_above: float = 1.0) -> None:
        super().__init__(network)
        self.alpha, self.round_above = _require_alpha(alpha), _require_cosine(round_above)

    def weigh(self, replies: Replies) -> Float:
        """Return W over the shared arrays; p are the samples of this round."""
        start = self.start_arrays or {}
        return pfedgraph_weights(replies.shared, start, replies.examples, self.alpha, self.round_above)
