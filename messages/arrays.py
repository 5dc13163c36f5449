"""Numpy arrays on the wire: as bytes of numpy's format, many in one block, or without a copy in networks' layout.

Bytes are read in place and written with one copy; `numpy.load` and `numpy.save` copy them two or three times.

Headers are read by a strict grammar. `numpy.load` evaluates them as Python expressions: bytes of a hostile sender make
it raise almost anything, allocate terabytes, or open a zip archive.

Layout: convolution weights [O, I, H, W] lie channels-last (O, H, W, I) in a client's network. Loading an array of
another layout needs a transposition, which takes three times as long as a copy. Values and shapes are the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

LAST = (0, 2, 3, 1)
FIRST = (0, 3, 1, 2)
#: An array in C order, and whether its axes are in the order LAST: what can be shipped without a copy.
Contiguous = tuple[NDArray[Any], bool]
#: Shape and type of an array.
Layout = tuple[tuple[int, ...], np.dtype[Any]]


class LazyArrays(Mapping[str, NDArray[Any]]):
    """Named arrays that are not in memory: each access returns a new copy, read-only.

    Attributes
    ----------
    layout : mapping
        name → shape and type; known without reading an array.
    """

    layout: Mapping[str, Layout]

    @abstractmethod
    def part(self, name: str, where: slice) -> NDArray[Any]:
        """Return the numbers of an array at these positions, without steps, in C order."""

    def __contains__(self, name: object) -> bool:
        return name in self.layout

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def layout_of(arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Layout]:
    """Return name → shape and type; arrays that are not in memory are not read."""
    if isinstance(arrays, LazyArrays):
        return arrays.layout
    return {name: (value.shape, value.dtype) for name, value in arrays.items()}


#: Element types of arrays that travel.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
DIMENSIONS = 32  # of an array, at most
MAGIC = b"\x93NUMPY"
HEADER_BYTES = 1024  # of an array with as many dimensions, at most
ALIGNED = 64  # bytes: where arrays in a block begin, as numbers do in numpy's format
INDEX_BYTES = 16 << 20  # of a block's names, at most
LONGEST = 200  # characters of a name in a message to people
#: Version of the format → how many bytes hold the length of the header.
LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4}
HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<|][biuf][1248])', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>|\d{1,18},|\d{1,18}(?:, \d{1,18})+)\), \} *\n"
)
#: numpy's descriptor, little-endian → type.
DESCRIPTORS = {np.dtype(name).newbyteorder("<").str: np.dtype(name).newbyteorder("<") for name in DTYPES}


def to_bytes(value: NDArray[Any]) -> bytes:
    """Return what `numpy.save` writes.

    Raises
    ------
    ValueError
        The array's type is not one of `DTYPES`, little-endian.
    """
    return b"".join((_header_of(value), _numbers_of(value)))


def _header_of(value: NDArray[Any]) -> bytes:
    """Return an array's header in numpy's format; raises as `to_bytes`."""
    if value.dtype.str not in DESCRIPTORS:
        raise ValueError(f"an array of {value.dtype} cannot be sent; allowed are {', '.join(DTYPES)}, little-endian")
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(value))
    return header.getvalue()


def _numbers_of(value: NDArray[Any]) -> memoryview:
    """Return an array's numbers in the order that its header tells; they are copied only if they are in neither."""
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    ordered = value.T if fortran else np.ascontiguousarray(value)
    return ordered.reshape(-1).view(np.uint8).data


def from_bytes(data: bytes, begin: int = 0, end: int | None = None) -> NDArray[Any]:
    """Return the array that bytes hold from `begin` to `end`, read-only and in their memory; nothing is allocated.

    Raises
    ------
    ValueError
        The bytes are not what `to_bytes` returns: another format or type, or too few or too many of them.
    """
    end = len(data) if end is None else end
    header, start = _header(data, begin, end)
    found = HEADER.fullmatch(header)
    if found is None:
        raise ValueError("no array: its header is not one that numpy writes")
    dtype = DESCRIPTORS.get(found["descr"].decode())
    if dtype is None:
        raise ValueError(f"an array of type {found['descr'].decode()!r}; allowed are {', '.join(DTYPES)}")
    shape = tuple(int(size) for size in re.findall(rb"\d+", found["shape"]))
    if len(shape) > DIMENSIONS:
        raise ValueError(f"an array of {len(shape)} dimensions; allowed are at most {DIMENSIONS}")
    count, left = math.prod(shape), end - start
    if left != count * dtype.itemsize:
        raise ValueError(f"{left} bytes for {count} numbers of {dtype}")
    if dtype == np.bool_ and data[start:end].strip(b"\0\1"):
        raise ValueError("truth values other than 0 and 1")
    value = np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype)
    value.flags.writeable = False
    return value.reshape(shape, order="F" if found["fortran"] == b"True" else "C")


def _header(data: bytes, begin: int, end: int) -> tuple[bytes, int]:
    """Return the header of bytes in numpy's format, and where the numbers start."""
    size = LENGTHS.get(data[begin + 6 : begin + 8], 0)
    if not data.startswith(MAGIC, begin, end) or not size:
        raise ValueError("no array: it does not begin as versions 1.0 and 2.0 of numpy's format do")
    start = begin + 8 + size
    length = int.from_bytes(data[begin + 8 : start], "little")
    if length > HEADER_BYTES or end < start + length:
        raise ValueError(f"no array: a header of {length} bytes; allowed are at most {HEADER_BYTES}, and all are there")
    return data[start : start + length], start + length


def to_block(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return named arrays as one block: the length of an index, the index (names and lengths as JSON), the arrays.

    Raises
    ------
    ValueError
        As `to_bytes`.
    """
    headers = {name: _header_of(value) for name, value in arrays.items()}
    sizes = {name: len(headers[name]) + value.nbytes for name, value in arrays.items()}
    index = json.dumps(list(sizes.items())).encode()
    block = io.BytesIO()  # one array after the other, so that there is one copy of a large network, not two
    block.write(len(index).to_bytes(8, "little") + index + bytes(-(8 + len(index)) % ALIGNED))
    for name, value in arrays.items():
        block.write(headers[name])
        block.write(_numbers_of(value))
        block.write(bytes(-sizes[name] % ALIGNED))
    return block.getvalue()


def from_block(data: bytes) -> Arrays:
    """Return the arrays of a block, read-only and in its memory.

    Raises
    ------
    ValueError
        The bytes are not what `to_block` returns; the message names the array that cannot be read.
    """
    unreadable = "the arrays cannot be read"
    length = int.from_bytes(data[:8], "little")
    if length > INDEX_BYTES or 8 + length > len(data):
        raise ValueError(
            f"{unreadable}: an index of {length} bytes; allowed are {INDEX_BYTES} at most, and all of them"
        )
    try:
        index = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{unreadable}: the index is not JSON: {error}") from error
    arrays: Arrays = {}
    start = 8 + length
    for entry in index if isinstance(index, list) else [index]:
        name, size = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(name, str) or type(size) is not int or size < 0 or name in arrays:
            raise ValueError(f"{unreadable}: allowed in the index are different names, each with a number of bytes")
        start += -start % ALIGNED
        if start + size > len(data):
            raise ValueError(f"array {name[:LONGEST]} cannot be read: {size} bytes, of which not all are there")
        try:
            arrays[name] = from_bytes(data, start, start + size)
        except ValueError as error:
            raise ValueError(f"array {name[:LONGEST]} cannot be read: {error}") from error
        start += size
    if len(data) - start >= ALIGNED:
        raise ValueError(f"{unreadable}: {len(data) - start} bytes after the last one")
    return arrays


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
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout_of(arrays).values())


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and bytes, in name order.

    It does not depend on the order of the mapping, the layout in memory, or the machine's byte order.
    """
    total = hashlib.sha256()
    for name in sorted(arrays):
        value = np.asarray(arrays[name])
        value = np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C")
        total.update(repr((name, value.dtype.name, value.shape)).encode())
        total.update(value.tobytes())
    return total.hexdigest()
