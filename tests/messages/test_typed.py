"""Requests and replies: every field survives the wire, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.messages.flower import from_content, to_content
from fedtta.messages.record import Record, Typed, printable, read_values
from fedtta.messages.replies import (
    REPLIES,
    WEIGHT_BINS,
    Adapted,
    Evaluated,
    EvaluationResult,
    Identity,
    RefinedRates,
    SharedKeys,
    Summarized,
    Telemetry,
    Trained,
    Unmasked,
)
from fedtta.messages.requests import (
    REQUESTS,
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    Masking,
    Observe,
    RefineRates,
    ShareKeys,
    Summarize,
    Train,
    TrainingTask,
    Unmask,
)
from fedtta.messages.transport import Addressed, Answer, answer_of, read_answer

ABOUT: dict[str, Any] = {"settings": '{"seed": 1}', "run": "r1", "checkpoint_rounds": [1, 2]}
ONE = {"a": np.arange(4.0), "b/c": np.array(2.5)}
ROW = AdapterRow(
    "fedthe[beta=1]", "fedthe", {"beta": 1.0, "n": 3, "on": True, "name": "x", "none": None}, "personalised"
)
RESULT = EvaluationResult(
    label="a|b", shift="s", correct=1, total=2, seconds=0.5, weight_histogram=[0] * WEIGHT_BINS, weight_mean=0.25,
    metrics={"log_loss": -0.5}, estimates={"doc": [0.5, 0.25, 0.75]},
)  # fmt: skip
COUNTS: dict[str, Any] = {"num_examples": 3, "validation_total": 4, "validation_correct": 2, "seconds": 0.5}
IDENTITY = Identity(
    name="a", classes=["a", "b"], channels=3, mean=[0.5], std=[0.5], sizes=[1, 2, 3],
    shifts=["original"], note="", role="both", saved={"t": [1, 2]},
)  # fmt: skip
MASKING = Masking("s", 1, [1, 2], ["00", "ff"], 2, 5, "examples")
#: One message of each kind, with every field set.
EXAMPLES: list[Typed] = [
    Identify(**ABOUT),
    Train(
        round=1, task=TrainingTask("t"), arrays=ONE, aggregated=["a"], proximal_mu=0.5, client_metrics=[],
        masking=MASKING, **ABOUT,
    ),
    Summarize(round=2, task=TrainingTask("t", "ditto", "balanced_softmax"), arrays=ONE, wanted=["confusion"], **ABOUT),
    RefineRates(round=1, variant="params", network="n", arrays=ONE, rates=ONE, **ABOUT),
    Adapt(
        round=1, cell="c", row=ROW, share="all", network="n", arrays=ONE, shared=ONE, proximal_mu=0.5,
        send_normalization=True, send_start=True, **ABOUT,
    ),
    Evaluate(
        round=1, task=TrainingTask("t"), arrays=ONE, rows=[ROW], shifts=["s"], statistics=ONE, means_over=2,
        rates={"all": ONE, "params": {}}, **ABOUT,
    ),
    IDENTITY,
    Trained(arrays=ONE, train_loss=0.5, personal_validation_correct=1, global_loss=0.25, **COUNTS),
    Summarized(statistics=ONE, personal_validation_correct=1, **COUNTS),
    RefinedRates(rates=ONE, num_examples=3, loss=0.5, correct=2, seconds=0.5, context_bytes=7),
    Adapted(
        shared=ONE, normalization=ONE, start={}, num_examples=2, corruption=1, correct=[1], total=[2], seconds=1.0,
    ),
    Evaluated(num_examples=2, checked=2, leaked=0, results=[RESULT]),
    ShareKeys(session="s", own=1, members=[1, 2], keys=["00", "ff"], threshold=2, **ABOUT),
    Unmask(session="s", survivors=[1], shares=["00", ""], **ABOUT),
    SharedKeys(key="00", shares=["", "ff"], key_digests=["aa"], seed_digests=["bb"], seed_digest="cc"),
    Unmasked(shares=["00"]),
    Observe(**ABOUT),
    Telemetry(name="a", software={"torch": "2"}, weight=0.5, weights=[0.5, 1.0], guard_events={"noise": 1}),
]  # fmt: skip


def same(one: Any, other: Any) -> None:
    for field in dataclasses.fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_equal(yours, mine, err_msg=field.name)
        assert type(mine) is type(yours)


def test_there_is_an_example_of_each() -> None:
    assert {type(one) for one in EXAMPLES} == {*REQUESTS.values(), *REPLIES.values()}
    assert {one.reply for one in REQUESTS.values()} == set(REPLIES.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: one.kind)
def test_every_field_survives_the_plain_form_and_flowers(message: Typed) -> None:
    same(message, type(message).from_record(message.to_record()))
    same(message, type(message).from_record(from_content(message.kind, to_content(message.to_record()))))
    plain = message.to_record()
    assert json.loads(json.dumps(plain.values, allow_nan=False)) == plain.values


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: one.kind)
def test_fields_that_are_missing_unknown_or_of_another_type_are_refused(message: Typed) -> None:
    record = message.to_record()
    with pytest.raises(ValueError, match="surprise"):
        type(message).from_record(Record(record.kind, {**record.values, "surprise": 1}, record.arrays))
    with pytest.raises(ValueError, match="unknown arrays 'surprise'"):
        type(message).from_record(Record(record.kind, record.values, {**record.arrays, "surprise": ONE}))
    optional = {one.name for one in dataclasses.fields(message) if one.default is not dataclasses.MISSING}
    optional |= {one.name for one in dataclasses.fields(message) if one.default_factory is not dataclasses.MISSING}
    for key in record.values:
        for odd in ({"no": object.__name__}, [[1]]):
            with pytest.raises(ValueError, match=f"^{key}"):
                type(message).from_record(Record(record.kind, {**record.values, key: odd}, record.arrays))
        if key.replace("-", "_") not in optional:
            rest = {name: value for name, value in record.values.items() if name != key}
            with pytest.raises(ValueError, match=key):
                type(message).from_record(Record(record.kind, rest, record.arrays))
    for name in record.arrays:
        if name not in optional and "." not in name:
            rest_of = {key: one for key, one in record.arrays.items() if key != name}
            with pytest.raises(ValueError, match=rf"arrays \['{name}'\] are missing"):
                type(message).from_record(Record(record.kind, record.values, rest_of))


@pytest.mark.parametrize(
    ("reply", "changes", "told"),
    [
        (IDENTITY, {"name": "a/b"}, "name"),
        (IDENTITY, {"sizes": [1, 2]}, "sizes"),
        (IDENTITY, {"sizes": [1, 2, -3]}, "sizes"),
        (IDENTITY, {"role": "judge"}, "role"),
        (IDENTITY, {"mean": [math.inf]}, "mean"),
        (EXAMPLES[7], {"train_loss": math.nan}, "train-loss"),
        (EXAMPLES[7], {"train_loss": -1.0}, "train-loss"),
        (EXAMPLES[7], {"num_examples": 0}, "num-examples"),
        (EXAMPLES[7], {"num_examples": 2.5}, "num-examples"),
        (EXAMPLES[7], {"validation_correct": True}, "validation-correct"),
        (EXAMPLES[7], {"train_loss": 1.7e308}, "train-loss"),
        (EXAMPLES[7], {"num_examples": 2**53 + 1}, "num-examples"),
        (EXAMPLES[7], {"seconds": 1e31}, "seconds"),
        (IDENTITY, {"name": "a\n"}, "name"),
        (IDENTITY, {"classes": ["a\x1b[2J"]}, "classes"),
        (IDENTITY, {"classes": ["a" * 201]}, "classes"),
        (IDENTITY, {"channels": 65}, "channels"),
        (IDENTITY, {"mean": [0.5] * 65}, "mean"),
        (IDENTITY, {"saved": {"t": [-1]}}, "saved"),
        (IDENTITY, {"notes": [""] * 1001}, "notes"),
        (EXAMPLES[10], {"correct": [1, -1]}, "correct"),
        (EXAMPLES[11], {"leaked": -1}, "leaked"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, weight_mean=1.5)]}, "weight_mean"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, weight_histogram=[1])]}, "weight_histogram"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, total=-1)]}, "total"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, metrics={"x": math.nan})]}, "metrics"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, metrics={"at": 1.0})]}, "cannot be called at"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, metrics={"x y": 1.0})]}, "metrics"),
        (EXAMPLES[11], {"results": [dataclasses.replace(RESULT, label="a\n")]}, "label"),
    ],
)
def test_values_out_of_range_are_refused_by_name(reply: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        type(reply).from_record(dataclasses.replace(reply, **changes).to_record())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    message=st.sampled_from(EXAMPLES), values=st.dictionaries(st.text(max_size=12), JSON, max_size=4), data=st.data()
)
def test_nothing_but_a_value_error_escapes(message: Typed, values: dict[str, Any], data: st.DataObject) -> None:
    record = message.to_record()
    key = data.draw(st.sampled_from(sorted(record.values)))
    changed = {**record.values, key: data.draw(JSON)}
    for odd in (values, changed):
        try:
            found = type(message).from_record(Record(record.kind, odd, record.arrays))
        except ValueError:
            continue
        assert isinstance(found, type(message))


def test_texts_for_people_are_cut_and_lose_what_moves_a_cursor() -> None:
    odd = "caf\u00e9 \x1b[2J\u202e\n\udc80"
    assert printable(odd) == "caf\u00e9 \ufffd[2J\ufffd\ufffd\ufffd"
    assert printable("x" * 600) == "x" * 497 + "..."
    noted = dataclasses.replace(IDENTITY, note=odd[:-1], notes=["y" * 5000])
    found = Identity.from_record(noted.to_record())
    assert (found.note, len(found.notes[0])) == (printable(odd[:-1]), 4000)
    assert Answer(1, None, "failed", odd).reason == printable(odd)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "not list"), ("3", "not int"), ("{", "not JSON"), ('{"a": NaN}', "NaN"), ('{"a": -Infinity}', "-Inf"),
        ("[" * 100_000, "not JSON"), (f'{{"a": {"9" * 5000}}}', "not JSON"), (" " * (1 << 22) + "{}", "characters"),
    ],
)  # fmt: skip
def test_values_that_are_no_small_json_object_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^kind: .*{told}"):
        read_values("kind", text)
    assert read_values("kind", '{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"a" * 201: np.zeros(1)}, "200 printable characters"),
        ({"a\x1b": np.zeros(1)}, "200 printable characters"),
        (dict.fromkeys(map(str, range(100_001)), np.zeros(1)), "100001 arrays"),
    ],
)
def test_names_of_arrays_are_printable_and_not_too_many(arrays: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RefinedRates.from_record(dataclasses.replace(EXAMPLES[9], rates=arrays).to_record())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("a\x1b"), "a\ufffd"), (MemoryError("all"), "cannot be read: MemoryError: all")]
)
def test_whatever_reading_a_reply_raises_refuses_it(error: Exception, told: str) -> None:
    def read() -> Record:
        raise error

    one = Addressed(7, EXAMPLES[1])  # type: ignore[arg-type]
    assert read_answer(one, read) == Answer(7, None, "refused", told)
    assert answer_of(one, IDENTITY.to_record()).reason == "a reply of kind 'identity': allowed is 'trained'"
