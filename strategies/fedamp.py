"""FedAMP: "Personalized Cross-Silo Federated Learning on Non-IID Data", Huang et al., AAAI 2021.

W_ij = (α/σ) exp(-‖θ_i - θ_j‖²/σ) for j ≠ i, the step α times the derivative of the attention A(x) = 1 - exp(-x/σ);
W_ii = 1 - Σ_{j≠i} W_ij. Here at test time, over the arrays that nodes share.

Decisions: the paper tunes σ and α for each data set; the defaults are σ = the median of the squared distances between
different clients and α = σ/N, so that W_ii ≥ 1/N whatever the distances. σ = 0 (most pairs of clients are equal) stands
for the limit σ → 0 with α = σ/N: a client gives 1/N to each other client at distance 0 and keeps the rest.
"""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord

from fedtta.strategies.arrays import Float
from fedtta.strategies.collaborative import Collaborative, Replies
from fedtta.strategies.distances import Clients, off_diagonal_median, squared_distances


def fedamp_weights(theta: Clients, sigma: float | None = None, alpha: float | None = None) -> Float:
    """Return W [N, N].

    Parameters
    ----------
    theta : [N, P] or sequence of mappings
        The arrays that each client shares.
    sigma : positive float, optional
        σ, in units of a squared distance; None: the median squared distance between different clients.
    alpha : positive float, optional
        α; None: σ/N.

    Raises
    ------
    ValueError
        A setting is not positive and finite, α is so large that a W_ii would be negative, or the arrays cannot be
        compared.
    """
    _require_positive(sigma=sigma, alpha=alpha)
    squared = squared_distances(theta)
    size = len(squared)
    scale = off_diagonal_median(squared) if sigma is None else sigma
    if scale == 0:
        weights = (squared == 0) / size
    else:
        step = 1 / size if alpha is None else alpha / scale  # α/σ
        with np.errstate(over="ignore"):  # a quotient that overflows has weight e^-∞ = 0
            weights = step * np.exp(-squared / scale)
    np.fill_diagonal(weights, 0.0)
    given = weights.sum(axis=1)
    if (given > 1 + 1e-12).any():
        largest = scale / (given.max() / step)
        raise ValueError(
            f"alpha = {alpha}: a client would give {given.max():.3g} to the others; allowed is up to {largest:.3g}"
        )
    np.fill_diagonal(weights, np.maximum(1 - given, 0.0))
    return weights


def _require_positive(**values: float | None) -> None:
    """Raise ValueError for a setting that is neither None nor a positive, finite number."""
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} = {value!r}; allowed is a positive, finite number")


class FedAMP(Collaborative):
    """Mix by attention: nodes with similar arrays give each other more weight.

    Parameters
    ----------
    network : ArrayRecord, optional
        See `Collaborative`.
    sigma, alpha : positive float, optional
        See `fedamp_weights`.

    Raises
    ------
    ValueError
        A setting is not positive and finite.
    """

    def __init__(
        self, network: ArrayRecord | None = None, sigma: float | None = None, alpha: float | None = None
    ) -> None:
        super().__init__(network)
        _require_positive(sigma=sigma, alpha=alpha)
        self.sigma, self.alpha = sigma, alpha

    def weigh(self, replies: Replies) -> Float:
        """Return W over the shared arrays."""
        return fedamp_weights(replies.shared, self.sigma, self.alpha)
