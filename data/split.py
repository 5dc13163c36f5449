"""Splits of a client's samples into training, validation and test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .rng import generator


@dataclass(frozen=True, eq=False)
class Split:
    """Training, validation and test samples of one client: sorted, disjoint indices (int64)."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def samples(self) -> np.ndarray:
        """All samples of the client, sorted."""
        return np.sort(np.concatenate([self.train, self.validation, self.test]))

    def __len__(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)


def split(
    indices: np.ndarray,
    seed: int | Sequence[int],
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
) -> Split:
    """Split a client's samples at random.

    Sizes are the fractions of n rounded by largest remainder; equal remainders go to train first, then test, then
    validation. With the default fractions, (train, validation, test) = (1, 0, 0), (1, 0, 1), (2, 0, 1), (2, 1, 1),
    (3, 1, 1) for n = 1 to 5. A client with at least one sample has a training sample.

    Parameters
    ----------
    indices : ndarray [n]
        The client's samples, all different.
    seed : int or sequence of int
        Determines the split, together with the *set* of indices (their order has no effect).
    fractions : (train, validation, test)
        Non-negative, train positive, sum 1.

    Raises
    ------
    ValueError
        Bad fractions, or repeated indices.
    """
    own = np.unique(np.asarray(indices, dtype=np.int64))
    if len(own) != len(indices):
        raise ValueError(f"{len(indices) - len(own)} indices of the client are repeated")
    train, validation, _ = sizes(len(own), fractions)
    shuffled = generator("split", *_keys(seed)).permutation(own)
    parts = np.split(shuffled, [train, train + validation])
    return Split(*(np.sort(part) for part in parts))


def subsample(split: Split, train: float, test: float, seed: int | Sequence[int]) -> Split:
    """Keep a random share of the training and of the test samples, and all validation samples (FedTHE, Tables 10, 11).

    Parameters
    ----------
    train, test : float
        Shares in (0, 1]: round(share · n) of n samples are kept, at least one. Smaller shares are
        subsets of larger ones.
    seed : int or sequence of int
        Determines which samples are kept.

    Raises
    ------
    ValueError
        A share is not in (0, 1].
    """
    kept = []
    for name, own, part in (("train", split.train, train), ("test", split.test, test)):
        if not 0 < part <= 1:
            raise ValueError(f"part of {name} = {part}: allowed is more than 0, at most 1")
        order = generator("part", name, *_keys(seed)).permutation(len(own))
        kept.append(np.sort(own[order[: max(1, round(part * len(own)))]]) if part < 1 else own)
    return Split(kept[0], split.validation, kept[1])


def sizes(count: int, fractions: tuple[float, float, float]) -> tuple[int, int, int]:
    """Return (train, validation, test), which sum to `count`; see `split`.

    Raises
    ------
    ValueError
        Bad fractions.
    """
    train, validation, test = fractions
    if not (train > 0 and validation >= 0 and test >= 0 and abs(sum(fractions) - 1.0) < 1e-9):
        raise ValueError(f"fractions={fractions} (train, validation, test) must be >= 0, train > 0, and sum to 1")
    # Rounded, because 0.6 · 5 is a little less than 3 in floating point.
    quotas = np.round(np.array([train, test, validation]) * count, 9)  # in the order in which ties are served
    given = np.floor(quotas).astype(int)
    order = np.argsort(-np.round(quotas - given, 9), kind="stable")
    given[order[: count - given.sum()]] += 1
    if count and given[0] == 0:
        given[1 + int(np.argmax(given[1:]))] -= 1
        given[0] = 1
    return int(given[0]), int(given[2]), int(given[1])


def _keys(seed: int | Sequence[int]) -> tuple[int, ...]:
    return (seed,) if isinstance(seed, int) else tuple(seed)
