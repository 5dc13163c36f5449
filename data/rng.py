"""Random generators of the data package, one for each purpose, and the clients' numbers in seeds."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from fedtta.settings import is_number


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


def client_number(name: str) -> int:
    """Return the number of a client in seeds: that of a decimal name ("0", "17"), else a hash of the name above 2^32.

    Parameters
    ----------
    name : str
        The client's name; clients of a divided data set are called "0" to "N-1".
    """
    if is_number(name):
        return int(name)
    return 2**32 + (int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2)
