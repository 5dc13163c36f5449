"""The steps of q-FedAvg, masked averaging and FedAvgM, against loops, Flower and numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.strategies import GMA, QFFL, FedAvgM, weighted_mean
from fedtta.strategies.gma import masked_mean
from fedtta.strategies.qffl import q_fedavg
from tests.flower import LocalGrid, record, reply

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 7)
quick = settings(deadline=None, max_examples=30)
OPTIONS: dict[str, Any] = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def models(clients: int, seed: int, dtype: str = "float64") -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [
        {
            "w": draw.normal(size=(2, 3)).astype(dtype),
            "running_mean": draw.normal(size=2).astype(dtype),
            "running_var": draw.random(2).astype(dtype),
        }
        for _ in range(clients)
    ]


# -- q-FFL


@quick
@given(sizes, seeds, st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_q_fedavg_against_the_printed_step(clients: int, seed: int, q: float) -> None:
    start, *trained = models(clients + 1, seed)
    losses, lipschitz = np.random.default_rng(seed).random(clients) * 3, 20.0
    ours = q_fedavg(start, trained, losses.tolist(), q, lipschitz)
    deltas, h = {name: np.zeros_like(value) for name, value in start.items()}, 0.0
    for client, loss in zip(trained, losses + 1e-10, strict=True):
        step = lipschitz * (start["w"] - client["w"])
        h += q * loss ** (q - 1) * (step**2).sum() + lipschitz * loss**q
        for name in start:
            deltas[name] += loss**q * lipschitz * (start[name] - client[name])
    for name, value in start.items():
        np.testing.assert_allclose(ours[name], value - deltas[name] / h, atol=1e-12)
        known = [value, *(client[name] for client in trained)]  # a mean of them, also in its last bit
        assert ((np.min(known, axis=0) <= ours[name]) & (ours[name] <= np.max(known, axis=0))).all()
    assert (ours["running_var"] >= 0).all()
    if q == 0:
        for name, value in weighted_mean(trained).items():
            np.testing.assert_allclose(ours[name], value, atol=1e-12)


def test_q_fedavg_counts_the_worse_client_more() -> None:
    # steps L F^q / Σ h with norms 1: Σ h = (2·1 + 2·2) + (4·1 + ...): see below
    start, trained = {"w": np.zeros(1)}, [{"w": np.ones(1)}, {"w": -np.ones(1)}]
    # L = 2, q = 1: h = 4 + 2 F; F = (3, 1): Σ h = 10 + 6 = 16, Σ Δ = 2·3·(-1) + 2·1·1 = -4: w = 1/4
    np.testing.assert_allclose(q_fedavg(start, trained, [3.0, 1.0], 1.0, 2.0)["w"], [0.25], atol=1e-9)


@pytest.mark.parametrize(("losses", "expected"), [([2.0, 1.0], 1 / 2001), ([0.02, 0.01], 1 / 200_001)])
def test_q_fedavg_with_powers_that_no_float_holds(losses: list[float], expected: float) -> None:
    """2²⁰⁰⁰ is infinite and 0.02²⁰⁰⁰ is 0, but only their ratio counts: the worse client decides alone."""
    start, trained = {"w": np.zeros(1)}, [{"w": np.ones(1)}, {"w": -np.ones(1)}]
    # L = 2, q = 2000, both divided by F_1^q: h_1 = (2000/F_1) 4 + 2, Δ_1 = -2; the other client has 2⁻²⁰⁰⁰ of that
    np.testing.assert_allclose(q_fedavg(start, trained, losses, 2000.0, 2.0)["w"], [expected], rtol=1e-6)


def test_q_fedavg_refuses() -> None:
    start, one = models(2, 0)
    with pytest.raises(ValueError, match="2 losses do not fit 1 clients"):
        q_fedavg(start, [one], [1.0, 1.0], 1, 1)
    with pytest.raises(ValueError, match="losses"):
        q_fedavg(start, [one], [-1.0], 1, 1)
    with pytest.raises(ValueError, match="names"):
        q_fedavg(start, [{"w": one["w"]}], [1.0], 1, 1)


def test_qffl_in_flower_is_flowers_own_without_batchnorm() -> None:
    start, *trained = ({"a": m["w"], "b": m["w"][0] * 2} for m in models(4, 5, "float32"))
    grid = LocalGrid(dict.fromkeys([3, 1, 2], lambda message: None))
    found: list[Any] = []
    for each, told in (
        (QFFL(**OPTIONS), 0.05),
        (QFFL(learning_rate=0.05, **OPTIONS), 3.0),  # its own rate comes first
        (flower.QFedAvg(0.05, q=1.0, train_loss_key="global-loss", **OPTIONS), 0.05),
    ):
        messages = list(each.configure_train(1, record(**start), ConfigRecord({"learning-rate": told}), grid))
        assert {message.metadata.dst_node_id for message in messages} == {1, 2, 3}
        replies = [
            reply(record(**model), 10, node, **{"global-loss": loss})
            for node, (model, loss) in enumerate(zip(trained, (0.5, 2.0, 1.0), strict=True))
        ]
        arrays, metrics = each.aggregate_train(1, replies)
        found.append((arrays, metrics))
    for name in start:
        np.testing.assert_array_equal(found[0][0][name].numpy(), found[1][0][name].numpy())
        np.testing.assert_allclose(found[0][0][name].numpy(), found[2][0][name].numpy(), rtol=2e-5)
        assert found[0][0][name].numpy().dtype == np.float32
    assert found[0][1]["global-loss"] == pytest.approx(3.5 / 3)


def test_qffl_names_what_is_missing() -> None:
    model = record(w=np.zeros(2))
    with pytest.raises(ValueError, match="learning rate None"):
        list(QFFL(**OPTIONS).configure_train(1, model, ConfigRecord({}), LocalGrid({1: lambda message: None})))
    with pytest.raises(ValueError, match="QFFL: configure_train has to come before"):
        QFFL(learning_rate=0.1, **OPTIONS).aggregate_train(1, [reply(model, **{"global-loss": 1.0})])


# -- GMA


def quarters(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Small whole steps, so that some Δ are zero and some agreements are equal to a threshold."""
    draw = np.random.default_rng(seed)
    return [
        {"w": draw.integers(-2, 3, (2, 3)) / 4, "n.running_mean": draw.normal(size=2), "n.running_var": draw.random(2)}
        for _ in range(count)
    ]


@quick
@given(st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_masked_mean_against_a_loop(clients: int, seed: int, threshold: float) -> None:
    start, *trained = quarters(clients + 1, seed)
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


@quick
@given(st.integers(1, 4), seeds)
def test_masked_mean_stays_between_the_models_in_its_last_bit(clients: int, seed: int) -> None:
    start, *trained = models(clients + 1, seed)
    ours, known = masked_mean(start, trained, [3] * clients, 0.0)["w"], [m["w"] for m in (start, *trained)]
    assert ((np.min(known, axis=0) <= ours) & (ours <= np.max(known, axis=0))).all()


def test_masked_mean_by_hand() -> None:
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
@given(st.integers(2, 6), seeds)
def test_a_higher_threshold_never_moves_farther(clients: int, seed: int) -> None:
    start, *trained = quarters(clients + 1, seed)
    counts = list(range(1, clients + 1))
    steps = [np.abs(masked_mean(start, trained, counts, t)["w"] - start["w"]) for t in (0.0, 0.3, 1.0)]
    assert (np.diff(steps, axis=0) <= 1e-12).all()


def test_masked_mean_refuses() -> None:
    start, one = quarters(2, 0)
    with pytest.raises(ValueError, match="threshold = nan; allowed is a number from 0 to 1"):
        masked_mean(start, [one], [1], float("nan"))
    with pytest.raises(ValueError, match="names"):
        masked_mean(start, [{"w": one["w"]}], [1], 0.1)
    with pytest.raises(ValueError, match="do not fit 1 clients"):
        masked_mean(start, [one], [1, 2], 0.1)


def test_gma_in_flower_by_hand() -> None:
    # Δ = (+1, +1, -1) with 2, 1 and 1 examples: A = 1/2 < τ, mean 1/2
    strategy, grid = GMA(0.6, **OPTIONS), LocalGrid(dict.fromkeys([1, 2, 3], lambda message: None))
    replies = [reply(record(w=np.array([v])), n) for v, n in ((1.0, 2), (1.0, 1), (-1.0, 1))]
    with pytest.raises(ValueError, match="GMA: configure_train has to come before"):
        strategy.aggregate_train(1, replies)
    list(strategy.configure_train(1, record(w=np.zeros(1)), ConfigRecord({}), grid))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["w"].numpy() == 0.25


# -- FedAvgM


def test_fedavgm_moves_on_and_averages_statistics_plainly() -> None:
    grid = LocalGrid({1: lambda message: None})
    made = FedAvgM(0.9, **OPTIONS)
    velocity = {"w": 0.0, "running_var": 0.0}
    held = {"w": np.array([1.0]), "running_var": np.array([1.0])}
    for round, new in enumerate(({"w": 0.0, "running_var": 0.2}, {"w": -0.5, "running_var": 0.1}), 1):
        list(made.configure_train(round, record(**held), ConfigRecord({}), grid))
        arrays, _ = made.aggregate_train(round, [reply(record(**{name: np.array([v]) for name, v in new.items()}))])
        assert arrays is not None
        for name, value in new.items():
            velocity[name] = 0.9 * velocity[name] + float(held[name][0]) - value
            held[name] = np.array([value]) if name == "running_var" else held[name] - velocity[name]
            np.testing.assert_allclose(arrays[name].numpy(), held[name], atol=1e-12)
    assert held["w"][0] < -0.5  # momentum carries on
