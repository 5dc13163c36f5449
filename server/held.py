"""Flower arrays that hold numpy arrays by reference: nothing is turned into bytes and back, or only once."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

dtype_name = functools.cache(str)  # of numpy, which looks it up anew for every array
NUMPY = "numpy.ndarray"  # how Flower calls arrays that numpy wrote


class HeldArray(Array):
    """An array that `numpy()` returns as it is, read-only; its bytes are made when somebody asks for them.

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
        """Return the array as Flower would send it."""
        buffer = io.BytesIO()
        np.save(buffer, self.__dict__["_held"], allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> NDArray[Any]:
        """Return the array itself, read-only."""
        held: NDArray[Any] = self.__dict__["_held"]
        return held


def held_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as a record, by reference."""
    record = ArrayRecord()
    for name, value in arrays.items():
        record[name] = HeldArray(value)
    return record


def hold(content: RecordDict) -> None:
    """Read the arrays of a message and let go of its bytes, so that whoever asks for one gets it at once.

    One that cannot be read stays as it came: who checks it sees that.
    """
    for record in content.array_records.values():
        for name, array in list(record.items()):
            if not isinstance(array, HeldArray):
                with contextlib.suppress(ValueError, TypeError, EOFError, OSError):
                    record[name] = HeldArray(array.numpy())
