"""Random generators of the data package: every draw has a generator named by its purpose."""

from __future__ import annotations

import zlib

import numpy as np


def generator(*keys: int | str) -> np.random.Generator:
    """Return a generator that depends on `keys` only, e.g. `generator("split", seed, client)`.

    Different purposes have independent generators even with the same seed, and no draw depends on earlier draws for
    another purpose.

    Parameters
    ----------
    keys : int or str
        Names (hashed with CRC-32, so equal on every machine) and non-negative integers.

    Raises
    ------
    ValueError
        No key, or a negative integer.
    """
    if not keys:
        raise ValueError("a generator needs at least one key")
    words = [zlib.crc32(key.encode()) if isinstance(key, str) else int(key) for key in keys]
    if min(words) < 0:
        raise ValueError(f"seeds must not be negative: {keys}")
    return np.random.default_rng(np.random.SeedSequence(words))
