"""Shamir's secret sharing: t of n shares give a secret back, fewer tell nothing about it.

"How to share a secret", Shamir, Communications of the ACM, 1979; over the prime field of 2^521 - 1. (Flower's utility
works in GF(2^128), takes about a millisecond a share, and needs secrets cut into pieces; this one is a polynomial.)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
SECRET = 32  # bytes of a secret
SHARE = 66  # bytes of a share


def split(secret: bytes, threshold: int, points: Sequence[int]) -> list[bytes]:
    """Split a secret into one share for each point.

    Parameters
    ----------
    secret : bytes
        `SECRET` of them.
    threshold : int
        Shares that give the secret back; from 1 to the number of points.
    points : sequence of int
        Different numbers from 1 on, which name the shares.

    Raises
    ------
    ValueError
        Secret, threshold or points are not allowed.
    """
    if len(secret) != SECRET:
        raise ValueError(f"a secret of {len(secret)} bytes; allowed is {SECRET}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold = {threshold}; allowed is 1 to {len(points)}")
    if len(set(points)) != len(points) or min(points) < 1:
        raise ValueError("points must be different numbers from 1 on")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):  # Horner
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of as many shares as its threshold, by point; Lagrange's interpolation at 0.

    Raises
    ------
    ValueError
        The shares are not of one secret, or there are none.
    """
    total = 0
    for point, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        total = (total + int.from_bytes(share) * above * pow(below, -1, PRIME)) % PRIME
    if not shares or total >= 2 ** (8 * SECRET):
        raise ValueError("these shares are not of one secret")
    return total.to_bytes(SECRET)


def fingerprint(secret: bytes) -> str:
    """Return SHA-256 in hexadecimal digits, by which a secret or a share is recognized without being told."""
    return hashlib.sha256(secret).hexdigest()
