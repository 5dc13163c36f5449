"""Deal a natural shift (CIFAR-10.1) out to clients, each one's class mix that of its training split.

FedTHE, appendix D: "split CIFAR10.1 into subsets where each subset's class distribution is consistent with
the corresponding client's local training set class distribution".
"""

from __future__ import annotations

import numpy as np

from .seeds import generator


def deal(counts: np.ndarray, labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return disjoint indices into `labels` for each client.

    Client i is to get s · c_ik pictures of class k, with one s for all clients and classes: the largest for
    which no class runs out. So the mixes are exact up to rounding, no picture is dealt twice, and where the
    clients' classes add up to something other than the stock's proportions a part of the stock stays unused.
    Rounding is by largest remainder within a class (equal remainders: the lower client number), so each
    number is less than one picture off.

    Parameters
    ----------
    counts : ndarray [N, K]
        c_ik, training samples of each class a client has.
    labels : ndarray [M]
        Classes of the pictures to deal.
    seed : int
        Decides which pictures of a class a client gets.

    Returns
    -------
    list of ndarray
        Sorted indices (int64), one array a client.
    """
    clients, classes = counts.shape
    stock = np.bincount(labels, minlength=classes)
    demand = counts.sum(axis=0)
    asked = demand > 0
    scale = float((stock[asked] / demand[asked]).min()) if asked.any() else 0.0  # s
    dealt: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label in range(classes):
        members = generator("natural", seed, label).permutation(np.flatnonzero(labels == label))
        shares = largest_remainder(scale * counts[:, label])
        for client, part in enumerate(np.split(members[: shares.sum()], shares.cumsum()[:-1])):
            dealt[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in dealt]


def largest_remainder(quotas: np.ndarray) -> np.ndarray:
    """Round non-negative quotas [n] to integers less than one off, that sum to floor(sum of the quotas)."""
    quotas = np.round(quotas, 9)  # 3 · (1/3) must not lose a picture to floating point
    given = np.floor(quotas).astype(np.int64)
    missing = int(np.floor(round(float(quotas.sum()), 6))) - int(given.sum())
    given[np.argsort(-np.round(quotas - given, 9), kind="stable")[:missing]] += 1
    return given
