"""Compressed updates: bounds on what rounding changes, what error feedback returns, and what is not read."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedtta.messages.arrays import Arrays, array_bytes, from_block
from fedtta.messages.flower import allow_messages, reply_message
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.messages.transport import Addressed, Answer, answer_of
from fedtta.messages.updates import FORMATS, LARGEST_SCALE, Format, Update, decode, encode
from fedtta.settings.schema import fields_by_key
from tests.hostile.superlink import Pushed, SuperLink, pushed
from tests.transports import Clock

EPSILON = float(np.finfo(np.float32).eps)
SENT: Arrays = {
    "weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "bias": np.zeros(3, np.float32),
    "running_var": np.full(3, 1e-6, np.float32),
}
COUNTS: dict[str, Any] = {"train_loss": 1.0, "seconds": 0.1, "validation_total": 4, "validation_correct": 1}
ROUNDING = ("float16", "int8")


def matrices(largest: float = 1e3) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, (3, 4), elements=st.floats(-largest, largest, width=32))


def moved(sent: Arrays, seed: int, size: float = 1e-2) -> Arrays:
    draw = np.random.default_rng(seed)
    return {name: (one + size * draw.standard_t(3, one.shape)).astype(one.dtype) for name, one in sent.items()}


def test_the_setting_has_every_format() -> None:
    assert fields_by_key()["update-format"].metadata["choices"] == FORMATS == get_args(Format)


@given(matrices(), matrices())
def test_int8_is_at_most_half_a_step_off(before: np.ndarray, after: np.ndarray) -> None:
    sent, trained = {"w": before}, {"w": after}
    update = encode("int8", sent, trained, {})
    found = decode("int8", sent, update.arrays, update.scales)["w"].astype(np.float64)
    change = np.abs(after.astype(np.float64) - before)
    step = change.max() / 127
    rounding = 4 * EPSILON * (np.abs(before).max() + np.abs(after).max()) + 1e-40
    assert (np.abs(found - after) <= step / 2 * (1 + 1e-3) + rounding).all()


@given(matrices(), matrices())
def test_float16_is_off_by_its_own_precision(before: np.ndarray, after: np.ndarray) -> None:
    sent, trained = {"w": before}, {"w": after}
    update = encode("float16", sent, trained, {})
    assert not update.scales
    found = decode("float16", sent, update.arrays, {})["w"].astype(np.float64)
    change = np.abs(after.astype(np.float64) - before)
    rounding = 4 * EPSILON * (np.abs(before).max() + np.abs(after).max())
    assert (np.abs(found - after) <= change * 2.0**-11 + 2.0**-25 + rounding).all()


@pytest.mark.parametrize("how", ROUNDING)
@given(st.integers(0, 2**32), st.floats(1e-6, 10))
def test_decoded_changes_and_the_last_residual_sum_to_the_true_changes(how: Format, seed: int, size: float) -> None:
    """The sums are in float64, of models; the server's model moves by what it decodes, as with a single client."""
    model, residual = dict(SENT), Arrays()
    true, told = np.zeros((3, 4)), np.zeros((3, 4))
    largest = 0.0
    for round in range(8):
        trained = moved(model, seed + round, size / (1 + round) ** 3)  # later rounds move less than is owed
        update = encode(how, model, trained, residual)
        residual = update.residual
        decoded = decode(how, model, update.arrays, update.scales)
        true += trained["weight"].astype(np.float64) - model["weight"]
        told += decoded["weight"].astype(np.float64) - model["weight"]
        largest = max(largest, *(float(np.abs(one["weight"]).max()) for one in (model, trained, decoded)))
        model = decoded
    assert set(residual) == {"weight"}
    np.testing.assert_allclose(told + residual["weight"], true, atol=8 * 8 * EPSILON * max(largest, size), rtol=0)


def test_without_error_feedback_small_changes_are_lost_and_with_it_they_arrive() -> None:
    """One number moves by 1 in each round, another by 0.003, which is less than half a step of 1/127."""
    sent, residual = {"w": np.zeros((1, 2), np.float32)}, Arrays()
    step = np.array([[1.0, 0.003]], np.float32)
    with_it = np.zeros((1, 2))
    for _ in range(100):
        update = encode("int8", sent, {"w": step}, residual)
        residual = update.residual
        with_it += decode("int8", sent, update.arrays, update.scales)["w"]
    alone = encode("int8", sent, {"w": step}, {})
    assert decode("int8", sent, alone.arrays, alone.scales)["w"][0, 1] == 0
    np.testing.assert_allclose(with_it, 100 * step, atol=1 / 127)


@pytest.mark.parametrize("how", FORMATS[1:])
def test_arrays_that_did_not_change_are_not_sent_and_those_with_one_axis_are_exact(how: Format) -> None:
    trained = {**SENT, "running_var": SENT["running_var"] * np.float32(1.0001)}
    update = encode(how, SENT, trained, {})
    assert set(update.arrays) == {"running_var"}
    found = decode(how, SENT, update.arrays, update.scales)
    assert found["weight"] is SENT["weight"]  # not copied
    assert found["running_var"].tobytes() == trained["running_var"].tobytes()
    assert list(found) == list(SENT)
    negative = {**SENT, "bias": -SENT["bias"]}  # -0 is other bits than 0
    assert set(encode(how, SENT, negative, {}).arrays) == {"bias"}
    counts = {"counts": np.array([[1, 2**40], [3, 4]])}  # whole numbers are not rounded
    update = encode(how, counts, {"counts": counts["counts"] + 300}, {})
    np.testing.assert_array_equal(decode(how, counts, update.arrays, update.scales)["counts"], counts["counts"] + 300)


@given(st.integers(0, 2**32))
def test_changed_loses_no_bit_whatever_was_trained(seed: int) -> None:
    trained = moved(SENT, seed)
    trained["bias"] = SENT["bias"]
    update = encode("changed", SENT, trained, {})
    assert (set(update.arrays), update.residual, update.scales) == ({"weight", "running_var"}, {}, {})
    found = decode("changed", SENT, update.arrays, {})
    assert {name: one.tobytes() for name, one in found.items()} == {
        name: one.tobytes() for name, one in trained.items()
    }


def test_what_is_owed_is_sent_even_if_nothing_was_trained() -> None:
    owed = {"weight": np.full((3, 4), 0.5, np.float32)}
    update = encode("int8", SENT, SENT, owed)
    found = decode("int8", SENT, update.arrays, update.scales)
    np.testing.assert_allclose(found["weight"], SENT["weight"] + 0.5, atol=1e-2)


@pytest.mark.parametrize(("how", "change"), [("float16", 1e5), ("int8", 1e33), ("int8", np.nan), ("float16", np.inf)])
def test_a_change_that_a_format_cannot_hold_is_not_sent(how: Format, change: float) -> None:
    with pytest.raises(FloatingPointError, match="weight has changed by"):
        encode(how, SENT, {"weight": SENT["weight"] + np.float32(change)}, {})


@pytest.mark.parametrize("tiny", [1e-45, 1e-44, 2.5e-43, 1e-38])  # the third is 181 of the smallest, which is the step
def test_changes_near_the_smallest_number_do_not_wrap_around(tiny: float) -> None:
    sent = {"w": np.zeros((1, 3), np.float32)}
    trained = {"w": np.array([[tiny, -tiny, 0]], np.float32)}
    update = encode("int8", sent, trained, {})
    assert all(scale > 0 for scale in update.scales.values())  # others are refused
    found = decode("int8", sent, update.arrays, update.scales)["w"]
    assert found[0, 0] >= 0 >= found[0, 1]
    assert (np.abs(found + update.residual["w"] - trained["w"]) <= np.float32(1e-45)).all()


# -- what the server reads


def answered(update_format: Format, arrays: Arrays, **fields: Any) -> Answer:
    request = Train(settings="{}", run="r", round=1, task=TrainingTask("t"), arrays=SENT, update_format=update_format)
    return answer_of(Addressed(7, request), Trained(arrays=arrays, **COUNTS, **fields).to_record())


@pytest.mark.parametrize("how", FORMATS)
def test_the_server_reads_whole_arrays_and_counts_the_bytes_that_came(how: Format) -> None:
    trained = moved(SENT, 3)
    update = encode(how, SENT, trained, {}) if how != "float32" else None
    arrays, scales = (update.arrays, update.scales or None) if update else (trained, None)
    answer = answered(how, arrays, scales=scales)
    assert isinstance(answer.reply, Trained), answer.reason
    found = answer.reply.arrays
    assert answer.reply.scales is None
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in SENT.items()
    }
    assert not any(one.flags.writeable for one in found.values())
    np.testing.assert_allclose(found["weight"], trained["weight"], atol=1e-3)
    assert answer.bytes == array_bytes(arrays) == 24 + {"float16": 24, "int8": 12}.get(how, 48)


def test_only_what_is_aggregated_comes_back() -> None:
    request = Train(
        settings="{}", run="r", round=1, task=TrainingTask("t"), arrays=SENT, aggregated=["bias"], update_format="int8"
    )
    reply = Trained(arrays={}, **COUNTS)
    assert list(request.decoded(reply).arrays) == ["bias"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="unknown arrays"):
        request.decoded(Trained(arrays={"weight": np.ones((3, 4), np.int8)}, scales={"weight": 1.0}, **COUNTS))


NUMBERS = np.ones((3, 4), np.int8)
#: name → format, arrays, scales, reason.
HOSTILE: dict[str, tuple[Format, dict[str, Any], dict[str, Any] | None, str]] = {
    "an unknown array": ("int8", {"other": NUMBERS}, {"other": 1.0}, "unknown arrays ['other']"),
    "another shape": ("int8", {"weight": NUMBERS[:2]}, {"weight": 1.0}, "weight: int8[2, 4], expected int8[3, 4]"),
    "a huge shape of no bytes": (
        "int8", {"weight": np.empty((0, 2**60), np.int8)}, {"weight": 1.0}, "expected int8[3, 4]",
    ),
    "whole numbers of another type": ("int8", {"weight": NUMBERS.astype(np.int64)}, {"weight": 1.0}, "weight: int64"),
    "float32 in place of int8": ("int8", {"weight": SENT["weight"]}, None, "weight: float32[3, 4], expected int8"),
    "int8 in place of float32": ("int8", {"bias": NUMBERS[0, :3]}, None, "bias: int8[3], expected float32[3]"),
    "another format": ("float16", {"weight": NUMBERS}, {"weight": 1.0}, "weight: int8[3, 4], expected float16"),
    "a format that was not asked for": ("float32", {**SENT}, {"weight": 1.0}, "scales: allowed with"),
    "no scale": ("int8", {"weight": NUMBERS}, None, "scales of ['weight'] are missing"),
    "a scale of nothing": ("int8", {}, {"weight": 1.0}, "unknown scales ['weight']"),
    "a scale beside float16": (
        "float16", {"weight": SENT["weight"].astype(np.float16)}, {"weight": 1.0}, "unknown scales",
    ),
    "a scale that is no number": ("int8", {"weight": NUMBERS}, {"weight": np.nan}, "weight"),
    "an infinite scale": ("int8", {"weight": NUMBERS}, {"weight": np.inf}, "weight"),
    "a scale of 1e38": ("int8", {"weight": NUMBERS}, {"weight": 1e38}, "less than or equal to 10000"),
    "a scale of zero": ("int8", {"weight": NUMBERS}, {"weight": 0.0}, "greater than 0"),
    "a negative scale": ("int8", {"weight": NUMBERS}, {"weight": -1.0}, "greater than 0"),
    "a scale that is a text": ("int8", {"weight": NUMBERS}, {"weight": "1"}, "valid number"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_an_update_that_does_not_fit_is_refused(name: str) -> None:
    how, arrays, scales, told = HOSTILE[name]
    answer = answered(how, arrays, scales=scales)
    assert (answer.kind, answer.reply, answer.bytes) == ("refused", None, 0)
    assert told in answer.reason


def test_the_largest_numbers_are_decoded_without_a_warning_and_left_to_validation() -> None:
    most = np.full((3, 4), -128, np.int8)
    assert np.isfinite(decode("int8", SENT, {"weight": most}, {"weight": LARGEST_SCALE})["weight"]).all()
    odd = np.full((3, 4), np.nan, np.float16)
    odd[0, 0] = np.inf
    assert not np.isfinite(decode("float16", SENT, {"weight": odd}, {})["weight"]).any()


@pytest.mark.parametrize("how", FORMATS)
def test_the_bytes_counted_are_those_of_flowers_own_messages(how: Format) -> None:
    """A round trip through the objects that Flower stores and sends."""
    allow_messages()
    sent = {"w": np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32), "b": np.zeros(64, np.float32)}
    request = Train(settings="{}", run="r", round=1, task=TrainingTask("t"), arrays=sent, update_format=how)
    trained = {**moved(sent, 5), "b": sent["b"]}
    update = Update(trained) if how == "float32" else encode(how, sent, trained, {})
    replies: list[Pushed] = []

    def node(message: Message) -> Pushed:
        reply = Trained(arrays=update.arrays, scales=update.scales or None, **COUNTS)
        replies.append(pushed(reply_message(reply, message)))
        return replies[-1]

    clock = Clock()
    (answer,) = GridTransport(SuperLink({1: node}).grid(), None, clock, clock.sleep).exchange(
        [Addressed(1, request)], 25.0
    )
    chunks = [one.partition(b"\0")[2] for one in replies[0].objects.values() if one.startswith(b"ArrayChunk ")]
    assert answer.bytes == sum(array.nbytes for one in chunks for array in from_block(one).values())
    assert sum(map(len, replies[0].objects.values())) < answer.bytes + 2000
    expected = trained if how == "float32" else decode(how, sent, update.arrays, update.scales)
    assert isinstance(answer.reply, Trained)
    assert {n: one.tobytes() for n, one in answer.reply.arrays.items()} == {n: o.tobytes() for n, o in expected.items()}
