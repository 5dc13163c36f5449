"""Safe storage of named arrays: atomic writes, checksums, finiteness checks, no pickle; equal content, equal bytes.

And what tensors have in common wherever they are: `all_finite`, `to_device`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedtta.settings.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHECKSUM = "checksum"  # reserved metadata key

DTYPES = "bool, int8 to int64, uint8 to uint64, float16, float32, float64"


def all_finite(values: Sequence[Tensor]) -> bool:
    """Return whether all numbers of floating-point tensors on one device are finite; True for an empty sequence.

    A sum that contains NaN or infinity is not finite. A sum of large finite numbers may overflow as well: only then
    is every number checked, which is about fifty times slower.
    """
    import torch  # which storing arrays does not need

    if not values:
        return True
    sums = torch.stack([value.detach().sum(dtype=torch.float32) for value in values])
    if bool(torch.isfinite(sums).all()):
        return True
    return bool(torch.stack([torch.isfinite(value.detach()).all() for value in values]).all())


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return `value.to(device)`; where this is a copy from the CPU to a GPU, the program goes on before it is done.

    Only from pinned memory is such a copy asynchronous. PyTorch keeps that memory until the GPU has read it.
    """
    if value.is_cpu and device.type == "cuda":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def array_finite(value: NDArray[Any]) -> bool:
    """Return whether all numbers of a floating-point array are finite; see `all_finite`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum())) or bool(np.isfinite(value).all())


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, str] | None = None,
    *,
    finite: bool = True,
    private: bool = False,
    durable: bool = True,
) -> None:
    """Write named arrays and text metadata to a safetensors file, atomically (`write_atomically`).

    Parameters
    ----------
    path : path-like
        The file, usually `*.safetensors`.
    arrays : Mapping
        Name → array of any shape, of boolean, integer or floating-point type.
    metadata : Mapping, optional
        Text by name; the name "checksum" is reserved.
    finite : bool
        Reject NaN and infinities.
    private : bool
        Let this user alone read the file.
    durable : bool
        Flush it to the disk.

    Raises
    ------
    ValueError
        The type or a value of an array, or the metadata, is not allowed. Nothing is written in this case.
    """
    path = Path(path)
    named = {name: _array(path, name, value, finite) for name, value in arrays.items()}
    notes = dict(metadata or {})
    for key, value in notes.items():
        if not isinstance(key, str) or not isinstance(value, str) or key == CHECKSUM:
            raise ValueError(f"{path}: metadata {key!r}={value!r} must be text under a name other than {CHECKSUM!r}")
    notes[CHECKSUM] = _checksum(named, notes)
    content = save(named, metadata=notes)
    del named  # copies of arrays that are not contiguous
    write_atomically(path, *_ordered(content), private=private, durable=durable)


def load_arrays(path: str | os.PathLike[str], *, finite: bool = True) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a file written by `save_arrays`: (arrays by name, metadata).

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file is corrupt, truncated or of another format, or (unless `finite` is False) a value is not finite; the
        message names the file.
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


def _ordered(content: bytes) -> tuple[bytes, memoryview]:
    """Return the header, its metadata in name order (the library's differs), and the numbers of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the arrays stay aligned
    return len(text).to_bytes(8, "little") + text, memoryview(content)[8 + size :]


def _array(path: Path, name: str, value: ArrayLike, finite: bool) -> NDArray[Any]:
    """Return `value` as a contiguous array in native byte order; raise ValueError naming it if not allowed."""
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
