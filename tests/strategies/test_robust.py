"""Byzantine-robust aggregators against loops, Flower's strategies, and arbitrary clients."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp import strategy as flower
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.strategies import ATPRates, Krum, Median, RobustAggregator, RobustFedAvg, TrimmedMean
from fedtta.strategies.robust import krum_scores, middle
from tests.flower import record, reply

AGGREGATORS: list[RobustAggregator] = [Median(), TrimmedMean(0.2), TrimmedMean(0.34), Krum(1), Krum(2), Krum(1, 3)]
Client = dict[str, np.ndarray]


def clients(number: int, seed: int, spread: float = 1.0) -> list[Client]:
    draw = np.random.default_rng(seed)
    return [
        {
            "w": draw.normal(size=(3, 2)).astype(np.float32) * np.float32(spread),
            "alpha": np.asarray(draw.normal()) * spread,  # a rate is a number without dimensions
            "seen": draw.integers(0, 9, 2),
        }
        for _ in range(number)
    ]


def tolerated(aggregator: RobustAggregator, number: int) -> int:
    """How many Byzantine clients an aggregator tolerates."""
    if isinstance(aggregator, Median):
        return (number - 1) // 2
    return int(aggregator.fraction * number) if isinstance(aggregator, TrimmedMean) else aggregator.malicious  # type: ignore[attr-defined]


# -- by hand and by loops


def test_by_hand() -> None:
    ten = [{"x": np.array([v])} for v in (1.0, 2.0, 3.0, 4.0, 100.0)]
    assert Median()(ten)["x"] == 3.0
    assert Median()(ten[1:])["x"] == 3.5
    assert TrimmedMean(0.2)(ten)["x"] == 3.0  # (2 + 3 + 4)/3
    # n - f - 2 = 2 nearest: 1: 1 + 4, 2: 1 + 1, 3: 1 + 1, 4: 1 + 4; of a tie the first
    np.testing.assert_array_equal(krum_scores(ten, 1), [5, 2, 2, 5, 96**2 + 97**2])
    assert Krum(1)(ten)["x"] == 2.0
    assert Krum(1, 2)(ten)["x"] == 2.5
    whole = [{"n": np.array([v])} for v in (1, 1, 2, 2)]
    assert Median()(whole)["n"].tolist() == [2]  # 1.5 is rounded to even, not cut off
    assert Median()(whole)["n"].dtype == np.int64


def test_a_fraction_counts_as_the_decimal_that_was_written() -> None:
    """0.35 of 180 are 63; in floats the product is less than 63."""
    values = [{"x": np.array([float(i >= 117)])} for i in range(180)]  # 63 ones
    assert TrimmedMean(0.35)(values)["x"] == 0


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 9), st.integers(0, 999))
def test_median_and_trimmed_mean_are_those_of_each_number(number: int, seed: int) -> None:
    sent = clients(number, seed)
    cut = int(0.2 * number)
    median, trimmed = Median()(sent), TrimmedMean(0.2)(sent)
    for name in ("w", "alpha"):
        for position in np.ndindex(sent[0][name].shape):
            values = sorted(float(client[name][position]) for client in sent)
            assert median[name][position] == pytest.approx(statistics.median(values), rel=1e-6)
            assert trimmed[name][position] == pytest.approx(
                statistics.fmean(values[cut : number - cut]), rel=1e-5, abs=1e-7
            )


@settings(deadline=None, max_examples=20)
@given(st.integers(7, 9), st.integers(0, 999), st.integers(1, 2))
def test_krum_scores_are_sums_over_the_nearest(number: int, seed: int, malicious: int) -> None:
    sent = clients(number, seed)
    vectors = [np.concatenate([np.ravel(value).astype(float) for value in client.values()]) for client in sent]
    for i, score in enumerate(krum_scores(sent, malicious)):
        distances = sorted(float(((vectors[i] - other) ** 2).sum()) for j, other in enumerate(vectors) if j != i)
        assert score == pytest.approx(sum(distances[: number - malicious - 2]))


@pytest.mark.parametrize(
    ("aggregator", "theirs"),
    [
        (Median(), flower.FedMedian()),
        (TrimmedMean(0.2), flower.FedTrimmedAvg(beta=0.2)),
        (Krum(1), flower.Krum(num_malicious_nodes=1)),
        (Krum(1, 3), flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3)),
    ],
)
def test_the_same_as_flowers_own_where_that_is_sound(aggregator: RobustAggregator, theirs: flower.FedAvg) -> None:
    """float32 near zero, clients of equal size."""
    models = [client["w"] for client in clients(7, 3)]
    ours, metrics = RobustFedAvg(aggregator).aggregate_train(1, [reply(record(w=w), 4, loss=2.0) for w in models])
    expected, _ = theirs.aggregate_train(1, [reply(record(w=w), 4, loss=2.0) for w in models])
    np.testing.assert_allclose(ours["w"].numpy(), expected["w"].numpy(), rtol=1e-5, atol=1e-7)
    assert ours["w"].numpy().dtype == np.float32
    assert metrics["loss"] == pytest.approx(2.0)


def test_krum_tells_large_weights_with_small_differences_apart() -> None:
    """Norms of 10⁴ and differences of 10⁻³: in float32 ‖x‖² + ‖y‖² - 2xy has no digit of them left."""
    draw = np.random.default_rng(0)
    common = draw.normal(size=1000).astype(np.float32) * 300
    good = [(common + draw.normal(size=1000) * 1e-4).astype(np.float32) for _ in range(6)]
    byzantine = [(common + draw.normal(size=1000) * 1e-2).astype(np.float32)]
    scores = krum_scores([{"w": w} for w in byzantine + good], 1)
    assert scores.argmax() == 0
    assert scores[0] > 100 * scores[1:].max()


# -- invariants


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=str)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 999), st.sampled_from([-3e38, 1e6, 3e38]), st.booleans())
def test_byzantine_clients_do_not_move_the_result_beyond_the_honest_ones(
    aggregator: RobustAggregator, seed: int, value: float, together: bool
) -> None:
    """As many as the aggregator tolerates, together or apart, and huge in float64 too."""
    number = max(aggregator.min_clients, 9)
    many = tolerated(aggregator, number)
    good = [{name: v for name, v in client.items() if name != "seen"} for client in clients(number - many, seed, 0.01)]
    byzantine = [
        {"w": np.full((3, 2), value, np.float32), "alpha": np.asarray(value * 1e200 if value > 1e30 else value)}
        for _ in range(many)
    ]
    if not together:
        for i, client in enumerate(byzantine):
            client["w"] = client["w"] * np.float32((-1) ** i * (0.9 - 0.1 * i))
    result = aggregator([*byzantine, *good])
    for name, array in result.items():
        stack = np.stack([client[name] for client in good])
        assert ((array >= stack.min(0)) & (array <= stack.max(0))).all(), name


# -- few clients, impossible numbers, bad arrays


@pytest.mark.parametrize(
    ("aggregator", "least"),
    [(Median(), 3), (TrimmedMean(0.2), 5), (TrimmedMean(0.1), 10), (TrimmedMean(0.49), 3), (TrimmedMean(0.3), 4),
     (Krum(1), 5), (Krum(2), 7), (Krum(1, 3), 6), (Krum(2, 2), 7)],
    ids=str,
)  # fmt: skip
def test_an_aggregator_refuses_fewer_clients_than_it_needs(aggregator: RobustAggregator, least: int) -> None:
    """A fraction of 0.2 of 4 clients trims none: the mean would be a plain one."""
    assert aggregator.min_clients == least
    aggregator(clients(least, 0))
    with pytest.raises(ValueError, match=f"needs {least} clients, not {least - 1}"):
        aggregator(clients(least - 1, 0))
    with pytest.raises(ValueError, match="needs"):
        aggregator([])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), "fraction = 0.5"),
        (lambda: TrimmedMean(0.0), "fraction = 0.0"),
        (lambda: TrimmedMean(float("nan")), "fraction = nan"),
        (lambda: Krum(0), "malicious = 0"),
        (lambda: Krum(1, 0), "keep = 0"),
        (lambda: middle(clients(4, 0), 2), "nothing is left of 4"),
        (lambda: krum_scores(clients(3, 0), 1), "more than 3 clients, not 3"),
    ],
)
def test_impossible_numbers(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=str)
def test_arrays_that_do_not_fit_or_are_not_finite(aggregator: RobustAggregator) -> None:
    good = clients(8, 0)
    with pytest.raises(ValueError, match="values that are not finite"):
        aggregator([{**good[0], "w": np.full((3, 2), np.nan, np.float32)}, *good[1:]])
    with pytest.raises(ValueError, match="w of client 1"):
        aggregator([good[0], {**good[1], "w": np.zeros(6, np.float32)}, *good[2:]])


# -- the strategies that use an aggregator


def test_a_robust_strategy_looks_at_no_claimed_examples() -> None:
    replies = [reply(record(w=np.array([v])), 10**6 if v == 9 else 1) for v in (1.0, 2.0, 3.0, 4.0, 9.0)]
    strategy = RobustFedAvg(TrimmedMean(0.2))
    assert strategy.aggregate_train(1, replies)[0]["w"].numpy() == 3.0
    assert strategy.aggregate_train(1, []) == (None, None)
    with pytest.raises(ValueError, match="needs 5 clients, not 4"):
        strategy.aggregate_train(1, replies[:4])


def test_rates_join_by_the_aggregator() -> None:
    def sent(node: int, value: float) -> Message:
        return reply(record(a=np.asarray(value), b=np.asarray(-value)), name="rates", node=node)

    strategy = ATPRates(record(w=np.zeros(2)), aggregator=Krum(1))
    arrays, _ = strategy.aggregate_train(1, [sent(n, v) for n, v in enumerate((0.1, 0.12, 0.13, 0.2, 1e300))])
    assert (arrays["a"].numpy(), arrays["b"].numpy()) == (0.12, -0.12)
    assert arrays["a"].numpy().dtype == np.float64
    strategy.summary()
    with pytest.raises(ValueError, match="needs 5 clients, not 1"):
        strategy.aggregate_train(2, [sent(0, 1.0)])
