"""Numpy arrays on the wire: as bytes of numpy's format, and without a copy in the memory layout of networks.

Bytes are read in place and written with one copy; `numpy.load` and `numpy.save` copy them two or three times.

Layout: convolution weights [O, I, H, W] lie channels-last (O, H, W, I) in a client's network. Loading an array of
another layout needs a transposition, which takes three times as long as a copy. Values and shapes are the same.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

LAST = (0, 2, 3, 1)
FIRST = (0, 3, 1, 2)
#: An array in C order, and whether its axes are in the order LAST: what can be shipped without a copy.
Contiguous = tuple[NDArray[Any], bool]


def to_bytes(value: NDArray[Any]) -> bytes:
    """Return what `numpy.save` writes.

    Raises
    ------
    ValueError
        The array holds Python objects.
    """
    if value.dtype.hasobject:
        raise ValueError("an array of Python objects cannot be sent")
    header = io.BytesIO()
    described = npy.header_data_from_array_1_0(value)
    npy.write_array_header_1_0(header, described)
    ordered = value.T if described["fortran_order"] else np.ascontiguousarray(value)
    return b"".join((header.getvalue(), ordered.reshape(-1).view(np.uint8).data))


def from_bytes(data: bytes) -> NDArray[Any]:
    """Return the array that bytes hold, read-only and in their memory.

    Raises
    ------
    ValueError
        The bytes are no array, too few or too many, or hold Python objects.
    """
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = npy.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = npy.read_array_header_2_0(stream)
    else:
        raise ValueError(f"version {version} of numpy's format; allowed are 1.0 and 2.0")
    if dtype.hasobject:
        raise ValueError("an array of Python objects is not read")
    count, left = math.prod(shape), len(data) - stream.tell()
    if left != count * dtype.itemsize:
        raise ValueError(f"{left} bytes for {count} numbers of {dtype}")
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, stream.tell()).reshape(shape, order="F" if fortran else "C")


def channels_last(value: NDArray[Any]) -> NDArray[Any]:
    """Return an array with four axes in channels-last memory; others, and one that has it, as they are."""
    return np.ascontiguousarray(value.transpose(LAST)).transpose(FIRST) if value.ndim == 4 else value


def contiguous(value: NDArray[Any]) -> Contiguous:
    """Return an array as `restored` takes it; it is copied only if it is neither in C order nor channels-last."""
    turned = value.ndim == 4 and not value.flags.c_contiguous
    return np.asarray(value.transpose(LAST) if turned else value, order="C"), turned


def restored(value: NDArray[Any], turned: bool) -> NDArray[Any]:
    """Return the array that `contiguous` was given, in the same memory."""
    return value.transpose(FIRST) if turned else value


def packed(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Contiguous]:
    """Return named arrays in a form that ships without a copy; `unpacked` restores them."""
    return {name: contiguous(value) for name, value in arrays.items()}


def unpacked(arrays: Mapping[str, Contiguous]) -> Arrays:
    """Return the arrays that were `packed`, in the same memory."""
    return {name: restored(*value) for name, value in arrays.items()}


def array_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the bytes of the numbers in named arrays."""
    return sum(value.nbytes for value in arrays.values())
