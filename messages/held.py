"""Flower arrays that hold numpy arrays by reference: nothing is turned into bytes and back, or only once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from messages.layout import contiguous, restored
from messages.npy import NUMPY, from_bytes, to_bytes

dtype_name = functools.cache(str)  # of numpy's types, which would look it up anew for every array


class HeldArray(Array):
    """An array that `numpy()` returns as it is, read-only; its bytes are made when somebody asks for them.

    Ray, which runs Flower's simulation, ships it from process to process through shared memory, without bytes.

    Parameters
    ----------
    value : ndarray
        Not copied; nobody may change it afterwards.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        held = np.asarray(value).view()
        held.flags.writeable = False
        self.__dict__.update(dtype=dtype_name(held.dtype), shape=tuple(held.shape), stype=NUMPY, _held=held)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # an attribute there
        """Return the array as Flower would send it, in C order however it lies in memory."""
        return to_bytes(np.asarray(self.__dict__["_held"], order="C"))

    def numpy(self) -> NDArray[Any]:
        """Return the array itself, read-only."""
        held: NDArray[Any] = self.__dict__["_held"]
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        return _shipped, contiguous(self.__dict__["_held"])


HeldArray.__qualname__ = Array.__qualname__  # what Flower writes into a message, and looks up where it is read


def _shipped(value: NDArray[Any], turned: bool) -> HeldArray:
    """Return the array that `HeldArray.__reduce__` took apart."""
    return HeldArray(restored(value, turned))


def held_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record, by reference."""
    record = ArrayRecord()
    for name, value in arrays.items():
        record[name] = HeldArray(value)
    return record


def read(array: Array) -> NDArray[Any]:
    """Return an array, read-only and in the memory it came in.

    Raises
    ------
    ValueError
        It is none that numpy wrote, or cannot be read.
    """
    if array.stype != NUMPY:
        raise ValueError(f"made by {array.stype!r}; allowed is {NUMPY}")
    return array.numpy() if isinstance(array, HeldArray) else from_bytes(array.data)


def hold(content: RecordDict) -> None:
    """Read the arrays of a message, so that whoever asks for one gets it at once.

    One that cannot be read stays as it came: who checks it sees that.
    """
    for record in content.array_records.values():
        for name, array in list(record.items()):
            if not isinstance(array, HeldArray):
                with contextlib.suppress(ValueError):
                    record[name] = HeldArray(read(array))
