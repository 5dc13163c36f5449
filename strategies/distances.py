"""Distances and cosines between clients' arrays, in memory that does not grow with the size of the network.

Clients are either the rows of one matrix [N, P] or mappings name → array, whose numbers together are one vector of
length P each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedtta.strategies.arrays import Arrays, Float, blocks

#: N clients: a matrix [N, P], or a mapping name → array for each.
Clients: TypeAlias = NDArray[Any] | Sequence[Arrays]
#: One client.
Client: TypeAlias = NDArray[Any] | Arrays

#: A squared distance smaller than this part of the two squared norms has lost too many digits in
#: ‖a‖² + ‖b‖² - 2 a·b; it is computed again from the differences.
DOUBTFUL = 1e-6


def squared_distances(theta: Clients) -> Float:
    """Return ‖θ_i - θ_j‖² [N, N]: symmetric, zero on the diagonal, exactly zero for equal clients.

    One matrix product of centred rows; the few pairs for which it is not exact enough are computed by differences.

    Raises
    ------
    ValueError
        There is no client, the arrays do not fit each other, or a value is not finite.
    """
    clients = _as_mappings(theta)
    gram = np.zeros((len(clients), len(clients)))
    for block in blocks(clients):
        block -= block[0]  # equal clients are exactly zero from here on
        block -= block.mean(axis=0)
        gram += block @ block.T
    norms = np.diag(gram)
    sums = norms[:, None] + norms[None, :]
    squared = np.maximum(sums - 2 * gram, 0.0)
    doubtful = np.triu(squared < DOUBTFUL * sums, 1)
    squared[doubtful] = 0.0
    if doubtful.any():
        for block in blocks(clients):
            for i in np.flatnonzero(doubtful.any(axis=1)):
                difference = block[doubtful[i]] - block[i]
                squared[i, doubtful[i]] += np.einsum("np,np->n", difference, difference)
    upper = np.triu(squared, 1)
    return upper + upper.T


def cosines(theta: Clients, start: Client) -> Float:
    """Return the cosine of θ_i - θ_0 and θ_j - θ_0 [N, N]: symmetric, in [-1, 1], one on the diagonal.

    Parameters
    ----------
    theta : [N, P] or sequence of mappings
    start : [P] or mapping
        θ_0. A client that has not moved from it has cosine 0 with all others.

    Raises
    ------
    ValueError
        There is no client, the arrays do not fit each other, or a value is not finite.
    """
    clients, origin = _as_mappings(theta), _as_mappings([start])[0]
    gram = np.zeros((len(clients), len(clients)))
    for block in blocks([*clients, origin]):
        moved = block[:-1] - block[-1]
        gram += moved @ moved.T
    lengths = np.sqrt(np.diag(gram))
    directions = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    cosine = np.clip(gram * directions[:, None] * directions[None, :], -1.0, 1.0)
    upper = np.triu(cosine, 1)
    return upper + upper.T + np.eye(len(clients))


def off_diagonal_median(matrix: Float) -> float:
    """Return the median of the off-diagonal entries of a matrix [N, N]; 0 for one client."""
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    return float(np.median(others)) if len(others) else 0.0


def _as_mappings(theta: Clients | Sequence[Client]) -> Sequence[Arrays]:
    """Return matrix rows, or vectors in a list, as mappings with one array each, without a copy."""
    if isinstance(theta, np.ndarray) and theta.ndim != 2:
        raise ValueError(f"clients of shape {theta.shape}; allowed is a matrix [N, P]")
    return [client if isinstance(client, Mapping) else {"theta": np.asarray(client)} for client in theta]
