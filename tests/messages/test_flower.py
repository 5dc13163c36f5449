"""Flower arrays by reference: Flower's own in all but memory, also after they were shipped between processes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from numpy.typing import NDArray

from fedtta.messages.arrays import channels_last
from fedtta.messages.flower import (
    CONTENT,
    HeldArray,
    NodesView,
    from_content,
    held_record,
    read_arrays,
    reply_message,
    request_of,
    requests_of,
    secret_of,
    strategy_config,
    strategy_reply,
    to_content,
)
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.settings import Settings, to_json
from fedtta.strategies import FedAvg, FedProx

FLOATS = drawn.arrays("f4", drawn.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))


def described(array: Array) -> tuple[object, ...]:
    return array.dtype, array.shape, array.stype, array.data


@given(value=FLOATS, laid=st.booleans())
@example(value=np.arange(6, dtype="f4").reshape(2, 3, 1, 1), laid=True)
@example(value=np.arange(6, dtype="f4").reshape(1, 2, 1, 3), laid=True)  # lies in Fortran's order then
def test_they_are_flowers_arrays(value: NDArray, laid: bool) -> None:
    own = channels_last(value) if laid else value
    held, plain = HeldArray(own), Array(value)
    assert np.shares_memory(held.numpy(), own) or not value.size
    assert not held.numpy().flags.writeable
    assert own.flags.writeable
    assert described(held) == described(plain)
    np.testing.assert_array_equal(Array(*described(held)).numpy(), value)
    record, usual = held_record({"a": own}), ArrayRecord({"a": plain})
    assert record.object_id == usual.object_id
    assert {name: one.deflate() for name, one in record.children.items()} == {
        name: one.deflate() for name, one in usual.children.items()
    }


@given(value=FLOATS, laid=st.booleans())
def test_they_are_shipped_outside_of_the_bytes(value: NDArray, laid: bool) -> None:
    own = channels_last(value) if laid else value
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


def test_bytes_are_read_in_their_memory_and_what_is_no_array_is_refused_by_name() -> None:
    good = Array(np.arange(3.0))
    value = read_arrays(ArrayRecord({"good": good}))["good"]
    np.testing.assert_array_equal(value, np.arange(3.0))
    assert value.base is not None
    assert not value.flags.writeable
    header = good.data[:20]
    for bad in (
        Array("float64", (3,), "torch", good.data),
        Array("float64", (3,), "numpy.ndarray", b"\x93NUMPY"),
        Array("float64", (3,), "numpy.ndarray", good.data[:-1]),
        Array("float64", (3,), "numpy.ndarray", header + b"(" * 100),
    ):
        with pytest.raises(ValueError, match="array bad cannot be read"):
            read_arrays(ArrayRecord({"bad": bad}))


SETTINGS = Settings()
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}


def training(**changes: Any) -> Train:
    about = {"settings": to_json(SETTINGS), "run": "r", "round": 1, "task": TrainingTask("t"), "arrays": {}}
    return Train(**{**about, **changes})


def trained(**changes: Any) -> Trained:
    counts = {"validation_total": 4, "validation_correct": 2, "num_examples": 3}
    return Trained(**{"arrays": ARRAYS, "train_loss": 0.5, "seconds": 0.1, **counts, **changes})


@pytest.mark.parametrize(("strategy", "mu"), [(FedAvg, 0.0), (lambda **more: FedProx(0.5, **more), 0.5)])
def test_what_a_strategy_configures_is_a_request(strategy: Any, mu: float) -> None:
    """One set of arrays for all nodes; the strategy's round and μ are in it, and nothing of the settings."""
    made = strategy(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)
    config = strategy_config(training(), SETTINGS.flat())
    messages = list(made.configure_train(7, held_record(ARRAYS), config, NodesView([5, 9])))
    found = sorted(requests_of(messages), key=lambda one: one.node)  # Flower samples in random order
    assert [one.node for one in found] == [5, 9]
    for one in found:
        request = one.request
        assert isinstance(request, Train)
        assert (request.round, request.proximal_mu, request.task.training) == (7, mu, "t")
        assert request.arrays is found[0].request.arrays  # type: ignore[attr-defined]
        np.testing.assert_array_equal(request.arrays["w"], ARRAYS["w"])


def test_a_strategy_aggregates_what_was_validated() -> None:
    made = FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)
    other = {"w": ARRAYS["w"] + 4}
    replies = [
        strategy_reply(node, {"arrays": arrays}, {"num-examples": examples, "train-loss": 1.0})
        for node, arrays, examples in ((5, ARRAYS, 1), (9, other, 3))
    ]
    assert [reply.metadata.src_node_id for reply in replies] == [5, 9]
    model, _ = made.aggregate_train(1, replies)
    assert model is not None
    np.testing.assert_allclose(model["w"].numpy(), ARRAYS["w"] + 3)


@pytest.mark.parametrize(
    "content", [{}, {"x": 1}, {CONTENT: 3}, {CONTENT: "["}, {CONTENT: "[1]"}, {CONTENT: "[" * 9999}]
)
def test_records_that_are_no_message_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no trained"):
        from_content("trained", RecordDict({"config": ConfigRecord(content)}))
    with pytest.raises(ValueError, match="no trained"):
        from_content("trained", RecordDict())


def test_a_reply_repeats_the_secret_of_its_message_and_has_no_records_beside_it() -> None:
    message = Message(to_content(training().to_record(), "s3"), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "m"
    assert request_of(message) == training()
    content = reply_message(trained(), message).content
    assert secret_of(content) == "s3"
    assert from_content("trained", content).values["train-loss"] == 0.5
    content["metrics"] = MetricRecord({"surprise": 1})
    with pytest.raises(ValueError, match="no trained: it has records beside"):
        from_content("trained", content)
    assert secret_of(RecordDict()) is None
    assert secret_of(RecordDict({"config": ConfigRecord({"secret": 3})})) is None
