"""Arrays on the wire: numpy's own bytes, bytes that are no array, and layouts that ship without a copy."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from numpy.typing import NDArray

from fedtta.messages.arrays import channels_last, from_bytes, packed, to_bytes, unpacked
from fedtta.models import build

ANY = drawn.arrays(
    st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]),
    drawn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


def saved(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=False)
    return stream.getvalue()


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    return stream.getvalue()


@given(ANY, st.sampled_from(["C", "F", "turned", "strided"]))
def test_the_bytes_are_numpys(value: np.ndarray, order: str) -> None:
    if order == "turned":
        value = np.moveaxis(value, 0, -1) if value.ndim else value
    elif order == "strided":
        value = value[::-1] if value.ndim else value
    else:
        value = np.asarray(value, order=order)  # type: ignore[call-overload]
    data = to_bytes(value)
    assert data == saved(value)
    back = from_bytes(data)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()
    assert back.flags.f_contiguous == np.load(io.BytesIO(data)).flags.f_contiguous


def test_read_in_place() -> None:
    data = to_bytes(np.arange(10.0))
    assert np.shares_memory(from_bytes(data), np.frombuffer(data, np.uint8))
    assert not from_bytes(data).flags.writeable


def written(header: str, data: bytes = bytes(24), version: bytes = b"\x01\x00", size: int | None = None) -> bytes:
    """Bytes in numpy's format with any header."""
    length = 2 if version == b"\x01\x00" else 4
    text = header.encode()
    return b"\x93NUMPY" + version + (len(text) if size is None else size).to_bytes(length, "little") + text + data


def header(descr: str = "'<f8'", fortran: str = "False", shape: str = "(3,)", end: str = ", }\n") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}{end}"


HOSTILE = {
    "nothing": b"",
    "a zip archive": b"PK\x03\x04 nonsense",
    "an npz file": zipped(),
    "half a header": to_bytes(np.arange(3.0))[:20],
    "a byte too few": to_bytes(np.arange(3.0))[:-1],
    "a byte too many": to_bytes(np.arange(3.0)) + b"x",
    "version 3": written(header(), version=b"\x03\x00"),
    "a header beyond the end": written(header(), size=60_000),
    "a header of 4 GB": written(header(), version=b"\x02\x00", size=2**32 - 1),
    "nested parentheses": written("(" * 900),
    "a nested shape": written(header(shape="(" * 400 + "3," + ")" * 400)),
    "a huge shape": written(header(shape="(999999999999999999, 999999999999999999)")),
    "eight terabytes": written(header(shape="(1099511627776,)")),
    "a huge shape without numbers": written(header(shape="(0, 999999999999999999, 999999999999999999)"), b""),
    "a negative size": written(header(shape="(-3,)")),
    "a size of many digits": written(header(shape=f"({'9' * 500},)")),
    "33 dimensions": written(header(shape=f"({', '.join(['1'] * 33)})"), bytes(8)),
    "Python objects": written(header("'|O'")),
    "a record type": written(header("[('a', '<f8')]")),
    "texts": written(header("'<U2'")),
    "another byte order": written(header("'>f8'")),
    "a type of no such size": written(header("'<f1'")),
    "an expression": written("__import__('os').system('true')\n"),
    "another end": written(header(end=", 'more': 1, }\n")),
    "truth values of 2": written(header("'|b1'"), b"\x02\x00\x01"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_array_is_refused_before_anything_is_allocated(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"array|bytes for|truth values"):
        from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_is_read_with_both_versions_and_what_cannot_be_sent() -> None:
    for version in (b"\x01\x00", b"\x02\x00"):
        np.testing.assert_array_equal(from_bytes(written(header(), version=version)), np.zeros(3))
    assert from_bytes(written(header(shape="()"), bytes(8))).shape == ()
    for value in (np.array([{}]), np.array(["a"]), np.zeros(2, ">f4")):
        with pytest.raises(ValueError, match="cannot be sent"):
            to_bytes(value)


@given(st.binary(max_size=200), st.integers(0, 150), st.integers(0, 20))
def test_nothing_but_a_value_error_escapes(noise: bytes, start: int, length: int) -> None:
    """Bytes at random, and an array some of whose bytes are replaced."""
    good = to_bytes(np.arange(3.0))
    for data in (noise, good[:start] + noise[:length] + good[start + length :]):
        try:
            value = from_bytes(data)
        except ValueError:
            continue
        assert value.nbytes <= len(data)


ARRAYS = st.sampled_from(["f4", "f8", "i8"]).flatmap(
    lambda kind: drawn.arrays(kind, drawn.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
)


@given(value=ARRAYS, held=st.booleans(), order=st.sampled_from("CF"))
def test_what_is_unpacked_has_the_values_that_were_packed(value: NDArray, held: bool, order: str) -> None:
    given_value = np.asarray(value, order=order)
    given_value = channels_last(given_value) if held else given_value
    (sent, _) = packed({"a": given_value})["a"]
    assert sent.flags.c_contiguous
    back = unpacked(packed({"a": given_value}))["a"]
    assert (back.shape, back.dtype) == (value.shape, value.dtype)
    np.testing.assert_array_equal(back, value)


@given(value=ARRAYS)
def test_arrays_as_networks_hold_them_are_packed_without_a_copy(value: NDArray) -> None:
    held = channels_last(value)
    if value.size:
        assert np.shares_memory(unpacked(packed({"a": held}))["a"], held)


def test_it_is_the_order_of_a_client_s_network() -> None:
    network = build("cnn", 10, seed=0).to(memory_format=torch.channels_last)
    for name, value in network.global_state().items():
        own = value.numpy()
        assert np.shares_memory(channels_last(own), own), name
