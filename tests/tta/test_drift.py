"""Drift: the urn against all orders of tiny samples and a loop, false alarms, power, batches, states, refusals."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedtta.tta.drift import DriftTest, outputs

Float = np.ndarray


def normal(seed: int, *shape: int) -> Float:
    return np.random.default_rng(seed).normal(size=shape)


def evidences(test: DriftTest, values: Float) -> list[float]:
    """R_t of one column after each sample, for false_alarms=1e-9, which nothing reaches here."""
    found = []
    for row in values:
        assert test.update(row[None]) == []
        found.append(test.evidence / 1e-9)
    return found


def by_loop(reference: list[float], values: list[float], bins: int, window: int) -> list[float]:
    """R_t of one column without ties after each sample: every product is computed from the start."""
    n, ordered = len(reference), sorted(reference)
    ranks = [round(i * (n + 1) / bins) for i in range(1, bins)]
    edges = [ordered[rank - 1] for rank in ranks]
    base = [after - before for before, after in itertools.pairwise([0, *ranks, n + 1])]
    inside = [sum(value > edge for edge in edges) for value in values]
    found = []
    for t in range(1, len(values) + 1):
        total = 0.0
        for k in range(max(0, t - window), t):
            product = 1.0
            for i in range(k, t):
                b, strength = inside[i], bins / 2
                usual = (base[b] + inside[:i].count(b)) / (n + 1 + i)
                changed = (strength * base[b] / (n + 1) + inside[k:i].count(b)) / (strength + i - k)
                product *= changed / usual
            total += product
        found.append(total)
    return found


@pytest.mark.parametrize(("n", "bins", "window"), [(4, 2, 9), (13, 5, 4), (40, 3, 30)])
def test_the_evidence_is_that_of_a_loop(n: int, bins: int, window: int) -> None:
    reference, values = normal(1, n, 1), normal(2, 25, 1) + 0.5
    test = DriftTest(reference, bins=bins, window=window, false_alarms=1e-9)
    expected = by_loop(reference[:, 0].tolist(), values[:, 0].tolist(), bins, window)
    assert evidences(test, values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("bins", "values"), [(2, range(7)), (3, range(7)), (3, [0, 0, 0, 1, 1, 2, 3])])
def test_over_all_orders_the_mean_evidence_is_the_number_of_samples(bins: int, values: Any) -> None:
    """What the guarantee follows from, for any distribution: all 5,040 orders are equally probable.

    Each order is a column. Equal values have random places, which are averaged over as well: hence the tolerance.
    """
    orders = np.array(list(itertools.permutations(values)), np.float64).T  # [7, 5040]
    test, found = DriftTest(orders[:4], bins=bins, false_alarms=1e-9, window=5), []
    for row in orders[4:]:
        assert test.update(row[None]) == []
        state = test.state_dict()
        found.append(np.exp(state["logs"][: state["since"]]).sum(0).mean())
    tied = len(set(values)) < len(values)
    assert found == pytest.approx([1, 2, 3], rel=0.05 if tied else 1e-9)


def test_columns_have_the_evidence_of_tests_of_their_own() -> None:
    reference, values = normal(5, 20, 3), normal(6, 30, 3) + 0.5
    alone = [evidences(DriftTest(reference[:, [i]], false_alarms=1e-9), values[:, [i]]) for i in range(3)]
    together = evidences(DriftTest(reference, false_alarms=1e-9), values)
    assert together == pytest.approx(np.max(alone, axis=0) / 3)  # an alarm needs d times as much


def test_equal_values_fall_into_the_bins_by_their_spacings() -> None:
    """The 5 spacings of 4 samples in 3 bins are 2, 1, 2; every place of a fifth sample is equally probable."""
    test = DriftTest(np.zeros((4, 3000)), bins=3)
    before = test.state_dict()["urn"]
    assert (before == [[2], [1], [2]]).all()
    test.update(np.zeros((1, 3000)))
    counts = (test.state_dict()["urn"] - before).sum(1)
    assert counts / 3000 == pytest.approx([0.4, 0.2, 0.4], abs=0.036)  # four standard errors


def test_a_window_only_lowers_the_evidence() -> None:
    reference, values = normal(3, 20, 1), normal(4, 40, 1) + 1
    short, long = (evidences(DriftTest(reference, window=window, false_alarms=1e-9), values) for window in (5, 50))
    assert short[:5] == long[:5]
    assert all(one < other for one, other in zip(short[5:], long[5:], strict=True))


def alarmed(column_shapes: str, repetitions: int, samples: int) -> int:
    """In how many of the streams without a change an alarm is given, with false_alarms=0.002."""
    found = 0
    for seed in range(repetitions):
        values = normal(seed, 100 + samples, 6)
        if column_shapes == "relu":
            values = np.maximum(values, 0)  # half of the values are equal
        elif column_shapes == "dependent":
            values = np.column_stack(
                (values[:, 0], abs(values[:, 0] - 0.3), np.exp(values[:, 0]), values[:, :3].sum(1))
            )
        found += bool(DriftTest(values[:100], false_alarms=0.002, seed=seed).update(values[100:]))
    return found


@pytest.mark.parametrize("shapes", ["normal", "relu", "dependent"])
def test_false_alarms_are_as_rare_as_stated(shapes: str) -> None:
    """Within 200 samples an alarm has at most the probability 200 · 0.002 = 0.4."""
    found = alarmed(shapes, 60, 200)
    assert found <= binom.ppf(0.9999, 60, 0.4)
    assert found >= 1  # and are not so rare for lack of any alarm


def test_alarms_without_a_change_in_a_long_stream_with_renewals() -> None:
    """Their mean distance is at least 1 / (2 · 0.004) samples."""
    counts = [
        len(DriftTest(normal(seed, 100, 3), false_alarms=0.004).update(normal(seed + 99, 2000, 3))) for seed in range(8)
    ]
    assert 1 <= sum(counts) <= 8 * 2000 * 2 * 0.004


@pytest.mark.parametrize("change", ["mean", "spread", "one of ten"])
def test_a_change_and_the_way_back_are_found(change: str) -> None:
    for seed in range(5):
        values = normal(seed, 700, 10)
        after = values[300:500]
        if change == "mean":
            after += 1
        elif change == "spread":
            after *= 3
        else:
            after[:, 7] += 2.5
        found = DriftTest(values[:200], false_alarms=1e-4).update(values[200:])
        assert len(found) == 2, found
        assert 100 <= found[0] < 150
        assert 300 <= found[1] < 380


def test_a_mix_of_classes_is_found_in_outputs() -> None:
    draw = np.random.default_rng(5)

    def predicted(shares: list[float], count: int) -> Float:
        logits = 4 * np.eye(4)[draw.choice(4, count, p=shares)] + draw.normal(size=(count, 4))
        rows = np.exp(logits)
        return rows / rows.sum(1, keepdims=True)

    here, there = [0.6, 0.3, 0.1, 0.0], [0.0, 0.1, 0.3, 0.6]
    test = DriftTest(outputs(predicted(here, 200)), false_alarms=1e-4)
    assert test.update(outputs(predicted(here, 100))) == []
    (found,) = test.update(outputs(predicted(there, 60)))
    assert found < 130


def test_a_stream_sorted_by_class_is_a_chain_of_changes() -> None:
    labels = np.arange(400) // 100
    values = np.eye(4)[labels] + 0.1 * normal(6, 400, 4)
    mixed = np.random.default_rng(7).permutation(400)
    reference = np.eye(4)[np.arange(200) % 4] + 0.1 * normal(8, 200, 4)
    assert DriftTest(reference, false_alarms=1e-4).update(values[mixed]) == []
    assert len(DriftTest(reference, false_alarms=1e-4).update(values)) >= 3


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    columns=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    given_reference=st.booleans(),
    scale=st.floats(0.01, 100),
    tied=st.booleans(),
)
def test_batches_monotone_columns_and_restarts_change_nothing(
    seed: int, columns: int, cuts: list[int], given_reference: bool, scale: float, tied: bool
) -> None:
    values = normal(seed, 150, columns)
    values[70:] += 1.5
    values = np.round(values) if tied else values
    reference = values[:30] if given_reference else None
    options: dict[str, Any] = {"false_alarms": 0.02, "window": 11, "renewal": 12, "bins": 3, "seed": seed}
    stream = values[30:]
    whole = DriftTest(reference, **options)
    expected = whole.update(stream)

    parts, found = DriftTest(reference, **options), []
    for part in np.split(stream, sorted(cuts)):
        found += parts.update(part)
        restarted = DriftTest(reference, **options)
        restarted.load_state_dict(parts.state_dict())
        parts = restarted
    assert found == expected
    assert parts.evidence == whole.evidence < 1
    for size in (1, 7):
        test = DriftTest(reference, **options)
        assert [one for start in range(0, 120, size) for one in test.update(stream[start : start + size])] == expected

    def rising(x: Float) -> Float:
        return scale * (x + np.sign(x) * x**2) - 3

    other = DriftTest(None if reference is None else rising(reference), **options)
    assert other.update(rising(stream)) == expected

    whole.reset()
    assert whole.update(stream) == expected


def test_after_an_alarm_the_next_samples_are_the_reference() -> None:
    values = normal(9, 400, 2)
    values[100:] += 3
    test = DriftTest(values[:60], renewal=40)
    (found,) = test.update(values[60:])
    again = DriftTest(None, renewal=40)
    assert again.update(values[60 + found + 1 :]) == []
    assert again.evidence == pytest.approx(test.evidence)
    after = DriftTest(values[60 + found + 1 :][:40])
    after.update(values[60 + found + 41 :])
    assert after.evidence == pytest.approx(test.evidence)  # no ties


def test_without_a_reference_nothing_is_found_while_it_is_collected() -> None:
    test = DriftTest(renewal=30)
    assert test.update(np.arange(60.0).reshape(30, 2) ** 3) == []
    assert test.evidence == 0


def test_values_of_torch() -> None:
    reference, stream = normal(10, 40, 3), normal(11, 60, 3) + 1
    plain, tensors = DriftTest(reference), DriftTest(torch.tensor(reference))
    assert plain.update(stream) == tensors.update(torch.tensor(stream, requires_grad=True))
    assert plain.evidence == tensors.evidence


def test_outputs_are_those_of_a_loop() -> None:
    rows = np.array([[0.5, 0.5, 0.0], [0.2, 0.1, 0.7]], np.float32)
    found = outputs(torch.from_numpy(rows))
    assert found.dtype == np.float64
    for row, values in zip(rows.tolist(), found.tolist(), strict=True):
        entropy = -sum(p * math.log(p) for p in row if p > 0)
        assert values == pytest.approx([*row, entropy, max(row)], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"false_alarms": 0.0}, "false_alarms=0.0 is outside"),
        ({"false_alarms": 0.6}, "false_alarms=0.6 is outside"),
        ({"false_alarms": math.nan}, "false_alarms=nan is outside"),
        ({"window": 1}, "window=1 must be at least 2"),
        ({"bins": 1}, "bins=1 must be at least 2"),
        ({"renewal": 4}, "renewal=4 must be at least 5"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"bins": 11, "renewal": 11}, "a reference of 10 samples is too small: at least bins=11"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DriftTest(normal(0, 10, 2), **options)


@pytest.mark.parametrize("reference", [normal(0, 10), normal(0, 10, 0), normal(0, 10, 2, 2), np.full((10, 2), np.inf)])
def test_bad_references(reference: Float) -> None:
    with pytest.raises(ValueError, match="the reference"):
        DriftTest(reference)


def test_bad_streams_leave_the_state_alone() -> None:
    test = DriftTest(normal(0, 10, 2))
    test.update(normal(1, 3, 2))
    before = test.state_dict()
    bad = normal(2, 3, 2)
    bad[1, 0] = np.nan
    for values, message in (
        (bad, r"the stream for samples \[1\] of the batch is not finite"),
        (normal(2, 3, 3), "the stream has 3 columns, the samples before 2"),
        (normal(2, 3), "the stream has the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            test.update(values)
    after = test.state_dict()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_states_that_do_not_fit() -> None:
    test = DriftTest(normal(0, 10, 2), window=4)
    test.update(normal(1, 3, 2))
    good = test.state_dict()
    without = {name: value for name, value in good.items() if name != "urn"}
    for state, message in (
        (without, "has the names"),
        (DriftTest(normal(0, 10, 3), window=4).state_dict(), "the state has 3 columns, the reference 2"),
        (DriftTest(normal(0, 10, 2), window=5).state_dict(), "state 'counts' of a drift test does not fit"),
        (good | {"urn": 0 * good["urn"]}, "state 'urn' of a drift test has bins without a spacing"),
        (good | {"urn": np.array(1)}, "have two dimensions"),
        (good | {"collected": np.array(1.0)}, "have two dimensions"),
        (good | {"logs": np.full((4, 2), np.nan)}, "state 'logs' of a drift test does not fit, or is not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            test.load_state_dict(state)
    assert all(np.array_equal(good[name], value) for name, value in test.state_dict().items())


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, numpy as np, fedtta.tta.drift as drift; drift.DriftTest(np.eye(9)).update(np.eye(9)); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
