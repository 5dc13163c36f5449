"""Flower arrays by reference: Flower's own in all but memory, also after they were shipped between processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from numpy.typing import NDArray

from messages.held import HeldArray, held_record, hold, read
from messages.layout import as_held

FLOATS = drawn.arrays("f4", drawn.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))


def described(array: Array) -> tuple[object, ...]:
    return array.dtype, array.shape, array.stype, array.data


@given(value=FLOATS, laid=st.booleans())
@example(value=np.arange(6, dtype="f4").reshape(2, 3, 1, 1), laid=True)
@example(value=np.arange(6, dtype="f4").reshape(1, 2, 1, 3), laid=True)  # lies in Fortran's order then
def test_they_are_flowers_arrays(value: NDArray, laid: bool) -> None:
    own = as_held(value) if laid else value
    held, plain = HeldArray(own), Array(value)
    assert np.shares_memory(held.numpy(), own) or not value.size
    assert not held.numpy().flags.writeable
    assert own.flags.writeable
    assert described(held) == described(plain)
    np.testing.assert_array_equal(Array(*described(held)).numpy(), value)
    # whoever is sent one cannot tell the difference
    record, usual = held_record({"a": own}), ArrayRecord({"a": plain})
    assert record.object_id == usual.object_id
    assert {name: one.deflate() for name, one in record.children.items()} == {
        name: one.deflate() for name, one in usual.children.items()
    }


@given(value=FLOATS, laid=st.booleans())
def test_they_are_shipped_outside_of_the_bytes(value: NDArray, laid: bool) -> None:
    own = as_held(value) if laid else value
    held, buffers = HeldArray(own), []
    record = held_record({"a": own})
    assert record.object_id  # makes Flower's chunks, which no pickle may hold
    data = pickle.dumps(record, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(data, buffers=buffers)["a"]
    assert isinstance(back, HeldArray)
    assert described(back) == described(held)
    if value.size:
        assert len(buffers) == 1
        assert np.shares_memory(back.numpy(), own)
        assert back.numpy().strides == own.strides


def test_what_came_as_bytes_is_read_once_in_its_memory_and_what_cannot_be_read_stays() -> None:
    good, cut = Array(np.arange(3.0)), Array("float64", (3,), "numpy.ndarray", b"\x93NUMPY")
    foreign = Array("float64", (3,), "torch", good.data)
    content = RecordDict({"arrays": ArrayRecord({"good": good, "cut": cut, "foreign": foreign})})
    hold(content)
    record = content.array_records["arrays"]
    assert isinstance(record["good"], HeldArray)
    np.testing.assert_array_equal(record["good"].numpy(), np.arange(3.0))
    assert record["good"].numpy().base is not None
    assert (record["cut"], record["foreign"]) == (cut, foreign)
    with pytest.raises(ValueError, match="made by 'torch'"):
        read(foreign)
