"""The weights of FedAMP and pFedGraph, and the step of q-FedAvg, against loops, scipy and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from strategies import QFFL, FedAvgM, weighted_mean
from strategies.fedamp import fedamp_weights
from strategies.fedavg import FedProx
from strategies.pfedgraph import pfedgraph_weights, project_simplex
from strategies.qffl import q_fedavg
from tests.flower import LocalGrid, record, reply

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 7)
quick = settings(deadline=None, max_examples=30)


def row_stochastic(weights: np.ndarray) -> None:
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    assert (weights >= 0).all()


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


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [[1.0, 1.0]]])
def test_pfedgraph_refuses_shares(shares: list) -> None:
    with pytest.raises(ValueError, match="data shares"):
        pfedgraph_weights(np.eye(2), np.zeros(2), shares)


def test_pfedgraph_refuses_alpha() -> None:
    with pytest.raises(ValueError, match="alpha = -1"):
        pfedgraph_weights(np.eye(2), np.zeros(2), [1, 1], alpha=-1)


@quick
@given(st.integers(2, 6), seeds)
def test_weights_follow_the_order_of_clients(clients: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    theta, start, counts = draw.normal(size=(clients, 4)), draw.normal(size=4), draw.integers(1, 9, clients)
    order = draw.permutation(clients)
    both = np.ix_(order, order)
    np.testing.assert_allclose(fedamp_weights(theta[order]), fedamp_weights(theta)[both], atol=1e-10)
    ours = pfedgraph_weights(theta, start, counts)
    np.testing.assert_allclose(pfedgraph_weights(theta[order], start, counts[order]), ours[both], atol=1e-10)


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
    assert (ours["running_var"] >= 0).all()
    if q == 0:
        for name, value in weighted_mean(trained).items():
            np.testing.assert_allclose(ours[name], value, atol=1e-12)


def test_q_fedavg_counts_the_worse_client_more() -> None:
    # steps L F^q / Σ h with norms 1: Σ h = (2·1 + 2·2) + (4·1 + ...): see below
    start, trained = {"w": np.zeros(1)}, [{"w": np.ones(1)}, {"w": -np.ones(1)}]
    # L = 2, q = 1: h = 4 + 2 F; F = (3, 1): Σ h = 10 + 6 = 16, Σ Δ = 2·3·(-1) + 2·1·1 = -4: w = 1/4
    np.testing.assert_allclose(q_fedavg(start, trained, [3.0, 1.0], 1.0, 2.0)["w"], [0.25], atol=1e-9)


def test_q_fedavg_refuses() -> None:
    start, one = models(2, 0)
    with pytest.raises(ValueError, match="2 losses do not fit 1 clients"):
        q_fedavg(start, [one], [1.0, 1.0], 1, 1)
    with pytest.raises(ValueError, match="losses"):
        q_fedavg(start, [one], [-1.0], 1, 1)
    with pytest.raises(ValueError, match="names"):
        q_fedavg(start, [{"w": one["w"]}], [1.0], 1, 1)


def everyone(**options: object) -> dict[str, object]:
    return {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, **options}


def test_qffl_in_flower_is_flowers_own_without_batchnorm() -> None:
    start, *trained = ({"a": m["w"], "b": m["w"][0] * 2} for m in models(4, 5, "float32"))
    grid = LocalGrid(dict.fromkeys([3, 1, 2], lambda message: None))
    ours = QFFL(**everyone())
    other = flower.QFedAvg(0.05, q=1.0, train_loss_key="global-loss", **everyone())
    found = []
    for each in (ours, other):
        messages = list(each.configure_train(1, record(**start), ConfigRecord({"learning-rate": 0.05}), grid))
        assert {message.metadata.dst_node_id for message in messages} == {1, 2, 3}
        replies = [
            reply(record(**model), 10, node, **{"global-loss": loss})
            for node, (model, loss) in enumerate(zip(trained, (0.5, 2.0, 1.0), strict=True))
        ]
        arrays, metrics = each.aggregate_train(1, replies)
        found.append((arrays, metrics))
    for name in start:
        np.testing.assert_allclose(found[0][0][name].numpy(), found[1][0][name].numpy(), rtol=2e-5)
        assert found[0][0][name].numpy().dtype == np.float32
    assert found[0][1]["global-loss"] == pytest.approx(3.5 / 3)


def test_qffl_names_what_is_missing() -> None:
    grid, model = LocalGrid({1: lambda message: None}), {"w": np.zeros(2)}
    with pytest.raises(ValueError, match="learning rate None"):
        list(QFFL(**everyone()).configure_train(1, record(**model), ConfigRecord({}), grid))
    strategy = QFFL(learning_rate=0.1, **everyone())
    with pytest.raises(ValueError, match="configure_train has to come before"):
        strategy.aggregate_train(1, [reply(record(**model), **{"global-loss": 1.0})])
    list(strategy.configure_train(1, record(**model), ConfigRecord({}), grid))
    with pytest.raises(ValueError, match="node 7: metric global-loss = None"):
        strategy.aggregate_train(1, [reply(record(**model), node=7)])
    assert strategy.aggregate_train(1, []) == (None, None)
    for bad in ({"q": -1.0}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match="allowed"):
            QFFL(**bad)


def test_fedprox_sends_its_weight() -> None:
    grid = LocalGrid({1: lambda message: None})
    messages = list(FedProx(**everyone()).configure_train(1, record(w=np.zeros(1)), ConfigRecord({}), grid))
    assert messages[0].content["config"]["proximal-mu"] == 0.01
    with pytest.raises(ValueError, match="proximal_mu = -1"):
        FedProx(-1)


def test_fedavgm_moves_on_and_averages_statistics_plainly() -> None:
    grid = LocalGrid({1: lambda message: None})
    made = FedAvgM(0.9, **everyone())
    with pytest.raises(ValueError, match="server_momentum = 1"):
        FedAvgM(1)
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
