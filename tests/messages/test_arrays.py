"""Arrays on the wire: numpy's own bytes, bytes that are no array, and layouts that ship without a copy."""

from __future__ import annotations

import io

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
    st.sampled_from([np.float32, np.float64, np.int64, np.bool_, ">f4"]),
    drawn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


def saved(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=False)
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


def test_what_is_no_array() -> None:
    good = to_bytes(np.arange(3.0))
    with pytest.raises(ValueError, match="16 bytes for 3 numbers of float64"):
        from_bytes(good[:-8])
    with pytest.raises(ValueError, match="25 bytes"):
        from_bytes(good + b"x")
    for bad in (b"", b"PK nonsense", good[:20]):
        with pytest.raises(ValueError, match=r"EOF|magic|header|read"):
            from_bytes(bad)
    with pytest.raises(ValueError, match="Python objects cannot be sent"):
        to_bytes(np.array([{}]))
    stream = io.BytesIO()
    np.save(stream, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="is not read"):
        from_bytes(stream.getvalue())


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
