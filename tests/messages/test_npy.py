"""numpy's own bytes, and bytes that are none."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from messages.npy import from_bytes, to_bytes

ANY = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.bool_, ">f4"]),
    arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
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
