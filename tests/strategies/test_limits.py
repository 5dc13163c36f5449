"""Limits on one client's part in a mean: by hand, against loops, and what no attacker exceeds."""

from __future__ import annotations

import statistics
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.strategies import arrays, limits
from fedtta.strategies.limits import AGAINST, LEAST, capped, clip, forward, median, middle_rows, others_median

Client = dict[str, np.ndarray]


def clients(number: int, seed: int, shift: float = 0.0) -> list[Client]:
    draw = np.random.default_rng(seed)
    return [
        {"w": (draw.normal(size=(3, 4)) + shift).astype(np.float32), "b": draw.normal(size=2), "seen": np.arange(2)}
        for _ in range(number)
    ]


def vector(client: Client, names: tuple[str, ...] = ("w", "b")) -> np.ndarray:
    return np.concatenate([client[name].astype(float).ravel() for name in names])


def test_weights_by_hand() -> None:
    assert capped([10, 20, 30, 10**8], 5) == [10, 20, 30, 100], "of two in the middle the lower one"
    assert capped([10, 10**8], 5) == [10, 50]
    assert capped([10**8], 5) == [10**8]
    assert capped([1, 1, 9], 0.5) == [1, 1, 1], "a client that trained has a weight"
    assert capped([10, 10**8], 0) == [10, 10**8]
    assert capped([], 5) == []
    assert capped([100, 100, 10**8], 2.3) == [100, 100, 230], "in floats 229"


@settings(max_examples=30)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.floats(1, 9))
def test_no_weight_is_more_than_its_share(counts: list[int], share: float) -> None:
    found = capped(counts, share)
    assert max(found) <= Decimal(str(share)) * statistics.median_low(counts)
    assert sorted(found) == found or sorted(counts) != counts, "the order of clients by size stays"


def test_distances_by_hand() -> None:
    ten = [{"x": np.array([v])} for v in (1.0, 2.0, 3.0, 4.0, 100.0)]
    found = clip(ten, ["x"], 3.0)  # median 3, distances 2, 1, 0, 1, 97: their median is 1
    assert [one["x"].tolist() for one in found.arrays] == [[1.0], [2.0], [3.0], [4.0], [6.0]]
    assert (found.radius, found.far, found.distances.tolist()) == (3.0, [4], [2, 1, 0, 1, 97])
    assert found.center == {"x": np.array([3.0])}
    assert clip(ten, ["x"], 1.0).far == [0, 4], "a distance of the radius itself is allowed"
    assert clip(ten[:4], ["x"], 3.0).center == {}, "no client is far"
    assert clip(ten, ["x"], 3.0, past=[9] * 9).radius == 27.0, "the median of nine and these"
    equal = clip([{"x": np.array([v])} for v in (1.0, 1.0, 7.0)], ["x"], 3.0)
    assert [one["x"].tolist() for one in equal.arrays] == [[1.0]] * 3, "most clients sent the same"


def test_with_two_clients_the_start_is_the_center_and_earlier_rounds_the_scale() -> None:
    two, start = [{"x": np.array([2.0])}, {"x": np.array([-50.0])}], {"x": np.array([0.0])}
    assert clip(two, ["x"], 3.0).arrays == two
    assert clip(two, ["x"], 3.0, start=start).far == []
    found = clip(two, ["x"], 3.0, past=[1.0, 2.0, 2.0], start=start)
    assert [one["x"].tolist() for one in found.arrays] == [[2.0], [-6.0]]
    assert found.center == start
    with pytest.raises(ValueError, match="no client"):
        clip([], ["x"], 3.0, start=start)


@settings(max_examples=40)
@given(st.integers(LEAST, 9), st.integers(0, 999), st.floats(1, 5), st.sampled_from([0.0, 3.0, 1e30]))
def test_clipping_is_that_of_a_loop(number: int, seed: int, factor: float, far: float) -> None:
    sent = clients(number, seed)
    sent[0]["b"] = sent[0]["b"] + far
    found = clip(sent, ["w", "b"], factor)
    rows = np.stack([vector(one) for one in sent])
    center = np.array([statistics.median(column) for column in rows.T])
    distances = [float(np.linalg.norm(row - center)) for row in rows]
    radius = factor * statistics.median(distances)
    assert found.radius == pytest.approx(radius)
    for now, before, row, distance in zip(found.arrays, sent, rows, distances, strict=True):
        if distance <= found.radius:
            assert now is before
            continue
        expected = center + (row - center) * radius / distance
        np.testing.assert_allclose(vector(now), expected, rtol=1e-5, atol=1e-6 * (1 + radius))
        assert {name: value.dtype for name, value in now.items()} == {n: v.dtype for n, v in before.items()}
        assert now["seen"] is before["seen"]


@settings(max_examples=40)
@given(st.integers(5, 11), st.integers(0, 999), st.floats(-1e30, 1e30))
def test_one_attacker_moves_a_mean_by_no_more_than_the_honest_spread(number: int, seed: int, value: float) -> None:
    """The median and the median distance are within those of the honest clients, wherever the attacker is."""
    good = clients(number - 1, seed)
    bad = {"w": np.full((3, 4), value, np.float32), "b": np.full(2, value), "seen": np.arange(2)}
    found = clip([*good, bad], ["w", "b"], 3.0)
    center = np.median([vector(one) for one in good], axis=0)
    spread = max(float(np.linalg.norm(vector(one) - center)) for one in good)
    assert np.linalg.norm(vector(found.arrays[-1]) - center) <= 8 * spread * (1 + 1e-6)


def test_the_order_of_clients_changes_no_bit() -> None:
    sent = clients(7, 1)
    sent[3] = {**sent[3], "w": sent[3]["w"] * 50}
    there, back = clip(sent, ["w", "b"], 2.0), clip(sent[::-1], ["w", "b"], 2.0)
    assert there.far == [6 - i for i in back.far][::-1] != []
    for one, other in zip(there.arrays, back.arrays[::-1], strict=True):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 99))
def test_median_of_columns(number: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(number, 5)).astype(np.float32)
    expected = [statistics.median(map(float, column)) for column in rows.T]
    np.testing.assert_array_equal(median(rows), expected)
    np.testing.assert_array_equal(median(middle_rows(rows)), expected)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 99))
def test_median_of_the_others_in_columns(number: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-3, 3, size=(number, 7)).astype(np.float32)  # with equal numbers
    for i, found in enumerate(others_median(rows, middle_rows(rows), number)):
        others = np.delete(rows, i, axis=0) if number > LEAST else rows
        np.testing.assert_array_equal(found, [statistics.median(map(float, column)) for column in others.T])


@pytest.mark.parametrize("number", [3, 8, 9])
def test_the_middle_that_clipping_found_gives_the_same_steps(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    draw = np.random.default_rng(number)
    monkeypatch.setattr(arrays, "BLOCK", 4 * number)  # several blocks an array, and several readings of blocks
    sent = [{"x": draw.normal(1, size=(7, 9)).astype(np.float32), "y": draw.normal(1, size=5)} for _ in range(number)]
    sent[0] = {name: -value for name, value in sent[0].items()}
    start = {name: np.zeros_like(value) for name, value in sent[0].items()}
    names = ["y", "x"]
    found = clip(sent, names, 100.0)
    assert not found.far
    with monkeypatch.context() as patch:
        patch.setattr(limits, "middle_rows", None)  # they are not sorted again
        again = forward(sent, names, start, found.middle)
    expected = forward(sent, names, start)
    assert any(one is not before for one, before in zip(again, sent, strict=True))
    for one, other in zip(again, expected, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in names)


def test_directions_by_hand() -> None:
    start = {"x": np.array([1.0, 1.0])}
    most = [{"x": np.array([3.0, 1.0]), "n": np.array([i])} for i in range(4)]

    def found(x: list[float]) -> Client:
        *others, last = forward([*most, {"x": np.array(x), "n": np.array([7])}], ["x"], start)
        assert all(one is before for one, before in zip(others, most, strict=True))
        assert last["n"].tolist() == [7]
        return last

    assert found([2.0, 5.0])["x"].tolist() == [2.0, 5.0]
    assert found([1.0, 4.0])["x"].tolist() == [1.0, 4.0], "a step at a right angle"
    assert found([0.0, 4.0])["x"].tolist() == [3.0, 1.0], "(-1, 3) has a cosine of -0.32: counts as the others' median"
    # (-0.1, 2) has a cosine of -0.04994: half way between (0, 2) and the step of the others, (2, 0)
    np.testing.assert_allclose(found([0.9, 3.0])["x"], [2.0, 2.0], atol=2e-3)
    still = [{"x": np.array([1.0, 1.0])} for _ in range(5)]
    assert all(one is before for one, before in zip(forward(still, ["x"], start), still, strict=True)), "no step"


def test_a_flipped_sign_that_the_median_of_all_does_not_see() -> None:
    """With own steps several times as long as the common one, a client has itself in the median."""
    draw = np.random.default_rng(0)
    start = {"w": np.zeros(2000)}
    steps = draw.normal(size=(10, 2000)) + 0.25
    steps[9] = draw.normal(size=2000) - 0.15
    sent = [{"w": one} for one in steps]
    assert steps[9] @ np.median(steps, axis=0) > 0
    changed = [now is not before for now, before in zip(forward(sent, ["w"], start), sent, strict=True)]
    assert changed == [False] * 9 + [True]


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 999))
def test_no_step_is_against_the_others(number: int, seed: int) -> None:
    start, *sent = clients(number + 1, seed)
    rows, begin = np.stack([vector(one) for one in sent]), vector(start)
    for i, (now, before) in enumerate(zip(forward(sent, ["w", "b"], start), sent, strict=True)):
        middle = np.median(np.delete(rows, i, axis=0) if number > LEAST else rows, axis=0)
        common, step, old = middle - begin, vector(now) - begin, rows[i] - begin
        assert step @ common >= -1e-4
        assert (now is before) == (old @ common >= 0)
        if old @ common <= -AGAINST * np.linalg.norm(old) * np.linalg.norm(common):
            np.testing.assert_allclose(vector(now), middle, atol=1e-6)
        assert {name: value.dtype for name, value in now.items()} == {n: v.dtype for n, v in before.items()}


def test_the_order_of_clients_changes_no_bit_of_a_direction() -> None:
    (start,), sent = clients(1, 0), [*clients(6, 1, shift=2), *clients(1, 2, shift=-2)]
    there, back = forward(sent, ["w", "b"], start), forward(sent[::-1], ["w", "b"], start)
    assert any(now is not before for now, before in zip(there, sent, strict=True))
    for one, other in zip(there, back[::-1], strict=True):
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
