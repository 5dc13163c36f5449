"""Keys, masks, and numbers that can be summed under masks.

"Practical secure aggregation for privacy-preserving machine learning", Bonawitz et al., CCS 2017, and its sparse form,
"Secure single-server aggregation with (poly)logarithmic overhead", Bell et al., CCS 2020 (SecAgg+). Client u sends
x_u + m(b_u) + Σ_{v > u} m(s_uv) - Σ_{v < u} m(s_uv) modulo 2^64: masks of pairs cancel in the sum, so that only
Σ x_u is left once the b_u are known. (Flower's utilities draw masks from MT19937 with a seed of 32 bits, which can be
tried out; here they are an AES key stream.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Words = NDArray[np.uint64]
KEY = 32  # bytes of a key or seed
NONCE = 12
#: Largest absolute value that can be summed, before it is weighted.
LIMIT = 2**16


def new_secret() -> bytes:
    """Return a random private key or seed."""
    return os.urandom(KEY)


def public_key(private: bytes) -> bytes:
    """Return the public key (X25519) of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_key(public: bytes) -> bool:
    """Return whether a client can agree on a key with this one; there are made-up ones with which none is possible."""
    try:
        shared_key(new_secret(), public, "check")
    except ValueError:
        return False
    return True


def shared_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """Return the key that two clients agree on for one purpose.

    Raises
    ------
    ValueError
        The public key is none.
    """
    agreed = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(hashes.SHA256(), KEY, None, purpose.encode()).derive(agreed)


def seal(key: bytes, text: bytes, about: str) -> bytes:
    """Encrypt and authenticate a text, bound to what it is `about`."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about.encode())


def unseal(key: bytes, sealed: bytes, about: str) -> bytes:
    """Return a text that was sealed; ValueError if it was not, with this key and about this."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], about.encode())
    except (InvalidTag, ValueError) as error:
        raise ValueError(f"a share cannot be read: {about}") from error


def mask(seed: bytes, size: int) -> Words:
    """Return the mask of a seed: numbers [size], uniform modulo 2^64. A seed is used once."""
    stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.dtype("<u8")).astype(np.uint64, copy=False)


def pair_masks(private: bytes, own: int, others: Iterable[tuple[int, bytes]], about: str, size: int) -> Words:
    """Return the sum of a client's masks with others [size]; the others' have the opposite signs.

    Parameters
    ----------
    private : bytes
        The client's masking key.
    own : int
        Its number.
    others : iterable of (int, bytes)
        Number and public masking key of each other client.
    about : str
        What the masks are for: session and request. Those of clients for whom it differs do not cancel.
    """
    total = np.zeros(size, np.uint64)
    for number, public in others:
        one = mask(shared_key(private, public, f"mask {about}"), size)
        if number > own:
            total += one
        else:
            total -= one
    return total


def fraction_bits(clients: int, most: int) -> int:
    """Return with how many binary places numbers are summed, so that no sum of weighted ones overflows.

    Parameters
    ----------
    clients : int
        Terms of the sum.
    most : int
        The largest weight of a term.

    Raises
    ------
    ValueError
        There are too many samples for a resolution of at least 2^-8.
    """
    bits = 62 - math.ceil(math.log2(LIMIT)) - math.ceil(math.log2(max(1, clients * most)))
    if bits < 8:
        raise ValueError(f"{clients} clients of {most} samples are too many for secure aggregation")
    return bits


def encode(values: NDArray[np.float64], bits: int, most: int) -> Words:
    """Return weighted numbers as integers modulo 2^64, rounded to the nearest multiple of 2^-bits.

    Raises
    ------
    ValueError
        A number is not finite, or beyond `LIMIT` times the largest weight `most`: it could change the sum's sign.
    """
    if not (np.abs(values) <= LIMIT * most).all():
        raise ValueError(f"values that are not finite or beyond {LIMIT:,} cannot be summed securely")
    return np.rint(values * 2.0**bits).astype(np.int64).view(np.uint64)


def decode(total: Words, bits: int) -> NDArray[np.float64]:
    """Return the sum of encoded numbers."""
    return total.view(np.int64).astype(np.float64) / 2.0**bits
