"""The weights of FedAMP, pFedGraph and pFedBBN, against loops, scipy and numbers by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedtta.strategies.fedamp import fedamp_weights
from fedtta.strategies.pfedbbn import bn_distance, similarity_weights
from fedtta.strategies.pfedgraph import pfedgraph_weights, project_simplex

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 7)
quick = settings(deadline=None, max_examples=30)


def row_stochastic(weights: np.ndarray) -> None:
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    assert (weights >= 0).all()


# -- FedAMP


@quick
@given(sizes, seeds)
def test_fedamp_against_a_loop(clients: int, seed: int) -> None:
    theta = np.random.default_rng(seed).normal(size=(clients, 4))
    squared = [[float(((a - b) ** 2).sum()) for b in theta] for a in theta]
    sigma = float(np.median([squared[i][j] for i in range(clients) for j in range(clients) if i != j] or [1.0]))
    expected = np.zeros((clients, clients))
    for i in range(clients):
        for j in range(clients):
            if j != i:
                expected[i, j] = sigma / clients / sigma * np.exp(-squared[i][j] / sigma)
        expected[i, i] = 1 - expected[i].sum()
    ours = fedamp_weights(theta)
    np.testing.assert_allclose(ours, expected, atol=1e-10)
    np.testing.assert_allclose(ours, fedamp_weights(theta, sigma, sigma / clients), atol=1e-10)
    row_stochastic(ours)
    assert (np.diag(ours) >= 1 / clients - 1e-12).all()


def test_fedamp_by_hand() -> None:
    # ‖θ_0 - θ_1‖² = 4, σ = 2, α = 1: W_01 = (1/2) e^-2
    given_away = 0.5 * np.exp(-2)
    ours = fedamp_weights(np.array([[0.0], [2.0]]), sigma=2, alpha=1)
    np.testing.assert_allclose(ours, [[1 - given_away, given_away], [given_away, 1 - given_away]], rtol=1e-12)


def test_fedamp_when_most_clients_are_equal() -> None:
    np.testing.assert_array_equal(fedamp_weights(np.ones((1, 3))), [[1.0]])
    np.testing.assert_allclose(fedamp_weights(np.ones((4, 3))), np.full((4, 4), 0.25), atol=1e-15)
    # the median is 0: equal ones share, the odd one keeps to itself
    expected = np.full((5, 5), 0.2) + np.diag([0.2, 0.2, 0.2, 0.2, 0.8])
    expected[4, :4] = expected[:4, 4] = 0
    np.testing.assert_allclose(fedamp_weights(np.array([[1.0], [1.0], [1.0], [1.0], [9.0]])), expected, atol=1e-15)
    assert fedamp_weights(np.zeros((3, 0))).shape == (3, 3), "nothing to share is equal"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sigma", "alpha"])
def test_fedamp_refuses(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = .*; allowed is a positive, finite number"):
        fedamp_weights(np.zeros((2, 1)), **{name: value})


def test_fedamp_step_that_gives_away_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"alpha = 3: .* allowed is up to 1$"):
        fedamp_weights(np.zeros((3, 1)), sigma=2, alpha=3)  # two others at distance 0: α/σ ≤ 1/2
    row_stochastic(fedamp_weights(np.zeros((3, 1)), sigma=2, alpha=1))


# -- pFedGraph


@quick
@given(st.integers(1, 6), seeds, st.sampled_from([0.1, 1.0, 20.0]))
def test_projection_against_an_optimiser(size: int, seed: int, scale: float) -> None:
    point = scale * np.random.default_rng(seed).normal(size=size)
    ours = project_simplex(point[None])[0]
    found = minimize(
        lambda w: ((w - point) ** 2).sum() / scale**2,
        np.full(size, 1 / size),
        jac=lambda w: 2 * (w - point) / scale**2,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(size)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    np.testing.assert_allclose(ours, found.x, atol=1e-5)
    assert ((ours - point) ** 2).sum() <= ((found.x - point) ** 2).sum() + 1e-9 * scale**2


@quick
@given(sizes, seeds, st.sampled_from([1e-3, 1.0, 1e12]))
def test_projection_satisfies_the_conditions_of_optimality(size: int, seed: int, scale: float) -> None:
    points = scale * np.random.default_rng(seed).normal(size=(3, size))
    ours = project_simplex(points)
    row_stochastic(ours)
    for w, v in zip(ours, points, strict=True):
        # w = v - t where w > 0, and v ≤ t elsewhere
        threshold = (v - w)[w > 0]
        np.testing.assert_allclose(threshold, threshold[0], rtol=1e-9, atol=1e-9)
        assert (v[w == 0] <= threshold[0] + 1e-9 * scale).all()


def test_projection_by_hand() -> None:
    # inside already; one outside; (0.9, 0.5): t = 0.2; equal values: uniform
    points = np.array([[0.25, 0.75, 0.0], [5.0, 0.0, -1.0], [0.9, 0.5, -3.0], [7.0, 7.0, 7.0]])
    third = 1 / 3
    expected = [[0.25, 0.75, 0], [1, 0, 0], [0.7, 0.3, 0], [third, third, third]]
    np.testing.assert_allclose(project_simplex(points), expected, atol=1e-15)
    with pytest.raises(ValueError, match="finite"):
        project_simplex(np.array([[np.nan, 0]]))
    with pytest.raises(ValueError, match=r"shape \(2, 0\)"):
        project_simplex(np.zeros((2, 0)))


@quick
@given(st.integers(1, 6), seeds, st.sampled_from([0.0, 0.3, 1.25, 8.0]))
def test_pfedgraph_minimises_its_objective(clients: int, seed: int, alpha: float) -> None:
    draw = np.random.default_rng(seed)
    theta, start, counts = draw.normal(size=(clients, 3)), draw.normal(size=3), draw.integers(1, 50, clients)
    ours, p = pfedgraph_weights(theta, start, counts, alpha), counts / counts.sum()
    row_stochastic(ours)
    moved = theta - start
    unit = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    cosine = unit @ unit.T

    def objective(i: int, w: np.ndarray) -> float:
        return float(((w - p) ** 2).sum() - alpha * (w * cosine[i]).sum())

    for i in range(clients):
        for other in draw.dirichlet(np.full(clients, 0.5), 50):
            # a convex problem: nearby points of the simplex are no better
            assert objective(i, ours[i]) <= objective(i, 0.9 * ours[i] + 0.1 * other) + 1e-12


def test_pfedgraph_by_hand() -> None:
    # moved right, right, up; p = (1/4, 1/4, 1/2), α = 1: row 0 = Π(3/4, 3/4, 1/2) = less 1/3 each
    theta, start = np.array([[2.0, 1.0], [5.0, 1.0], [1.0, 3.0]]), np.array([1.0, 1.0])
    ours = pfedgraph_weights(theta, start, [10, 10, 20], alpha=1.0)
    np.testing.assert_allclose(ours[0], [5 / 12, 5 / 12, 2 / 12], atol=1e-12)
    np.testing.assert_allclose(ours[2], [1 / 12, 1 / 12, 10 / 12], atol=1e-12)  # Π(1/4, 1/4, 1)
    np.testing.assert_allclose(pfedgraph_weights(theta, start, [1, 1, 2], 0.0), [[0.25, 0.25, 0.5]] * 3, atol=1e-12)
    np.testing.assert_array_equal(pfedgraph_weights(theta[:1], start, [7]), [[1.0]])


def test_pfedgraph_of_clients_that_have_not_moved() -> None:
    # cos = I: Π(p + (α/2) e_i) with p = 1/2: (1/2 + 0.3, 1/2) less 0.15
    ours = pfedgraph_weights(np.ones((2, 3)), np.ones(3), [4, 4], alpha=0.6)
    np.testing.assert_allclose(ours, [[0.65, 0.35], [0.35, 0.65]], atol=1e-12)


@quick
@given(st.integers(1, 6), seeds, st.sampled_from([-1.0, 0.0, 0.3, 0.9, 1.0]))
def test_pfedgraph_counts_high_cosines_as_one(clients: int, seed: int, above: float) -> None:
    draw = np.random.default_rng(seed)
    theta, start, counts = draw.normal(size=(clients, 2)), draw.normal(size=2), draw.integers(1, 50, clients)
    point = np.zeros((clients, clients))
    for i, j in itertools.product(range(clients), repeat=2):
        a, b = theta[i] - start, theta[j] - start
        cosine = float(a @ b) / (np.sqrt(a @ a) * np.sqrt(b @ b))
        point[i, j] = counts[j] / counts.sum() + 1.25 / 2 * (1.0 if i == j or cosine > above else cosine)
    ours = pfedgraph_weights(theta, start, counts, round_above=above)
    np.testing.assert_allclose(ours, project_simplex(point), atol=1e-9)
    row_stochastic(ours)
    if above == 1:
        np.testing.assert_array_equal(ours, pfedgraph_weights(theta, start, counts))


def test_pfedgraph_as_published_by_hand() -> None:
    # Directions (1, 0), (12, 5)/13, (0, 1): cosines 12/13 = 0.923 > 0.9, so 1, and 0, 5/13. p = 1/3, α = 1.2:
    # row 0 = Π(1/3 + 0.6, 1/3 + 0.6, 1/3) = (1/2, 1/2, 0): less 13/30, and 1/3 < 13/30.
    theta = np.array([[1.0, 0.0], [12.0, 5.0], [0.0, 1.0]])
    ours = pfedgraph_weights(theta, np.zeros(2), [1, 1, 1], alpha=1.2, round_above=0.9)
    np.testing.assert_allclose(ours[0], [1 / 2, 1 / 2, 0], atol=1e-12)
    # row 2 keeps 0 and 5/13: 1/3, 1/3 + 3/13, 1/3 + 3/5, each less 18/65
    expected = np.array([0, 3 / 13, 3 / 5]) + 1 / 3 - 18 / 65
    np.testing.assert_allclose(ours[2], expected, atol=1e-12)
    without = pfedgraph_weights(theta, np.zeros(2), [1, 1, 1], alpha=1.2)
    assert without[0, 0] > without[0, 1] > 0.4


@pytest.mark.parametrize("above", [-1.1, 1.5, float("nan")])
def test_pfedgraph_refuses_thresholds_that_are_no_cosine(above: float) -> None:
    with pytest.raises(ValueError, match=r"round_above = .*; allowed is a number from -1 to 1"):
        pfedgraph_weights(np.eye(2), np.zeros(2), [1, 1], round_above=above)


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [[1.0, 1.0]]])
def test_pfedgraph_refuses_shares(shares: list) -> None:
    with pytest.raises(ValueError, match="data shares"):
        pfedgraph_weights(np.eye(2), np.zeros(2), shares)


# -- pFedBBN


def statistics(clients: int, seed: int, dtype: str = "float64") -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    draw = np.random.default_rng(seed)
    layers = {"stem.bn": 3, "block.1.bn": 5, "last": 1}
    return [
        {name: (draw.normal(size=c).astype(dtype), draw.random(c).astype(dtype)) for name, c in layers.items()}
        for _ in range(clients)
    ]


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
    assert (ours.max(1) == np.diag(ours)).all(), "no client is nearer to a client than itself"


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
