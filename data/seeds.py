"""Explicit random generators: every draw in this room comes from a generator named by what it is for."""

from __future__ import annotations

import zlib

import numpy as np


def generator(*keys: int | str) -> np.random.Generator:
    """Return a generator that depends on `keys` alone, e.g. `generator("split", seed, client)`.

    Two different purposes get independent streams even from the same seed, and no draw depends on what was
    drawn before for something else.

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
