"""Arrays in a file: what is read is what was written, in any layout and in any part; disks that are full or damaged."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtta.messages.arrays import DTYPES, channels_last, layout_of
from fedtta.messages.flower import held_record, lazy_arrays, read_arrays
from fedtta.messages.store import Overlaid, Store, StoredArrays, StoreError, blank, overlaid, part, put

LAYOUTS: dict[str, Any] = {
    "C": np.ascontiguousarray,
    "channels last": channels_last,
    "Fortran": np.asfortranarray,
    "strided": lambda value: np.repeat(value, 2, axis=0)[::2] if value.ndim else value,
}


def stored(folder: Path | None = None, **arrays: NDArray[Any]) -> StoredArrays:
    """Arrays of which none has room in memory."""
    kept = Store(folder, 0).keep(arrays)
    assert isinstance(kept, StoredArrays)
    return kept


def numbers(shape: tuple[int, ...], dtype: str = "float32") -> NDArray[Any]:
    """Different numbers, none of them zero."""
    return (np.arange(math.prod(shape)) % 100 + 1).reshape(shape).astype(dtype)


def files(folder: Path) -> list[str]:
    """The nameless files of a folder that this process has open."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder of file descriptors itself
            found.append(str(one.readlink()))
    return [target for target in found if target.startswith(str(folder))]


@examples(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=5).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(list(LAYOUTS)),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_every_array_comes_back_whole_and_in_parts(
    shape: tuple[int, ...], dtype: str, layout: str, left: int, more: int
) -> None:
    value = LAYOUTS[layout](numbers(shape, dtype)) if 0 not in shape else numbers(shape, dtype)
    arrays = stored(before=np.ones(3), a=value, after=np.ones(3))
    found = arrays["a"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    assert not found.flags.writeable
    if layout == "channels last":
        assert found.strides == value.strides, "loading another layout into a network takes three times as long"
    where = slice(left, min(left + more, value.size))
    assert arrays.part("a", where).tobytes() == value.ravel()[where].tobytes()
    assert part({"a": value}, "a", where).tobytes() == value.ravel()[where].tobytes()


def test_shapes_and_names_are_known_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = stored(b=numbers((2, 3)), a=numbers((4,), "int64"))
    monkeypatch.setattr(os, "preadv", None)
    assert (list(arrays), len(arrays), "a" in arrays, "c" in arrays) == (["b", "a"], 2, True, False)
    assert layout_of(arrays) == {"b": ((2, 3), np.float32), "a": ((4,), np.int64)}
    record = held_record(arrays)
    assert [(name, one.dtype, one.shape) for name, one in record.items()] == [
        ("b", "float32", (2, 3)),
        ("a", "int64", (4,)),
    ]
    assert lazy_arrays(record) is arrays
    assert lazy_arrays(held_record({"a": np.ones(2)})) is None
    with pytest.raises(TypeError):
        arrays["a"]


def test_a_record_reads_when_it_is_asked() -> None:
    arrays = stored(a=channels_last(numbers((2, 3, 4, 5))))
    record = held_record(arrays)
    assert read_arrays(record)["a"].tobytes() == arrays["a"].tobytes()
    assert np.array_equal(type(record["a"]).__mro__[2](arrays["a"]).numpy(), arrays["a"]), "its bytes are Flower's"
    del record["a"]
    record["b"] = held_record(arrays)["a"]
    assert lazy_arrays(record) is None, "under other names it is another record"
    del arrays
    with pytest.raises(ValueError, match="array a is of a reply that is gone"):
        record["b"].numpy()


def test_the_first_arrays_stay_in_memory_and_the_file_goes_with_the_last_of_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path, 100)
    small = {"a": np.ones(10)}
    assert store.keep(small) is small
    assert not files(tmp_path), "no file without need"
    other, third = store.keep(small), store.keep({"a": np.ones(2)})
    assert isinstance(other, StoredArrays)
    assert isinstance(third, dict), "20 bytes were left"
    assert list(tmp_path.iterdir()) == [], "a killed process leaves nothing"
    assert len(files(tmp_path)) == 1
    del store
    assert len(files(tmp_path)) == 1
    np.testing.assert_array_equal(other["a"], small["a"])
    del other
    assert not files(tmp_path)


def test_changed_arrays_are_over_those_below_which_stay(tmp_path: Path) -> None:
    base = stored(tmp_path, a=channels_last(numbers((2, 3, 2, 2))), b=numbers((5,)), c=numbers((2,)))
    over = blank(base, ["a", "b"])
    assert isinstance(over, StoredArrays)
    put(over, "a", slice(0, 24), np.full(24, 0.1))
    put(over, "b", slice(0, 2), np.zeros(2))
    put(over, "b", slice(2, 5), np.full(3, 7.0))
    once = overlaid(base, over)
    twice = overlaid(once, {"b": np.full(5, 9, np.float32)})
    assert isinstance(twice, Overlaid)
    assert list(once) == list(twice) == ["a", "b", "c"]
    assert (once["b"].tolist(), twice["b"].tolist()) == ([0, 0, 7, 7, 7], [9] * 5)
    assert (once["a"] == np.float32(0.1)).all(), "in the array's type"
    assert once.part("b", slice(1, 3)).tolist() == [0, 7]  # type: ignore[attr-defined]
    assert twice.part("b", slice(1, 3)).tolist() == [9, 9]
    assert base["b"].tolist() == [1, 2, 3, 4, 5]
    assert isinstance(blank(twice, ["c"]), StoredArrays), "in the same file"
    plain = overlaid({"a": np.ones(2), "b": np.ones(1)}, {"a": np.zeros(2)})
    assert isinstance(plain, dict)
    assert plain["a"].tolist() == [0, 0]
    room = blank(plain, ["b"])
    put(room, "b", slice(0, 1), np.full(1, 3.0))
    assert isinstance(room, dict)
    assert room["b"].tolist() == [3]


def test_a_disk_that_takes_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: write(file, data[:7], position))
    monkeypatch.setattr(os, "preadv", lambda file, parts, position: read(file, [parts[0][:5]], position))
    value = numbers((3, 4))
    np.testing.assert_array_equal(stored(a=value)["a"], value)


def test_a_full_disk_and_a_damaged_file_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = stored(tmp_path, a=numbers((100,)))
    os.ftruncate(arrays.file._file.fileno(), 40)
    with pytest.raises(OSError, match=rf"replies of this round in {tmp_path} end at byte 40 of 400"):
        arrays["a"]
    assert arrays.part("a", slice(0, 10)).tolist() == list(range(1, 11))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=rf"replies of this round, 24 bytes so far, .* to {tmp_path}: No space left"):
        stored(tmp_path, a=np.ones(3))
    with pytest.raises(StoreError, match=r"no file for replies can be made in .*/absent: No such file"):
        stored(tmp_path / "absent", a=np.ones(3))
    del arrays
    assert not files(tmp_path)
