"""Weighted means, mixtures, distances and cosines of clients' arrays, against loops and numbers by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.strategies import arrays as blocked
from fedtta.strategies import weighted_mean
from fedtta.strategies.arrays import mix
from fedtta.strategies.distances import cosines, squared_distances

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 7)
quick = settings(deadline=None, max_examples=30)


def shared(clients: int, seed: int, dtype: str = "float32") -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    shapes = {"weight": (2, 3), "bias": (4,), "steps": ()}
    return [{name: draw.normal(size=s).astype(dtype) for name, s in shapes.items()} for _ in range(clients)]


def random_weights(clients: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(clients), clients)


def flat(client: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([client[name].ravel() for name in ("weight", "bias", "steps")])


# -- weighted means


def test_mean_by_hand() -> None:
    clients = [{"p": np.array([0.0, 1.0])}, {"p": np.array([1.0, 4.0])}]
    np.testing.assert_array_equal(weighted_mean(clients)["p"], [0.5, 2.5])
    # (3·0 + 1·1)/4 and (3·1 + 1·4)/4
    np.testing.assert_array_equal(weighted_mean(clients, [3, 1])["p"], [0.25, 1.75])


def test_integers_are_rounded_as_in_a_mixture() -> None:
    clients = [{"n": np.array([1, 2])}, {"n": np.array([2, 2])}, {"n": np.array([2, 3])}]
    mean = weighted_mean(clients)["n"]
    assert mean.dtype == clients[0]["n"].dtype
    assert mean.tolist() == [2, 2]  # of 5/3 and 7/3
    np.testing.assert_array_equal(mean, mix(np.full((3, 3), 1 / 3), clients)[0]["n"])


# weights are not as small as 1e-300: numpy multiplies values and weights before it divides, and loses them
@given(st.lists(st.just(0.0) | st.floats(1e-9, 100), min_size=2, max_size=6), st.integers(0, 99))
def test_mean_against_numpy(weights: list[float], seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(len(weights), 4))
    if sum(weights) == 0:
        weights[0] = 1.0
    clients = [{"a": value} for value in values]
    mean = weighted_mean(clients, weights)["a"]
    np.testing.assert_allclose(mean, np.average(values, axis=0, weights=weights), atol=1e-12)
    assert (mean <= values.max(0)).all()
    assert (mean >= values.min(0)).all()


@given(st.integers(1, 40), st.sampled_from([0.0, 1.0, 0.1]))
def test_a_mean_of_equal_values_is_that_value_to_the_last_bit(n: int, value: float) -> None:
    # 20 · (0.05 · 1.0), added one by one, is 1.0000000000000002
    np.testing.assert_array_equal(weighted_mean([{"a": np.full(3, value)}] * n)["a"], np.full(3, value))


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ({"b": np.zeros(2)}, "names"),
        ({"a": np.zeros(1)}, r"float64\(1,\) does not fit float64\(2,\)"),
        ({"a": np.zeros(2, np.float32)}, "float32"),
    ],
)
def test_what_does_not_fit_is_refused(second: dict[str, np.ndarray], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        weighted_mean([{"a": np.zeros(2)}, second])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [np.nan, 1.0], [0.0, 0.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        weighted_mean([{"a": np.zeros(2)}] * 2, weights)


def test_nothing_to_average() -> None:
    with pytest.raises(ValueError, match="nothing"):
        weighted_mean([])


# -- mixtures


@quick
@given(sizes, seeds, st.sampled_from(["float32", "float64"]))
def test_mixtures_against_a_loop(clients: int, seed: int, dtype: str) -> None:
    arrays, weights = shared(clients, seed, dtype), random_weights(clients, seed)
    ours = mix(weights, arrays)
    for i, name in itertools.product(range(clients), arrays[0]):
        expected = sum(weights[i, j] * arrays[j][name].astype(float) for j in range(clients))
        np.testing.assert_allclose(ours[i][name], expected, rtol=1e-6, atol=1e-7)
        assert ours[i][name].dtype == dtype
        assert ours[i][name].shape == arrays[0][name].shape


@quick
@given(sizes, seeds, st.sampled_from([0.0, 0.1, 1e-30]))
def test_mixtures_stay_in_the_range_of_their_terms(clients: int, seed: int, low: float) -> None:
    variances = [{"v": low + np.random.default_rng([seed, i]).random(5) * (i > 1)} for i in range(clients)]
    stacked = np.stack([client["v"] for client in variances])
    for mixture in mix(random_weights(clients, seed), variances):
        assert (mixture["v"] >= stacked.min(0)).all()
        assert (mixture["v"] <= stacked.max(0)).all()


@quick
@given(sizes, seeds)
def test_equal_clients_and_the_identity_change_nothing(clients: int, seed: int) -> None:
    arrays = shared(clients, seed, "float64")
    for mixture, own in zip(mix(np.eye(clients), arrays), arrays, strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(mixture[name], value)
    for mixture in mix(random_weights(clients, seed), arrays[:1] * clients):
        for name, value in arrays[0].items():
            np.testing.assert_array_equal(mixture[name], value)


def test_mixtures_do_not_depend_on_blocks_or_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, weights = shared(3, 1, "float64"), random_weights(3, 1)
    whole, far = mix(weights, arrays), squared_distances(arrays)
    monkeypatch.setattr(blocked, "BLOCK", 6)  # two columns at a time
    turned = [{name: np.asarray(value, order="F") for name, value in client.items()} for client in arrays]
    for a, b in zip(whole, mix(weights, turned), strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-12)
    np.testing.assert_allclose(squared_distances(turned), far, rtol=1e-12)


def test_mixtures_leave_what_came_in_and_round_whole_numbers() -> None:
    arrays = [{"n": np.array([1, 10])}, {"n": np.array([2, 11])}]
    mixtures = mix(np.array([[0.1, 0.9], [0.9, 0.1]]), arrays)
    np.testing.assert_array_equal(mixtures[0]["n"], [2, 11])
    np.testing.assert_array_equal(mixtures[1]["n"], [1, 10])
    np.testing.assert_array_equal(arrays[0]["n"], [1, 10])
    assert mix(np.full((2, 2), 0.5), [{}, {}]) == [{}, {}]
    assert mix(np.eye(1), [{"e": np.zeros((0, 3))}])[0]["e"].shape == (0, 3)


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        (np.eye(3), r"\(3, 3\) do not fit 2 clients"),
        (np.ones(2), "do not fit"),
        (np.array([[1.1, -0.1], [0, 1]]), "not negative"),
        (np.array([[np.nan, 1], [0, 1]]), "finite"),
        (np.array([[0.5, 0.5], [0.5, 0.4999]]), "client 1 sum to 0.9999, not to one"),
    ],
)
def test_impossible_weights(weights: np.ndarray, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        mix(weights, shared(2, 0))


def test_arrays_that_do_not_fit() -> None:
    first, second = shared(2, 0)
    with pytest.raises(ValueError, match="steps of client 1"):
        mix(np.eye(2), [first, {**second, "steps": np.zeros(1, np.float32)}])
    with pytest.raises(ValueError, match="do not fit 0 clients"):
        mix(np.zeros((0, 0)), [])
    with pytest.raises(ValueError, match="no client"):
        squared_distances([])


# -- distances and cosines


@quick
@given(sizes, seeds, st.sampled_from([0.0, 1.0, 1e3]))
def test_squared_distances_against_a_loop(clients: int, seed: int, offset: float) -> None:
    theta = offset + np.random.default_rng(seed).normal(size=(clients, 6))
    ours = squared_distances(theta)
    for i, j in itertools.product(range(clients), repeat=2):
        assert ours[i, j] == pytest.approx(sum((theta[i] - theta[j]) ** 2), rel=1e-9, abs=1e-15)
    np.testing.assert_array_equal(ours, ours.T)
    assert not np.diag(ours).any()


def test_near_clients_far_from_the_others_keep_their_digits() -> None:
    # ‖a‖² + ‖b‖² - 2 a·b alone has an error of 1e-6 here
    draw = np.random.default_rng(0)
    theta = np.concatenate([1e5 + 1e-4 * draw.normal(size=(3, 50)), draw.normal(size=(3, 50))])
    theta[1] = theta[0]
    ours = squared_distances(theta)
    assert ours[0, 1] == 0
    assert ours[0, 2] == pytest.approx(((theta[0] - theta[2]) ** 2).sum(), rel=1e-9)
    np.testing.assert_array_equal(squared_distances(np.tile(theta[3], (5, 1))), np.zeros((5, 5)))


@quick
@given(sizes, seeds)
def test_cosines_against_a_loop(clients: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    theta, start = draw.normal(size=(clients, 5)), draw.normal(size=5)
    theta[0] = start + 3 * (theta[clients // 2] - start)  # the same way: rounding could make it more than 1
    theta[-1] = start  # has not moved
    ours = cosines(theta, start)
    for i, j in itertools.product(range(clients), repeat=2):
        a, b = theta[i] - start, theta[j] - start
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        expected = 1.0 if i == j else 0.0 if lengths == 0 else float(a @ b) / lengths
        assert ours[i, j] == pytest.approx(expected, abs=1e-12)
    np.testing.assert_array_equal(ours, ours.T)
    assert np.abs(ours).max() <= 1


def test_named_clients_are_rows_of_a_matrix() -> None:
    arrays, start = shared(4, 2), shared(1, 3)[0]
    arrays[1] = dict(reversed(arrays[1].items()))
    rows = np.stack([flat(client) for client in arrays])
    np.testing.assert_allclose(squared_distances(arrays), squared_distances(rows), rtol=1e-12)
    np.testing.assert_allclose(cosines(arrays, start), cosines(rows, flat(start)), atol=1e-12)


def test_values_that_are_not_finite_are_named() -> None:
    theta = np.zeros((3, 2))
    theta[1, 0] = np.inf
    with pytest.raises(ValueError, match=r"clients \[1\]: values that are not finite"):
        squared_distances(theta)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        squared_distances(np.zeros(3))
