"""Arrays, images, work and answers over the wire and back, and what is refused before anything is made of it."""

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

from client.agent import agent_pb2 as pb
from client.agent import wire
from client.work import Done, Work

ROOT = Path(__file__).parents[3]
KINDS = st.sampled_from([np.dtype(name) for name in wire.DTYPES])
ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=8), hnp.arrays(KINDS, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)), max_size=4
)
SCALARS = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.dictionaries(st.text(max_size=8), SCALARS | st.lists(st.integers()) | st.lists(st.text()), max_size=4)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal names in equal order, types, shapes and bits."""

    def told(arrays: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(name, value.dtype, value.shape, value.tobytes()) for name, value in arrays.items()]

    return told(one) == told(other)


@settings(max_examples=60, deadline=None)
@given(ARRAYS, VALUES, VALUES)
def test_work_and_answers_come_back_bit_for_bit(arrays: dict[str, Any], values: Any, others: Any) -> None:
    sent = wire.work_to(Work("train", values, {"arrays": arrays, "a": {}}), 3, None)
    message = pb.Work.FromString(sent.SerializeToString())
    assert message.partition_id == 3
    assert not message.HasField("num_partitions")
    work = wire.work_from(message)
    assert (work.phase, sorted(work.records)) == ("train", ["a", "arrays"])
    assert same(dict(work.records["arrays"]), arrays)
    assert repr(work.config) == repr(values)  # 1 and 1.0 and True are told apart, all bits kept
    done = wire.done_from(pb.Done.FromString(wire.done_to(Done({"x": arrays}, values, others)).SerializeToString()))
    assert same(done.records["x"], arrays)
    assert (repr(done.metrics), repr(done.identity)) == (repr(values), repr(others))


def test_arrays_that_lie_otherwise_in_memory_come_back_the_same_and_may_be_written() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    arrays = {
        "turned": whole.transpose(2, 0, 1), "part": whole[:, ::2], "big": whole.astype(">f4"), "one": np.float32(3),
    }  # fmt: skip
    back = wire.record_from(wire.record_to(arrays))
    for name, value in arrays.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].dtype == np.float32
        back[name][...] = 0


@pytest.mark.parametrize("dtype", ["complex64", "object", "datetime64[s]", "<U3"])
def test_types_that_do_not_travel_are_named(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"array 'a' of type .*: allowed are bool, int8"):
        wire.record_to({"a": np.zeros(2, dtype)})


@pytest.mark.parametrize(
    ("array", "told"),
    [
        ({"dtype": "float32", "shape": [2], "values": bytes(7)}, r"7 bytes came, float32 of shape \[2\] has 8"),
        ({"dtype": "float32", "shape": [1 << 62, 1 << 62], "values": b""}, "0 bytes came"),
        ({"dtype": "float32", "shape": [-1, -2], "values": bytes(8)}, "none negative"),
        ({"dtype": "int8", "shape": [1] * 33, "values": b"1"}, "at most 32 sizes"),
        ({"dtype": "object", "shape": [1], "values": bytes(8)}, "of type 'object'"),
        ({"dtype": "i4,f4", "shape": [1], "values": bytes(8)}, "of type 'i4,f4'"),
        ({"dtype": "bool", "shape": [2], "values": b"\1\2"}, "truth values other than 0 and 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(array: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"array 'w'.*{told}"):
        wire.record_from(pb.Record(arrays=[pb.NamedArray(name="w", **array)]))


def test_a_name_that_occurs_twice_is_refused() -> None:
    twice = pb.Record(arrays=[wire.record_to({"w": np.zeros(1)}).arrays[0]] * 2)
    with pytest.raises(ValueError, match="array 'w' occurs twice"):
        wire.record_from(twice)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "allowed is a JSON object, not list"),
        ("{", "not JSON"),
        ('{"a": NaN}', "a = nan: allowed are finite numbers"),
        ('{"a": [1, 1e999]}', "a = inf: allowed are finite numbers"),
        ('{"a": {"b": 1}}', "a = {'b': 1}: allowed are numbers"),
        ('{"a": [[1]]}', r"a = \[1\]: allowed are numbers"),
        ('{"a": null}', "a = None: allowed are numbers"),
        ('{"a":' + "[" * 100_000, "not JSON"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"config: {told}"):
        wire.work_from(pb.Work(config_json=text))


def test_what_cannot_be_said_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="metrics: train-loss = nan"):
        wire.done_to(Done({}, {"train-loss": float("nan")}))
    with pytest.raises(ValueError, match="config: key = b'x'"):
        wire.work_to(Work("train", {"key": b"x"}))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_come_back(dtype: str) -> None:
    pixels = np.arange(24).reshape(2, 3, 2, 2).astype(dtype)[:, ::-1]
    np.testing.assert_array_equal(wire.images_from(wire.images_to(pixels)), pixels)
    assert wire.images_from(wire.images_to(pixels)).dtype == dtype
    with pytest.raises(ValueError, match="images of type float64: allowed are uint8, float32"):
        wire.images_to(pixels.astype(np.float64))


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("localhost:5000", "allowed is unix:/path"),
        ("unix:agent.sock", "allowed is unix:/path"),
        ("/agent.sock", "allowed is unix:/path"),
        ("", "allowed is unix:/path"),
        ("unix:/" + "x" * 107, "108 bytes; the path of a socket has at most 107"),
        ("unix:/" + "ü" * 60, "121 bytes"),
    ],
)
def test_addresses_of_sockets_are_checked(address: str, told: str) -> None:
    assert wire.socket_path("unix:/run/a.sock") == Path("/run/a.sock")
    with pytest.raises(ValueError, match=told):
        wire.socket_path(address)


def test_the_generated_modules_are_those_of_the_protocol() -> None:
    """Every message with its fields and numbers, and every method: who changes agent.proto must run `make proto`."""
    text = re.sub(r"//.*", "", (ROOT / "client/agent/agent.proto").read_text())
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
    assert pb.DESCRIPTOR.package == wire.VERSION


def test_the_wire_needs_no_torch() -> None:
    code = "import sys, client.agent.wire; print([n for n in ('torch', 'flwr', 'models', 'data') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
