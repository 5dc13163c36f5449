"""Every way in which a reply can be bad, each refused with a reason, and good ones accepted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import (
    Adapted,
    Evaluated,
    EvaluationResult,
    Identity,
    RefinedRates,
    Reply,
    Summarized,
    Trained,
)
from fedtta.server.validation import AdaptCheck, Check, EvaluateCheck, RatesCheck, SummarizeCheck, TrainCheck, shapes_of

MODEL: Arrays = {"w": np.zeros((2, 3), np.float32), "bn.running_var": np.ones(3, np.float32)}
COUNTS: dict[str, Any] = {"validation_total": 4, "validation_correct": 1, "seconds": 0.1}
TRAINED = Trained(arrays=MODEL, train_loss=1.0, **COUNTS)
SUMMARIZED = Summarized(statistics={"dle": np.ones(1)}, **COUNTS)
RATES = RefinedRates(rates={"a": np.float64(0.5)}, loss=1.0, correct=3, num_examples=4, seconds=0.1)
RESULT = EvaluationResult(
    label="btfl", shift="fog", correct=3, total=4, seconds=0.1, weight_histogram=[4] + [0] * 19, weight_mean=0.5
)
EVALUATED = Evaluated(checked=4, leaked=0, results=[RESULT])
SHARED: Arrays = {"gamma": np.ones(2, np.float32), "bn.running_var": np.ones(2, np.float32)}
ADAPTED = Adapted(shared=SHARED, corruption=3, correct=[1, 0, 2], total=[2, 0, 3], num_examples=5, seconds=0.5)
CHECKS: dict[type[Reply], Check] = {
    Trained: TrainCheck(MODEL),
    Summarized: SummarizeCheck(shapes_of(SUMMARIZED.statistics)),
    RefinedRates: RatesCheck(RATES.rates),
    Evaluated: EvaluateCheck([("btfl", "fog")]),
    Adapted: AdaptCheck(classes=3, corruptions=15),
}
GOOD: list[Any] = [TRAINED, SUMMARIZED, RATES, EVALUATED, ADAPTED]


def refused(
    check: Check,
    *replies: Reply,
    examples: int | Sequence[int] = 99,
    norm: float = 0.0,
    labelled: Sequence[bool] | bool = True,
) -> list[str | None]:
    """Why each reply is refused, alone or among those that are good alone, as in a round."""
    bounds = [examples] * len(replies) if isinstance(examples, int) else examples
    known = [labelled] * len(replies) if isinstance(labelled, bool) else labelled
    found = [check.alone(one, bounds[i], norm, known[i]) for i, one in enumerate(replies)]
    good = [i for i, (reason, _) in enumerate(found) if reason is None]
    among = check.among([replies[i] for i in good], [found[i][1] for i in good])
    return [reason or dict(zip(good, among, strict=True)).get(i) for i, (reason, _) in enumerate(found)]


def reason(reply: Reply, check: Check | None = None, **limits: Any) -> str:
    """Why a reply is refused between two good ones, which are not."""
    good = next(one for one in GOOD if type(one) is type(reply))
    if isinstance(check or CHECKS[type(reply)], AdaptCheck):
        check = check or AdaptCheck(classes=3, corruptions=15)
    first, found, last = refused(check or CHECKS[type(reply)], good, reply, good, **limits)
    assert first is last is None
    return found or ""


# -- all replies


@pytest.mark.parametrize("good", GOOD, ids=lambda one: one.kind)
def test_a_good_reply_passes_and_one_of_another_kind_or_with_too_many_examples_does_not(good: Any) -> None:
    check = CHECKS[type(good)]
    assert refused(check, good) == [None]
    assert refused(check) == []
    most = good.num_examples
    assert refused(check, good, examples=most) == [None]
    assert refused(check, good, examples=most - 1) == [f"num-examples = {most}, allowed is at most {most - 1}"]
    other = Identity(
        name="0", classes=[], channels=1, mean=[], std=[], sizes=[1, 1, 1], shifts=[], note="",
        role="both",
    )  # fmt: skip
    assert refused(check, other) == [f"a reply of kind 'identity', expected '{good.kind}'"]


def test_each_client_has_its_own_bound_on_examples() -> None:
    five = replace(TRAINED, num_examples=5)
    assert [one is None for one in refused(CHECKS[Trained], five, five, five, examples=[5, 4, 9])] == [
        True,
        False,
        True,
    ]


# -- arrays


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"w": np.zeros((3,), np.float32)}, "w: float32[3], expected float32[2, 3]"),
        ({"w": np.zeros((1, 3), np.float32)}, "w: float32[1, 3]"),
        ({"w": np.zeros((2, 3), np.float64)}, "w: float64"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "w: values that are not finite"),
        ({"w": np.full((2, 3), np.inf, np.float32)}, "w: values that are not finite"),
        ({"bn.running_var": np.array([1, -1e-3, 1], np.float32)}, "bn.running_var: values from -0.001"),
        ({"extra": np.zeros(1)}, "missing arrays [], unknown arrays ['extra']"),
        ({"w": None}, "missing arrays ['w'], unknown arrays []"),
    ],
)
def test_a_model_comes_back_as_it_was_sent_with_other_finite_values(change: dict[str, Any], told: str) -> None:
    arrays = {name: value for name, value in {**MODEL, **change}.items() if value is not None}
    assert told in reason(replace(TRAINED, arrays=arrays))


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("dle", 0.0, True), ("dle", 1.0, True), ("dle", -1e-9, False), ("dle", 1.0001, False),
        ("entropy_global", 9.0, True), ("entropy_local", -1e-9, False), ("confusion", 1.5, False),
        ("descriptor", -9.0, True), ("descriptor", 9.0, True), ("label_prior", -0.1, False),
        ("block_scores", 2.0, False),
    ],
)  # fmt: skip
def test_statistics_have_ranges(name: str, value: float, good: bool) -> None:
    arrays = {name: np.array([value])}
    (found,) = refused(SummarizeCheck(shapes_of(arrays)), replace(SUMMARIZED, statistics=arrays), norm=1e-9)
    assert (found is None) is good
    assert good or f"{name}: values from {value}" in str(found)


@pytest.mark.parametrize(("w", "bound", "good"), [(1.0, 5.0, True), (2.0, 5.0, False), (2.0, 0.0, True)])
def test_a_bound_on_the_norm_of_an_update_by_hand(w: float, bound: float, good: bool) -> None:
    """Six numbers moved by w and three by -1: the norm is √(6w² + 3), 3 or 5.196; whole numbers do not count."""
    sent = {**MODEL, "seen": np.zeros(2, np.int64)}
    moved = {"w": MODEL["w"] + w, "bn.running_var": MODEL["bn.running_var"] - 1, "seen": np.full(2, 99)}
    moved = {name: value.astype(sent[name].dtype) for name, value in moved.items()}
    (found,) = refused(TrainCheck(sent), replace(TRAINED, arrays=moved), norm=bound)
    assert found == (None if good else "5.19615 from what was sent (l2 norm), allowed is at most 5")


@pytest.mark.parametrize(("dtype", "huge"), [("float32", 3e38), ("float64", 1.7e308)])
def test_a_norm_beyond_all_numbers_is_refused_without_a_warning(dtype: str, huge: float) -> None:
    moved = replace(RATES, rates={"a": np.full(2, huge, dtype)})
    (found,) = refused(RatesCheck({"a": np.full(2, -huge, dtype)}), moved, norm=1e9)
    assert "from what was sent" in str(found)


def test_a_rate_of_a_variance_may_be_negative_and_must_be_finite() -> None:
    sent = {"bn.running_var": np.float64(0)}
    below, endless = ({"bn.running_var": np.float64(value)} for value in (-1, math.nan))
    found = refused(RatesCheck(sent), replace(RATES, rates=below), replace(RATES, rates=endless))
    assert found == [None, "bn.running_var: values that are not finite"]


# -- numbers


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (replace(TRAINED, validation_correct=5), "validation-correct = 5, more than validation-total = 4"),
        (replace(TRAINED, personal_validation_correct=5), "personal-validation-correct = 5, more than"),
        (replace(SUMMARIZED, validation_correct=5), "validation-correct = 5, more than validation-total = 4"),
        (replace(RATES, correct=5), "correct = 5, more than num-examples = 4"),
        (replace(EVALUATED, leaked=5), "leaked = 5, more than checked = 4"),
        (replace(EVALUATED, results=[replace(RESULT, correct=5)]), "btfl, fog: correct = 5, more than total = 4"),
        (
            replace(EVALUATED, results=[replace(RESULT, weight_histogram=[5] + [0] * 19)]),
            "btfl, fog: weights in the histogram = 5, more than total = 4",
        ),
        (replace(EVALUATED, results=[replace(RESULT, metrics={"estimates": 0.5})]), "cannot be called estimates"),
        (replace(EVALUATED, results=[replace(RESULT, metrics={"extra": 0.5})]), "cannot be called extra"),
        (replace(TRAINED, trained_correct=2), "trained-correct and decoded-correct: allowed are both, or neither"),
        (replace(TRAINED, decoded_correct=2), "trained-correct and decoded-correct: allowed are both, or neither"),
        (replace(EVALUATED, results=[]), "missing results [('btfl', 'fog')], unknown results []"),
        (replace(EVALUATED, results=[replace(RESULT, shift="snow")]), "unknown results [('btfl', 'snow')]"),
        (replace(EVALUATED, results=[RESULT, RESULT]), "doubled results"),
        (replace(ADAPTED, corruption=15), "corruption = 15, there are 15"),
        (replace(ADAPTED, correct=[1, 0]), "correct: expected 3 counts"),
        (replace(ADAPTED, total=[2, 0, 3, 0]), "total: expected 3 counts"),
        (replace(ADAPTED, correct=[3, 0, 2]), "do not fit each other"),
        (replace(ADAPTED, num_examples=6), "do not fit each other"),
        (replace(ADAPTED, total=[2, 0, 4]), "do not fit each other"),
    ],
)
def test_numbers_that_the_server_counts_with_fit_each_other(reply: Reply, told: str) -> None:
    assert told in reason(reply)


def test_metrics_that_are_needed_are_there() -> None:
    assert reason(TRAINED, TrainCheck(MODEL)) == ""
    needing = TrainCheck(MODEL, personal_head=True, metrics=["global-loss"])
    whole = replace(TRAINED, personal_validation_correct=0, global_loss=0.5)
    found = refused(needing, whole, replace(whole, global_loss=None), TRAINED)
    assert found == [None, "global-loss is missing", "global-loss, personal-validation-correct is missing"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (TRAINED, {"num_examples": 0}), (TRAINED, {"num_examples": -3}), (TRAINED, {"num_examples": 1.5}),
        (TRAINED, {"train_loss": math.nan}), (TRAINED, {"seconds": math.inf}), (TRAINED, {"seconds": -1.0}),
        (TRAINED, {"validation_total": -1}), (TRAINED, {"validation_correct": [1]}), (TRAINED, {"train_loss": None}),
        (TRAINED, {"arrays": None}), (TRAINED, {"global_loss": -1.0}),
        (EVALUATED, {"results": [replace(RESULT, weight_mean=1.5)]}), (EVALUATED, {"checked": None}),
        (EVALUATED, {"results": [replace(RESULT, weight_histogram=[1, 2])]}),
        (EVALUATED, {"results": [replace(RESULT, weight_histogram=[0] * 19 + [-1])]}),
        (EVALUATED, {"results": [replace(RESULT, metrics={"ece": math.nan})]}),
        (ADAPTED, {"corruption": -1}), (ADAPTED, {"correct": [-1, 0, 2]}), (ADAPTED, {"total": 5}),
        (ADAPTED, {"shared": None}), (ADAPTED, {"context_bytes": -1}), (RATES, {"loss": math.nan}),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_or_range_is_refused_when_the_reply_is_read(
    kind: Any, change: dict[str, Any]
) -> None:
    type(kind).from_record(kind.to_record())
    record = replace(kind, **change).to_record()
    with pytest.raises(ValueError, match=next(iter(change)).replace("_", ".")):
        type(kind).from_record(record)


# -- test-time rounds: the majority decides what clients share

OTHER = "shared: other names, shapes or dtypes than most clients sent"
ODD: list[Arrays] = [
    {**SHARED, "gamma": np.ones(3, np.float32)},
    {**SHARED, "gamma": np.ones(2)},
    {"gamma": SHARED["gamma"]},
    {**SHARED, "beta": np.ones(1)},
    {},
]


def sharing(arrays: Arrays, **more: Any) -> Adapted:
    return replace(ADAPTED, shared=arrays, **more)


def adapt_check(*records: str) -> AdaptCheck:
    return AdaptCheck(classes=3, corruptions=15, records=["shared", *records])


@pytest.mark.parametrize("odd", ODD)
def test_a_reply_unlike_most_is_refused_also_when_it_is_first(odd: Arrays) -> None:
    check = adapt_check()
    assert refused(check, sharing(odd), ADAPTED, ADAPTED) == [OTHER, None, None]
    # the decision holds for later rounds, even if then most send the other
    assert [one is None for one in refused(check, sharing(odd), sharing(odd), ADAPTED)] == [False, False, True]


def test_of_a_tie_the_first_counts_and_bad_replies_have_no_vote() -> None:
    other = sharing(ODD[0])
    assert refused(adapt_check(), ADAPTED, other) == [None, OTHER]
    assert refused(adapt_check(), other, ADAPTED) == [None, OTHER]
    bad = sharing({"gamma": np.full(3, math.nan, np.float32)})
    assert refused(adapt_check(), bad, bad, ADAPTED)[2] is None


def test_names_have_no_order_and_a_method_may_share_nothing() -> None:
    assert refused(adapt_check(), ADAPTED, sharing(dict(reversed(SHARED.items())))) == [None, None]
    assert refused(adapt_check(), sharing({}), sharing({})) == [None, None]


def test_only_what_is_asked_for_is_accepted() -> None:
    check = adapt_check("normalization", "start")
    domain = {"bn.mean": np.zeros(2), "bn.variance": np.ones(2)}
    whole = sharing(SHARED, normalization=domain, start=SHARED)
    assert refused(check, whole, whole) == [None, None]
    assert set(check.signature) == {"shared", "normalization", "start"}
    check.records = ["shared", "normalization"]
    later = replace(whole, start=None)
    found = refused(check, later, whole, ADAPTED, replace(later, normalization={**domain, "bn.variance": -np.ones(2)}))
    assert found[0] is None
    assert found[1] == "arrays ['normalization', 'shared', 'start'], expected ['normalization', 'shared']"
    assert found[2] == "arrays ['shared'], expected ['normalization', 'shared']"
    assert re.match("normalization: bn.variance: values from -1", str(found[3]))


def test_a_start_looks_like_what_is_shared_and_is_finite() -> None:
    check = adapt_check("start")
    endless = {**SHARED, "gamma": np.array([math.inf, 1], np.float32)}
    starts = [{"gamma": np.ones(5)}, endless, SHARED]
    found = refused(check, *(sharing(SHARED, start=start) for start in starts))
    assert found[0] == "start: other names, shapes or dtypes than shared"
    assert found[1] == "start: gamma: values that are not finite"
    assert found[2] is None


# -- clients without labels


@pytest.mark.parametrize("kind", [Trained, Summarized, RefinedRates])
def test_what_needs_labels_is_refused_of_a_client_without_them(kind: type[Reply]) -> None:
    good = next(one for one in GOOD if type(one) is kind)
    first, second = refused(CHECKS[kind], good, good, labelled=[True, False])
    assert first is None
    assert "needs labels, which this client does not have" in (second or "")


def test_a_client_without_labels_evaluates_nothing() -> None:
    nothing = Evaluated(checked=0, leaked=0, results=[])
    found = refused(CHECKS[Evaluated], EVALUATED, nothing, EVALUATED, nothing, labelled=[True, False, False, True])
    assert found[:2] == [None, None]
    assert found[2:] == ["unknown results [('btfl', 'fog')]", "missing results [('btfl', 'fog')], unknown results []"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"total": [2, 0, 3]}, "correct or total is not 0, which needs labels"),
        ({"total": [0, 0]}, "total: expected 3 counts"),
        ({"corruption": 15}, "corruption = 15, there are 15"),
        ({"shared": {"gamma": np.full(2, np.nan, np.float32)}}, "shared: gamma: values that are not finite"),
    ],
)
def test_a_client_without_labels_adapts_and_counts_nothing(changes: dict[str, Any], told: str | None) -> None:
    reply = replace(ADAPTED, **{"correct": [0] * 3, "total": [0] * 3, **changes})
    assert refused(AdaptCheck(classes=3, corruptions=15), reply, labelled=False) == [told]
    if told is None:
        assert refused(AdaptCheck(classes=3, corruptions=15), reply) != [None], "with labels it has to count"


# -- what replies say beside each other


def test_numbers_far_beyond_those_of_the_median_reply_are_refused() -> None:
    """One reply of 1e30 would make all clients diverge; 1000 times the median, or 1, is allowed."""

    def scaled(factor: float) -> Trained:
        return replace(TRAINED, arrays={**MODEL, "w": np.full((2, 3), factor, np.float32)})

    told = "numbers up to 1e+30, allowed are 1e+03: 1000 times those of the median reply"
    assert refused(CHECKS[Trained], TRAINED, scaled(1e30)) == [None, told]
    assert refused(CHECKS[Trained], scaled(-1e30), TRAINED, TRAINED) == [told, None, None]
    found = refused(CHECKS[Trained], TRAINED, TRAINED, scaled(1000), scaled(-1001))
    assert found == [None, None, None, told.replace("1e+30", "1e+03")]
    assert refused(CHECKS[Trained], scaled(50), scaled(60), scaled(50_000)) == [None, None, None]
    assert refused(CHECKS[Trained], scaled(1e30)) == [None], "nothing to compare it with"


def test_a_check_that_fails_refuses_the_reply_that_made_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    check = TrainCheck(MODEL)
    odd = replace(TRAINED, train_loss=7.0)

    def failing(self: TrainCheck, reply: Trained, norm: float = 0.0) -> None:
        if reply is odd:
            raise TypeError("no \x1b number")

    monkeypatch.setattr(TrainCheck, "why_refused", failing)
    assert refused(check, TRAINED, odd) == [None, "cannot be read: TypeError: no \ufffd number"]


def test_statistics_may_have_narrower_ranges_and_counters_are_exact() -> None:
    shapes = {"descriptor": ((1,), "float64")}
    minus = replace(SUMMARIZED, statistics={"descriptor": np.array([-1.0])})
    assert refused(SummarizeCheck(shapes), minus) == [None]
    narrow = SummarizeCheck(shapes, {"descriptor": (0.0, math.inf)})
    assert refused(narrow, minus) == ["descriptor: values from -1.0 to -1.0, allowed are 0.0 to inf"]
    counters = TrainCheck({"n": np.zeros(1, np.int64)})
    many = replace(TRAINED, arrays={"n": np.array([2**60])})
    assert "allowed are -9007199254740992 to 9007199254740992" in str(refused(counters, many)[0])


@pytest.mark.parametrize(("leaking", "expected"), [(1, "leaked"), (2, "leaked"), (3, None)])
def test_a_leak_that_few_report_refuses_their_replies(leaking: int, expected: str | None) -> None:
    """Of four clients with test samples; clients without do not count."""
    leaks = replace(EVALUATED, leaked=2)
    replies = [leaks] * leaking + [EVALUATED] * (4 - leaking) + [replace(EVALUATED, checked=0)] * 9
    check = EvaluateCheck([("btfl", "fog")], leaks=False)
    found = refused(check, *replies)
    told = "leaked = 2 of 4 test samples had been trained on; most clients report none"
    assert found == [told if expected else None] * leaking + [None] * (13 - leaking)
    assert refused(CHECKS[Evaluated], *replies) == [None] * 13, "splits that are redrawn leak on purpose"
