"""Arrays of replies on disk: what a server has in memory does not grow with the number of clients.

The arrays of a round's first replies stay in memory, up to a number of bytes; those of the others go to a file and are
read at each access, in the memory layout that they had. They are read by `preadv` and not mapped: mapped pages count as
memory of the process. The file has no name, so nothing is left behind when the process is killed, and it goes with the
last mapping that reads from it, at the end of the round.

What changes a reply's arrays (`fedtta.strategies.limits`) leaves those as they are and puts others over them, in the
same file: `blank`, `put` and `Overlaid`.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import FIRST, LAST, Arrays, Layout, LazyArrays, array_bytes, contiguous, layout_of, restored

#: Bytes of arrays of a round's replies that stay in memory.
IN_MEMORY = 32 << 20


class StoreError(OSError):
    """The arrays of a round's replies could not be written."""


class ArrayFile:
    """A file without a name, to which arrays are added.

    Parameters
    ----------
    folder : Path or None
        A folder on its disk; None: that of temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._end = folder or Path(tempfile.gettempdir()), 0
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed with this object)
        except OSError as error:
            raise StoreError(f"no file for replies can be made in {self._folder}: {error.strerror}") from error
        weakref.finalize(self, self._file.close)

    def allocate(self, size: int) -> int:
        """Return the position of `size` more bytes."""
        self._end += size
        return self._end - size

    def write(self, position: int, value: NDArray[Any]) -> None:
        """Write an array in C order.

        Raises
        ------
        StoreError
            It could not be written: the disk is full, for instance. The message names the folder.
        """
        left = value.reshape(-1).view(np.uint8).data
        try:
            while left:
                written = os.pwrite(self._file.fileno(), left, position)
                position, left = position + written, left[written:]
        except OSError as error:
            what = f"the replies of this round, {self._end:,} bytes so far, could not be written to {self._folder}"
            raise StoreError(f"{what}: {error.strerror}") from error

    def read(self, position: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array in C order, read-only.

        Raises
        ------
        OSError
            It could not be read, or the file has been cut.
        """
        value = np.empty(shape, dtype)
        left = value.reshape(-1).view(np.uint8).data
        while left:
            count = os.preadv(self._file.fileno(), [left], position)
            if not count:
                raise OSError(f"the replies of this round in {self._folder} end at byte {position:,} of {self._end:,}")
            position, left = position + count, left[count:]
        value.flags.writeable = False
        return value


@dataclass(frozen=True)
class _Place:
    """Where an array is in the file: its shape there, and whether its axes are in the order LAST."""

    position: int
    shape: tuple[int, ...]
    turned: bool


class StoredArrays(LazyArrays):
    """Named arrays in a file.

    Parameters
    ----------
    file : ArrayFile
    """

    def __init__(self, file: ArrayFile) -> None:
        self.file = file
        self.layout: dict[str, Layout] = {}
        self._places: dict[str, _Place] = {}

    def add(self, name: str, layout: Layout, turned: bool = False) -> None:
        """Make room for an array."""
        shape, dtype = layout
        inside = tuple(shape[axis] for axis in LAST) if turned else shape
        self.layout[name] = layout
        self._places[name] = _Place(self.file.allocate(math.prod(shape) * dtype.itemsize), inside, turned)

    def __getitem__(self, name: str) -> NDArray[Any]:
        place = self._places[name]
        return restored(self.file.read(place.position, place.shape, self.layout[name][1]), place.turned)

    def write(self, name: str, value: NDArray[Any], start: int = 0) -> None:
        """Write numbers in the file's order, from a position in the array on; see `ArrayFile.write`."""
        self.file.write(self._places[name].position + start * value.itemsize, value)

    def part(self, name: str, where: slice) -> NDArray[Any]:
        """See `LazyArrays.part`."""
        place, (shape, dtype) = self._places[name], self.layout[name]
        start, stop, _ = where.indices(math.prod(shape))
        if not place.turned:
            return self.file.read(place.position + start * dtype.itemsize, (max(0, stop - start),), dtype)
        row = max(1, math.prod(shape[1:]))  # rows of the first axis are in one piece in both orders of the others
        first, last = start // row, -(-stop // row)
        position = place.position + first * row * dtype.itemsize
        rows = self.file.read(position, (last - first, *place.shape[1:]), dtype).transpose(FIRST)
        return rows.reshape(-1)[start - first * row : stop - first * row]


class Overlaid(LazyArrays):
    """Named arrays of which some are replaced by others of the same shapes and types.

    Parameters
    ----------
    base : mapping
    over : mapping
        The others.
    """

    def __init__(self, base: Mapping[str, NDArray[Any]], over: Mapping[str, NDArray[Any]]) -> None:
        self.layout = layout_of(base)
        self._sources: dict[str, Mapping[str, NDArray[Any]]] = dict.fromkeys(base, base)
        if isinstance(base, Overlaid):  # what is changed again and again is looked up once
            self._sources |= base._sources
        self._sources |= dict.fromkeys(over, over)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._sources[name][name]

    def part(self, name: str, where: slice) -> NDArray[Any]:
        """See `LazyArrays.part`."""
        return part(self._sources[name], name, where)


def overlaid(base: Mapping[str, NDArray[Any]], over: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Return named arrays of which some are replaced by others; see `Overlaid`."""
    if isinstance(base, LazyArrays) or isinstance(over, LazyArrays):
        return Overlaid(base, over)
    return {**base, **over}


def part(arrays: Mapping[str, NDArray[Any]], name: str, where: slice) -> NDArray[Any]:
    """Return the numbers of an array at these positions, in C order."""
    return arrays.part(name, where) if isinstance(arrays, LazyArrays) else np.ravel(arrays[name])[where]


def blank(arrays: Mapping[str, NDArray[Any]], names: Iterable[str]) -> Arrays | StoredArrays:
    """Return room for arrays of these names and layouts: in the file that has the others, or in memory."""
    layout = layout_of(arrays)
    sources = arrays._sources.values() if isinstance(arrays, Overlaid) else (arrays,)
    stored = next((one for one in sources if isinstance(one, StoredArrays)), None)
    if stored is None:
        return {name: np.empty(*layout[name]) for name in names}
    made = StoredArrays(stored.file)
    for name in names:
        made.add(name, layout[name])
    return made


def put(arrays: Arrays | StoredArrays, name: str, where: slice, numbers: NDArray[Any]) -> None:
    """Write numbers to these positions of an array that `blank` has made, in its type."""
    if isinstance(arrays, StoredArrays):
        arrays.write(name, np.ascontiguousarray(numbers, arrays.layout[name][1]), where.start)
    else:
        arrays[name].reshape(-1)[where] = numbers


class Store:
    """The arrays of a round's replies.

    Parameters
    ----------
    folder : Path or None
        See `ArrayFile`.
    in_memory : int
        Bytes of arrays that stay in memory.
    """

    def __init__(self, folder: Path | None, in_memory: int = IN_MEMORY) -> None:
        self._folder, self._left = folder, in_memory
        self._file: ArrayFile | None = None

    def keep(self, arrays: Arrays) -> Arrays | StoredArrays:
        """Return arrays as they are while there is room for them in memory, and in a file otherwise.

        Raises
        ------
        StoreError
            As `ArrayFile.write`.
        """
        size = array_bytes(arrays)
        if size <= self._left:
            self._left -= size
            return arrays
        self._file = self._file or ArrayFile(self._folder)
        stored = StoredArrays(self._file)
        for name, value in arrays.items():
            ordered, turned = contiguous(value)
            stored.add(name, (value.shape, value.dtype), turned)
            stored.write(name, ordered)
        return stored
