"""Named arrays on disk: one safetensors file, written at once or not at all, checked when read, no pickle."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.files import write_atomically
from models.finite import array_finite

CHECKSUM = "checksum"  # metadata key that belongs to this module

DTYPES = "bool, int8 to int64, uint8 to uint64, float16, float32, float64"


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, str] | None = None,
    *,
    finite: bool = True,
) -> None:
    """Write named arrays and text metadata to `path`, replacing what is there in one step.

    The file is written under another name in the same folder (made if need be), flushed to the disk and
    renamed: a reader sees the old file or the new one, also after a power cut.

    Parameters
    ----------
    path : path-like
        The file to write, usually `*.safetensors`.
    arrays : Mapping
        Name → array of any shape, of type bool, integer or float.
    metadata : Mapping, optional
        Text by name; the name "checksum" is taken.
    finite : bool
        Refuse NaN and infinities.

    Raises
    ------
    ValueError
        An array's type or value, or the metadata, is not allowed. Nothing is written then.
    """
    path = Path(path)
    named = {name: _array(path, name, value, finite) for name, value in arrays.items()}
    notes = dict(metadata or {})
    for key, value in notes.items():
        if not isinstance(key, str) or not isinstance(value, str) or key == CHECKSUM:
            raise ValueError(f"{path}: metadata {key!r}={value!r} must be text under a name other than {CHECKSUM!r}")
    notes[CHECKSUM] = _checksum(named, notes)
    write_atomically(path, save(named, metadata=notes))


def load_arrays(path: str | os.PathLike[str], *, finite: bool = True) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read what `save_arrays` wrote: (arrays by name, metadata).

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is corrupt, truncated or not of this format, or (unless `finite` is False) a value is not
        finite; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            notes = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: corrupt, truncated or no safetensors file: {error}") from error
    checksum = notes.pop(CHECKSUM, None)
    if checksum is None:
        raise ValueError(f"{path}: a safetensors file without a checksum was not written by this program")
    if checksum != _checksum(arrays, notes):
        raise ValueError(f"{path}: corrupt: its contents do not match its checksum")
    if finite:
        for name, array in arrays.items():
            _require_finite(path, name, array)
    return arrays, notes


def _array(path: Path, name: str, value: ArrayLike, finite: bool) -> NDArray[Any]:
    """Return `value` as a contiguous array of this machine's byte order, or raise ValueError naming it."""
    array = np.asarray(value, order="C")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: {name} has type {array.dtype}; there are: {DTYPES}")
    if finite:
        _require_finite(path, name, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _require_finite(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind == "f" and not array_finite(array):
        raise ValueError(f"{path}: {name} holds values that are not finite")


def _checksum(arrays: Mapping[str, NDArray[Any]], notes: Mapping[str, str]) -> str:
    """Return the CRC-32 of the metadata and of all names, types, shapes and bytes, in name order."""
    total = zlib.crc32(repr(sorted(notes.items())).encode())
    for name in sorted(arrays):
        array = arrays[name]
        total = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), total)
        total = zlib.crc32(array.tobytes(), total)
    return f"{total:08x}"
