"""Every way in which a reply can be bad, each refused with a reason, and good ones let through."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from server.validation import Expected, Limits
from tests.flower import record, reply, request

EXPECTED = Expected.like("arrays", {"w": np.zeros((2, 3), np.float32), "bn.running_var": np.ones(3, np.float32)})
GOOD = {"w": np.zeros((2, 3), np.float32), "bn.running_var": np.ones(3, np.float32)}


def test_a_good_reply() -> None:
    assert EXPECTED.why_refused(reply(record(**GOOD), 3, loss=0.5, seconds=[1.0, 2.0])) is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"w": np.zeros((3,), np.float32)}, r"w: float32\[3\], expected float32\[2, 3\]"),
        ({"w": np.zeros((1, 3), np.float32)}, r"w: float32\[1, 3\]"),
        ({"w": np.zeros((2, 3), np.float64)}, "w: float64"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "w: values that are not finite"),
        ({"w": np.full((2, 3), np.inf, np.float32)}, "not finite"),
        ({"bn.running_var": np.array([1, -1e-3, 1], np.float32)}, "bn.running_var: values from -0.001"),
        ({"extra": np.zeros(1)}, r"unknown arrays \['extra'\]"),
    ],
)
def test_bad_arrays(change: dict[str, np.ndarray], part: str) -> None:
    import re

    assert re.search(part, EXPECTED.why_refused(reply(record(**(GOOD | change)))) or "")


def test_missing_array_and_damaged_bytes() -> None:
    assert "missing arrays ['bn.running_var']" in (EXPECTED.why_refused(reply(record(w=GOOD["w"]))) or "")
    broken = record(**GOOD)
    broken["w"] = Array("float32", (2, 3), "numpy.ndarray", b"\x93NUMPY")
    assert "cannot be read" in (EXPECTED.why_refused(reply(broken)) or "")


@pytest.mark.parametrize("examples", [0, -3, math.nan, math.inf])
def test_claimed_examples_are_positive_and_finite(examples: float) -> None:
    assert "num-examples" in (EXPECTED.why_refused(reply(record(**GOOD), examples)) or "")


def test_each_client_may_claim_its_own_number_of_examples() -> None:
    replies = [reply(record(**GOOD), 5) for _ in range(3)]
    assert EXPECTED.refusals(replies) == [None] * 3
    first, second, third = EXPECTED.refusals(replies, Limits(examples=[5, 4, 9]))
    assert first is third is None
    assert second == "num-examples = 5, allowed is a finite number, more than 0, at most 4"


@pytest.mark.parametrize(("w", "bound", "good"), [(1.0, 5.0, True), (2.0, 5.0, False), (2.0, 0.0, True)])
def test_a_bound_on_the_norm_of_an_update_by_hand(w: float, bound: float, good: bool) -> None:
    """Six numbers moved by w and three by -1: the norm is √(6w² + 3), 3 or 5.196; whole numbers do not count."""
    sent = {**GOOD, "seen": np.zeros(2, np.int64)}
    moved = {"w": GOOD["w"] + w, "bn.running_var": GOOD["bn.running_var"] - 1, "seen": np.full(2, 99)}
    moved = {name: value.astype(sent[name].dtype) for name, value in moved.items()}
    (reason,) = Expected.like("arrays", sent).refusals([reply(record(**moved))], Limits(norm=bound))
    assert (reason is None) is good
    assert good or reason == "5.19615 from what was sent (l2 norm), allowed is at most 5"


@pytest.mark.parametrize(("dtype", "huge"), [("float32", 3e38), ("float64", 1.7e308)])
def test_a_norm_beyond_all_numbers_is_refused_without_a_warning(dtype: str, huge: float) -> None:
    expected = Expected.like("rates", {"a": np.full(2, -huge, dtype)})
    (reason,) = expected.refusals([reply(record(a=np.full(2, huge, dtype)), name="rates")], Limits(norm=1e9))
    assert "from what was sent" in str(reason)


def test_what_was_not_sent_has_no_norm() -> None:
    expected = Expected("statistics", {"dle": ((1,), "float64")})
    assert expected.refusals([reply(record(dle=np.ones(1)), name="statistics")], Limits(norm=1e-9)) == [None]


def test_metrics_must_be_there_once_and_finite() -> None:
    assert "metric loss" in (EXPECTED.why_refused(reply(record(**GOOD), loss=math.nan)) or "")
    assert "metric seconds" in (EXPECTED.why_refused(reply(record(**GOOD), seconds=[1.0, math.inf])) or "")
    bare = Message(RecordDict({"arrays": record(**GOOD)}), reply_to=request())
    assert "metric records []" in (EXPECTED.why_refused(bare) or "")
    without = Message(
        RecordDict({"arrays": record(**GOOD), "metrics": MetricRecord({"loss": 1.0})}), reply_to=request()
    )
    assert "num-examples = None" in (EXPECTED.why_refused(without) or "")


def test_two_array_records_or_another_name_are_refused() -> None:
    message = reply(record(**GOOD))
    message.content["more"] = record(w=np.zeros(1))
    assert "array records" in (EXPECTED.why_refused(message) or "")
    assert "array records" in (EXPECTED.why_refused(reply(record(**GOOD), name="weights")) or "")


@pytest.mark.parametrize(("dle", "good"), [(0.0, True), (1.0, True), (-1e-9, False), (1.0001, False)])
def test_a_dle_is_a_fraction(dle: float, good: bool) -> None:
    expected = Expected("statistics", {"dle": ((1,), "float64")})
    message = reply(record(dle=np.array([dle])), name="statistics")
    assert (expected.why_refused(message) is None) is good


COUNTED = Expected("", {}, ("m|s|correct", "m|s|total"), (("m|s|correct", "m|s|total"),))


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"m|s|correct": 3, "m|s|total": 4}, None),
        ({"m|s|total": 4}, "metric m|s|correct = None"),
        ({"m|s|correct": [3], "m|s|total": 4}, "metric m|s|correct = [3]"),
        ({"m|s|correct": -1, "m|s|total": 4}, "metric m|s|correct = -1"),
        ({"m|s|correct": 5, "m|s|total": 4}, "more than m|s|total = 4"),
        ({"m|s|correct": 3, "m|s|total": 4, "m|s|weight_mean": 1.5}, "expected a number from 0 to 1"),
        ({"m|s|correct": 3, "m|s|total": 4, "m|s|weight_histogram": [1, 2]}, "expected 20 counts"),
        ({"m|s|correct": 3, "m|s|total": 4, "m|s|weight_histogram": [0] * 19 + [-1]}, "expected 20 counts"),
    ],
)
def test_what_the_server_counts_with_is_there_and_possible(metrics: dict, reason: str | None) -> None:
    told = COUNTED.why_refused(reply(None, **metrics))
    assert told is None if reason is None else reason in (told or "")


def test_a_reply_without_arrays_where_none_are_expected() -> None:
    content = RecordDict({"metrics": MetricRecord({"num-examples": 1}), "c": ConfigRecord({})})
    assert Expected("", {}).why_refused(Message(content, reply_to=request())) is None
    assert Expected("", {}).why_refused(Message(RecordDict({"a": ArrayRecord()}), reply_to=request())) is not None
