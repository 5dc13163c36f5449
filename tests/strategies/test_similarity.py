"""Equations 7 to 9 of pFedBBN against loops and numbers by hand; distances, cosines, and `mix`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import arrays as arrays_module
from strategies.arrays import mix
from strategies.distances import cosines, squared_distances
from strategies.pfedbbn import bn_distance, similarity_weights

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 7)
quick = settings(deadline=None, max_examples=30)


def statistics(clients: int, seed: int, dtype: str = "float64") -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    draw = np.random.default_rng(seed)
    layers = {"stem.bn": 3, "block.1.bn": 5, "last": 1}
    return [
        {name: (draw.normal(size=c).astype(dtype), draw.random(c).astype(dtype)) for name, c in layers.items()}
        for _ in range(clients)
    ]


def shared(clients: int, seed: int, dtype: str = "float32") -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    shapes = {"weight": (2, 3), "bias": (4,), "steps": ()}
    return [{name: draw.normal(size=s).astype(dtype) for name, s in shapes.items()} for _ in range(clients)]


def random_weights(clients: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(clients), clients)


def printed(distance: np.ndarray, tau: float) -> np.ndarray:
    """Equation 8, letter by letter."""
    size = len(distance)
    weights = np.zeros((size, size))
    for i in range(size):
        total = sum(np.exp(-distance[i, k] / tau) for k in range(size) if k != i)
        own = 1 / (1 + total)
        for j in range(size):
            weights[i, j] = own if i == j else np.exp(-distance[i, j] / tau) / total * (1 - own)
    return weights


def test_distance_by_hand() -> None:
    # layer a: means 5 apart (3, 4), variances 0; layer b: means 1, variances 2: (5 + 0)/2 and (1 + 2)/2, mean 2
    a = {"a": (np.zeros(2), np.ones(2)), "b": (np.zeros(1), np.array([1.0]))}
    b = {"a": (np.array([3.0, 4.0]), np.ones(2)), "b": (np.ones(1), np.array([3.0]))}
    np.testing.assert_allclose(bn_distance([a, b]), [[0, 2], [2, 0]], atol=1e-15)


@quick
@given(sizes, seeds, st.sampled_from(["float32", "float64"]))
def test_distance_against_a_loop(clients: int, seed: int, dtype: str) -> None:
    known = statistics(clients, seed, dtype)
    ours = bn_distance(known)
    for i, j in itertools.product(range(clients), repeat=2):
        total = 0.0
        for layer in known[0]:
            for part in (0, 1):
                difference = known[i][layer][part].astype(float) - known[j][layer][part].astype(float)
                total += 0.5 * float(np.sqrt(np.sum(difference**2)))
        assert ours[i, j] == pytest.approx(total / 3, abs=1e-12)
    np.testing.assert_array_equal(ours, ours.T)
    assert not np.diag(ours).any()
    assert ours.dtype == np.float64


@quick
@given(st.integers(2, 7), seeds)
def test_distance_and_weights_follow_the_order_of_clients(clients: int, seed: int) -> None:
    known = statistics(clients, seed)
    order = np.random.default_rng(seed).permutation(clients)
    ours, other = bn_distance(known), bn_distance([known[i] for i in order])
    np.testing.assert_allclose(other, ours[np.ix_(order, order)], atol=1e-12)
    np.testing.assert_allclose(
        similarity_weights(other), similarity_weights(ours)[np.ix_(order, order)], rtol=1e-9, atol=1e-12
    )


def test_layers_are_matched_by_name() -> None:
    first, second = statistics(2, 3)
    np.testing.assert_array_equal(bn_distance([first, dict(reversed(second.items()))]), bn_distance([first, second]))


@quick
@given(st.integers(2, 7), seeds, st.sampled_from([0.05, 1.0, 30.0, "median"]))
def test_weights_are_equation_8_as_printed(clients: int, seed: int, temperature: float | str) -> None:
    distance = bn_distance(statistics(clients, seed))
    tau = np.median(distance[np.triu_indices(clients, 1)]) if temperature == "median" else temperature
    ours = similarity_weights(distance, temperature)
    np.testing.assert_allclose(ours, printed(distance, float(tau)), atol=1e-12)
    np.testing.assert_allclose(ours.sum(1), 1, atol=1e-12)
    assert (ours >= 0).all()
    assert (ours.max(1) == np.diag(ours)).all(), "nobody is nearer to a client than it is itself"


def test_weights_by_hand() -> None:
    # the median of 1, 1, 2 is 1; row 0: e^0, e^-1, e^-2 over their sum
    distance = np.array([[0, 1, 2], [1, 0, 1], [2, 1, 0]], float)
    terms = np.exp([0, -1, -2])
    np.testing.assert_allclose(similarity_weights(distance)[0], terms / terms.sum(), rtol=1e-12)
    np.testing.assert_allclose(similarity_weights(np.array([[0, 2.0], [2.0, 0]]), 2.0)[0, 0], 1 / (1 + np.exp(-1)))


def test_one_client_equal_clients_and_far_clients() -> None:
    np.testing.assert_array_equal(bn_distance(statistics(1, 0)), [[0.0]])
    np.testing.assert_array_equal(similarity_weights(np.zeros((1, 1))), [[1.0]])
    same = statistics(1, 0) * 4
    np.testing.assert_array_equal(similarity_weights(bn_distance(same)), np.full((4, 4), 0.25))
    # four of five are equal: the median is 0, and the odd one keeps to itself
    most = bn_distance([*same, statistics(1, 1)[0]])
    expected = [[0.25, 0.25, 0.25, 0.25, 0]] * 4 + [[0, 0, 0, 0, 1]]
    np.testing.assert_allclose(similarity_weights(most), expected)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(similarity_weights(np.array([[0, 1e300], [1e300, 0]]), 1e-300), np.eye(2))


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "mean"])
def test_impossible_temperature(temperature: float | str) -> None:
    with pytest.raises(ValueError, match=r"temperature = .*; allowed is a positive, finite number or 'median'"):
        similarity_weights(np.zeros((2, 2)), temperature)


@pytest.mark.parametrize(
    "distance", [np.zeros(3), np.zeros((2, 3)), np.eye(2), -np.ones((2, 2)), np.full((2, 2), np.nan), np.zeros((0, 0))]
)
def test_what_is_no_distance_is_refused(distance: np.ndarray) -> None:
    with pytest.raises(ValueError, match="distances"):
        similarity_weights(distance)


def test_impossible_statistics_are_refused() -> None:
    one = {"a": (np.zeros(2), np.ones(2))}
    for other, part in [
        ({"a": (np.array([np.nan, 0]), np.ones(2))}, "a.mean: values that are not finite"),
        ({"a": (np.zeros(2), np.array([1, -1e-9]))}, "a.variance: negative"),
        ({"b": (np.zeros(2), np.ones(2))}, "client 1 has the names"),
        ({"a": (np.zeros(3), np.ones(3))}, "a.mean of client 1"),
    ]:
        with pytest.raises(ValueError, match=part):
            bn_distance([one, other])
    with pytest.raises(ValueError, match="nothing to compare"):
        bn_distance([])
    with pytest.raises(ValueError, match="nothing to compare"):
        bn_distance([{}])


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
    arrays = shared(clients, seed)
    for mixture, own in zip(mix(np.eye(clients), arrays), arrays, strict=True):
        for name, value in own.items():
            np.testing.assert_array_equal(mixture[name], value)
    for mixture in mix(random_weights(clients, seed), arrays[:1] * clients):
        for name, value in arrays[0].items():
            np.testing.assert_array_equal(mixture[name], value)


@quick
@given(st.integers(2, 6), seeds)
def test_mixtures_follow_the_order_of_clients(clients: int, seed: int) -> None:
    arrays, weights = shared(clients, seed, "float64"), random_weights(clients, seed)
    order = np.random.default_rng(seed).permutation(clients)
    other = mix(weights[np.ix_(order, order)], [arrays[i] for i in order])
    ours = mix(weights, arrays)
    for place, i in enumerate(order):
        for name in arrays[0]:
            np.testing.assert_allclose(other[place][name], ours[i][name], atol=1e-12)


def test_mixtures_do_not_depend_on_blocks_or_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, weights = shared(3, 1, "float64"), random_weights(3, 1)
    whole, far = mix(weights, arrays), squared_distances(arrays)
    monkeypatch.setattr(distances, "BLOCK", 6)  # two columns at a time
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
    with pytest.raises(ValueError, match="no client"):
        flat([])
    with pytest.raises(ValueError, match="do not fit 0 clients"):
        mix(np.zeros((0, 0)), [])


def test_flat() -> None:
    first, second = shared(2, 0)
    matrix = flat([first, dict(reversed(second.items()))])
    assert matrix.shape == (2, 11)
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix[1], np.concatenate([second[n].ravel() for n in ("weight", "bias", "steps")]))
    assert flat([{}, {}]).shape == (2, 0)


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
    theta[-1] = start  # has not moved
    ours = cosines(theta, start)
    for i, j in itertools.product(range(clients), repeat=2):
        a, b = theta[i] - start, theta[j] - start
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        expected = 1.0 if i == j else 0.0 if lengths == 0 else float(a @ b) / lengths
        assert ours[i, j] == pytest.approx(expected, abs=1e-12)
    np.testing.assert_array_equal(ours, ours.T)
    assert np.abs(ours).max() <= 1


def test_named_clients_are_their_flat_rows() -> None:
    arrays, start = shared(4, 2), shared(1, 3)[0]
    np.testing.assert_allclose(squared_distances(arrays), squared_distances(flat(arrays)), rtol=1e-12)
    np.testing.assert_allclose(cosines(arrays, start), cosines(flat(arrays), flat([start])[0]), atol=1e-12)


def test_values_that_are_not_finite_are_named() -> None:
    theta = np.zeros((3, 2))
    theta[1, 0] = np.inf
    with pytest.raises(ValueError, match=r"clients \[1\]: values that are not finite"):
        squared_distances(theta)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        squared_distances(np.zeros(3))


@quick
@given(seeds)
def test_what_the_package_offers(seed: int) -> None:
    known = statistics(3, seed)
    weights = similarity.similarity_weights(similarity.bn_distance(known))
    assert len(similarity.mix(weights, shared(3, seed))) == 3
