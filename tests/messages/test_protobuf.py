"""Messages in plain form and images as protobuf and back; malformed ones are refused before memory is allocated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.record import Record

ROOT = Path(__file__).parents[2]
KINDS = st.sampled_from([np.dtype(name) for name in protobuf.DTYPES])
ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=8), hnp.arrays(KINDS, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)), max_size=4
)
SCALARS = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.dictionaries(
    st.text(max_size=8),
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6),
    max_size=4,
)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal names in equal order, types, shapes and bits."""

    def listed(arrays: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(name, value.dtype, value.shape, value.tobytes()) for name, value in arrays.items()]

    return listed(one) == listed(other)


@settings(max_examples=60, deadline=None)
@given(ARRAYS, VALUES)
def test_requests_and_replies_come_back_bit_for_bit(arrays: dict[str, Any], values: Any) -> None:
    record = Record("train", values, {"arrays": arrays, "a": {}})
    message = pb.Work.FromString(protobuf.to_work(record, "site-a").SerializeToString())
    assert message.name == "site-a"
    done = pb.Done.FromString(protobuf.to_done(record).SerializeToString())
    for back in (protobuf.from_work(message), protobuf.from_done("train", done)):
        assert (back.kind, sorted(back.arrays)) == ("train", ["a", "arrays"])
        assert same(back.arrays["arrays"], arrays)
        assert repr(back.values) == repr(values)  # 1, 1.0 and True are told apart, and all bits are kept


def test_arrays_of_any_memory_layout_come_back_read_only() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    arrays = {
        "turned": whole.transpose(2, 0, 1), "part": whole[:, ::2], "big": whole.astype(">f4"), "one": np.float32(3),
    }  # fmt: skip
    back = protobuf.from_record(protobuf.to_record(arrays))
    for name, value in arrays.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].dtype == np.float32
        assert not back[name].flags.writeable


@pytest.mark.parametrize("dtype", ["complex64", "object", "datetime64[s]", "<U3"])
def test_types_that_cannot_be_sent_are_named(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"array 'a' of type .*: allowed are bool, int8"):
        protobuf.to_record({"a": np.zeros(2, dtype)})


@pytest.mark.parametrize(
    ("array", "told"),
    [
        ({"dtype": "float32", "shape": [2], "values": bytes(7)}, r"7 bytes, but float32 of shape \[2\] has 8"),
        ({"dtype": "float32", "shape": [1 << 62, 1 << 62], "values": b""}, "0 bytes, but"),
        ({"dtype": "float32", "shape": [-1, -2], "values": bytes(8)}, "none negative"),
        ({"dtype": "int8", "shape": [1] * 33, "values": b"1"}, "at most 32 sizes"),
        ({"dtype": "object", "shape": [1], "values": bytes(8)}, "of type 'object'"),
        ({"dtype": "i4,f4", "shape": [1], "values": bytes(8)}, "of type 'i4,f4'"),
        ({"dtype": "bool", "shape": [2], "values": b"\1\2"}, "truth values other than 0 and 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(array: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"array 'w'.*{told}"):
        protobuf.from_record(pb.Record(arrays=[pb.NamedArray(name="w", **array)]))


def test_a_name_that_occurs_twice_is_refused() -> None:
    twice = pb.Record(arrays=[protobuf.to_record({"w": np.zeros(1)}).arrays[0]] * 2)
    with pytest.raises(ValueError, match="array 'w' occurs twice"):
        protobuf.from_record(twice)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "allowed is a JSON object, not list"),
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN: allowed are finite numbers"),
        ('{"a": -Infinity}', "-Infinity: allowed are finite numbers"),
        ('{"a":' + "[" * 100_000, "not JSON"),
    ],
)
def test_malformed_values_are_refused_with_the_kind_of_message(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"train: .*{told}"):
        protobuf.from_work(pb.Work(phase="train", config_json=text))
    with pytest.raises(ValueError, match=f"trained: .*{told}"):
        protobuf.from_done("trained", pb.Done(metrics_json=text))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {1}])
def test_values_that_cannot_be_sent_are_refused_by_the_sender(value: Any) -> None:
    for send in (protobuf.to_work, protobuf.to_done):
        with pytest.raises(ValueError, match="train: a value cannot be sent"):
            send(Record("train", {"loss": value}))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_come_back(dtype: str) -> None:
    pixels = np.arange(24).reshape(2, 3, 2, 2).astype(dtype)[:, ::-1]
    np.testing.assert_array_equal(protobuf.from_images(protobuf.to_images(pixels)), pixels)
    assert protobuf.from_images(protobuf.to_images(pixels)).dtype == dtype
    with pytest.raises(ValueError, match="images of type float64: allowed are uint8, float32"):
        protobuf.to_images(pixels.astype(np.float64))


def test_the_generated_modules_are_those_of_the_protocol() -> None:
    """Every message with its fields and numbers, and every method: after a change of agent.proto run `make proto`."""
    text = re.sub(r"//.*", "", (ROOT / "messages/agent.proto").read_text())
    messages = {m[1]: m[2] for m in re.finditer(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text)}
    generated = pb.DESCRIPTOR.message_types_by_name
    assert set(messages) == set(generated)
    for name, body in messages.items():
        fields = re.findall(r"(\w+) = (\d+);", re.sub(r"enum \w+ \{[^}]*\}", "", body))
        assert {(field, int(number)) for field, number in fields} == {
            (f.name, f.number) for f in generated[name].fields
        }
    methods = {m[1]: set(re.findall(r"rpc (\w+)", m[2])) for m in re.finditer(r"service (\w+) \{([^}]*)\}", text)}
    services = pb.DESCRIPTOR.services_by_name
    assert methods == {name: {m.name for m in one.methods} for name, one in services.items()}
    assert pb.DESCRIPTOR.package == protobuf.PROTOCOL


def test_neither_torch_nor_flower_is_imported() -> None:
    heavy = ("torch", "flwr", "fedtta.models", "fedtta.data")
    code = f"import sys, fedtta.messages.protobuf; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
