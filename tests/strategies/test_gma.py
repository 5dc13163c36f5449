"""Masked averaging against loops over single numbers and numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.arrays import weighted_mean
from strategies.gma import GMA, masked_mean
from tests.flower import LocalGrid, record, reply

quick = settings(deadline=None, max_examples=40)
OPTIONS: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def models(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Small whole steps, so that some Δ are zero and some agreements are equal to a threshold."""
    draw = np.random.default_rng(seed)
    return [
        {"w": draw.integers(-2, 3, (2, 3)) / 4, "n.running_mean": draw.normal(size=2), "n.running_var": draw.random(2)}
        for _ in range(count)
    ]


@quick
@given(st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_against_a_loop(clients: int, seed: int, threshold: float) -> None:
    start, *trained = models(clients + 1, seed)
    counts = np.random.default_rng(seed).integers(1, 9, clients)
    ours = masked_mean(start, trained, counts.tolist(), threshold)
    for place in np.ndindex(2, 3):
        up = sum(int(n) for n, m in zip(counts, trained, strict=True) if m["w"][place] > start["w"][place])
        down = sum(int(n) for n, m in zip(counts, trained, strict=True) if m["w"][place] < start["w"][place])
        agreement = abs(up - down) / int(counts.sum())
        mean = sum(n * (m["w"][place] - start["w"][place]) for n, m in zip(counts, trained, strict=True)) / counts.sum()
        step = mean if agreement >= threshold else agreement * mean
        assert ours["w"][place] == pytest.approx(start["w"][place] + step, abs=1e-12)
    plain = weighted_mean(trained, counts.tolist())
    for name in ("n.running_mean", "n.running_var"):
        np.testing.assert_array_equal(ours[name], plain[name])
    if threshold == 0:
        np.testing.assert_allclose(ours["w"], plain["w"], atol=1e-12)


def test_by_hand() -> None:
    # Δ = (+1, +1, -4) with weights 1, 1, 2: A = |1 + 1 - 2| / 4 = 0: nothing moves, whatever the mean
    # Δ = (+1, +1, -1) with weights 2, 1, 1: A = 1/2, mean 1/2: 1/4 below the threshold, 1/2 at it
    start = {"w": np.zeros(1)}
    three = [{"w": np.array([value])} for value in (1.0, 1.0, -4.0)]
    assert masked_mean(start, three, [1, 1, 2], 0.1)["w"] == 0
    three[2]["w"][0] = -1.0
    assert masked_mean(start, three, [2, 1, 1], 0.6)["w"] == 0.25
    assert masked_mean(start, three, [2, 1, 1], 0.5)["w"] == 0.5


@pytest.mark.parametrize("examples", [1, 3, 600])
def test_an_agreement_of_one_tenth_reaches_one_tenth(examples: int) -> None:
    """20 clients as in FedTHE: 11 against 9. Sums of shares such as 0.05 would miss the threshold."""
    trained = [{"w": np.array([1.0 if k < 11 else -1.0])} for k in range(20)]
    moved = masked_mean({"w": np.zeros(1)}, trained, [examples] * 20, 0.1)["w"]
    assert moved == pytest.approx(0.1, abs=1e-12)


@quick
@given(st.integers(2, 6), st.integers(0, 10_000))
def test_invariants(clients: int, seed: int) -> None:
    """The order of clients does not matter, more of a threshold never moves farther, one client is taken over."""
    start, *trained = models(clients + 1, seed)
    counts, order = list(range(1, clients + 1)), np.random.default_rng(seed).permutation(clients)
    ours = masked_mean(start, trained, counts, 0.5)
    other = masked_mean(start, [trained[k] for k in order], [counts[k] for k in order], 0.5)
    steps = [np.abs(masked_mean(start, trained, counts, t)["w"] - start["w"]) for t in (0.0, 0.3, 1.0)]
    assert (np.diff(steps, axis=0) <= 1e-12).all()
    alone = masked_mean(start, trained[:1], [7], 1.0)
    for name in start:
        np.testing.assert_allclose(ours[name], other[name], atol=1e-12)
        np.testing.assert_allclose(alone[name], trained[0][name], atol=1e-12)
        everyone = np.array([start[name], *(m[name] for m in trained)])
        assert (ours[name] >= everyone.min(0)).all()
        assert (ours[name] <= everyone.max(0)).all()


def test_refusals() -> None:
    start, one = models(2, 0)
    with pytest.raises(ValueError, match="threshold = nan; allowed is a number from 0 to 1"):
        masked_mean(start, [one], [1], float("nan"))
    with pytest.raises(ValueError, match="names"):
        masked_mean(start, [{"w": one["w"]}], [1], 0.1)
    with pytest.raises(ValueError, match="do not fit 1 clients"):
        masked_mean(start, [one], [1, 2], 0.1)
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"threshold = {bad}"):
            GMA(bad)


def test_in_flower() -> None:
    start, *trained = ({name: value.astype("float32") for name, value in m.items()} for m in models(4, 3))
    grid = LocalGrid(dict.fromkeys([1, 2, 3], lambda message: None))
    strategy, counts = GMA(**OPTIONS), (2, 5, 3)
    replies = [
        reply(record(**m), n, node, loss=float(node)) for node, (m, n) in enumerate(zip(trained, counts, strict=True))
    ]
    with pytest.raises(ValueError, match="configure_train has to come before"):
        strategy.aggregate_train(1, replies)
    messages = list(strategy.configure_train(1, record(**start), ConfigRecord({}), grid))
    assert {message.metadata.dst_node_id for message in messages} == {1, 2, 3}
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    for name, value in masked_mean(start, trained, counts, 0.1).items():
        np.testing.assert_array_equal(arrays[name].numpy(), value)
        assert value.dtype == np.float32
    assert metrics is not None
    assert metrics["loss"] == pytest.approx((0 * 2 + 1 * 5 + 2 * 3) / 10)
    assert strategy.aggregate_train(2, []) == (None, None)
