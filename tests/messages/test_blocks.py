"""Blocks of arrays: what is written is read back in place, and other bytes are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedtta.messages.arrays import DTYPES, Arrays, from_block, to_block, to_bytes
from fedtta.messages.flower import BLOCK, block_record, in_blocks, read_arrays, reply_message, request_of, to_content
from tests.messages.test_flower import trained, training

ONE = to_bytes(np.arange(3, dtype=np.float32))  # 128 bytes of header, 12 of numbers


def block(index: object, *parts: bytes, end: bytes = b"") -> bytes:
    """Return a block by the format's description: length, index, and parts at multiples of 64."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    made = len(text).to_bytes(8, "little") + text
    for part in parts:
        made += bytes(-len(made) % 64) + part
    return made + bytes(-len(made) % 64) + end


#: Name → bytes of a block that is refused; "cannot be read" is in every reason.
HOSTILE = {
    "empty": b"",
    "an index that is not there": (1 << 40).to_bytes(8, "little"),
    "no JSON": block(b"[[1,"),
    "deep JSON": block(b"[" * 100_000),
    "no list": block({"w": 140}),
    "no pair": block([["w"]], ONE),
    "no name": block([[7, 140]], ONE),
    "no number": block([["w", True]], ONE),
    "a negative number": block([["w", -64]], ONE),
    "a name twice": block([["w", 140], ["w", 140]], ONE, ONE),
    "more than is there": block([["w", 1 << 40]], ONE),
    "less than the array": block([["w", 139]], ONE),
    "no array": block([["w", 64]], bytes(64)),
    "bytes after the last": block([["w", 140]], ONE, end=bytes(64)),
}

ARRAYS = st.dictionaries(
    st.text(max_size=20),
    st.builds(
        lambda dtype, shape, turned: np.ones(shape, dtype).T if turned else np.ones(shape, dtype),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=4),
        st.booleans(),
    ),
    max_size=5,
)


@given(ARRAYS)
def test_a_block_is_read_back(arrays: Arrays) -> None:
    found = from_block(to_block(arrays))
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert np.array_equal(found[name], value)
        assert not found[name].flags.writeable


def test_a_block_by_hand() -> None:
    values = {"a": np.arange(3, dtype=np.float32), "b": np.float64(2.5).reshape(())}
    assert to_block(values) == block([["a", 140], ["b", 136]], ONE, to_bytes(values["b"]))


def test_arrays_lie_in_the_blocks_memory_where_numbers_are_aligned() -> None:
    data = to_block({"a": np.ones(5, np.uint8), "b": np.ones((3, 2)), "c": np.ones(3, np.int64)})
    whole = np.frombuffer(data, np.uint8)
    for value in from_block(data).values():
        assert np.shares_memory(value, whole)
        assert value.flags.aligned


@pytest.mark.parametrize("name", HOSTILE)
def test_other_bytes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        from_block(HOSTILE[name])


def test_a_reply_travels_as_its_request_does() -> None:
    for blocks in (False, True):
        message = Message(to_content(training().to_record(), "s", blocks), dst_node_id=1, message_type="train")
        message.metadata.__dict__["_message_id"] = "m"
        assert request_of(message) == training()
        content = reply_message(trained(), message).content
        assert in_blocks(content) is blocks
        assert len(content.array_records["arrays"]) == 1
        found = read_arrays(content.array_records["arrays"])
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in trained().arrays.items()
        }


def test_a_block_beside_other_arrays_is_refused() -> None:
    record = ArrayRecord({**block_record({"w": np.ones(2)}), "v": Array(np.ones(2))})
    with pytest.raises(ValueError, match=f"array block cannot be read: made by {BLOCK!r}"):
        read_arrays(record)
    assert in_blocks(RecordDict({"arrays": record, "config": ConfigRecord()}))
