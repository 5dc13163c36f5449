"""What all server aggregations and all collaborations have in common, through Flower's interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import InconsistentMessageReplies
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from fedtta.settings import Settings
from fedtta.strategies import AGGREGATIONS, COLLABORATIONS, Aggregation, Collaborative, aggregation_names, facts
from fedtta.strategies.arrays import Named, as_numpy, mix
from tests.flower import LocalGrid, record, reply, request
from tests.strategies.nodes import Device, begun, rounds, shared_reply

quick = limits(deadline=None, max_examples=10)
each_aggregation = pytest.mark.parametrize("name", AGGREGATIONS)
each_collaboration = pytest.mark.parametrize("name", COLLABORATIONS)

START = {
    "z.w": np.float32([[1, -2, 0.5]]),
    "bn.running_var": np.ones(2, np.float32),
    "bn.running_mean": np.zeros(2, np.float32),
    "a.b": np.float64([0.5]),
}
#: q = 0: the steps of q-FedAvg are then those of a mean.
PLAIN = Settings(fairness=0.0)
MANY = 8


# -- aggregations


def made(name: str, settings: Settings = PLAIN) -> Aggregation:
    nodes = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    return AGGREGATIONS[name].from_settings(settings, **nodes)


def trained(number: int, seed: int = 0) -> list[Named]:
    draw = np.random.default_rng(seed)
    return [{n: (v + abs(draw.normal(size=v.shape))).astype(v.dtype) for n, v in START.items()} for _ in range(number)]


def answers(models: list[Named], examples: list[int] | None = None) -> list[Message]:
    counts = examples or list(range(1, len(models) + 1))
    return [
        reply(record(**model), count, node, **{"global-loss": 1.0 + count})
        for node, (model, count) in enumerate(zip(models, counts, strict=True))
    ]


def one_round(strategy: Aggregation, replies: list[Message], start: Named = START, number: int = 1) -> Named:
    grid, config = LocalGrid({node: lambda message: None for node in range(MANY)}), ConfigRecord({"learning-rate": 0.1})
    list(strategy.configure_train(number, record(**start), config, grid))
    arrays, _ = strategy.aggregate_train(number, replies)
    assert arrays is not None
    return as_numpy(arrays)


@each_aggregation
@quick
@given(st.permutations(range(MANY)), st.integers(0, 999))
def test_replies_in_any_order_give_one_model_within_their_range(name: str, order: list[int], seed: int) -> None:
    models = trained(MANY, seed)
    replies = answers(models)
    ours, other = one_round(made(name), replies), one_round(made(name), [replies[i] for i in order])
    assert {n: (v.dtype, v.shape) for n, v in ours.items()} == {n: (v.dtype, v.shape) for n, v in START.items()}
    for key, value in ours.items():
        np.testing.assert_allclose(value, other[key], rtol=1e-5, atol=1e-6)
        assert value.tobytes() == other[key].tobytes() or not AGGREGATIONS[name].byzantine_robust
        stack = np.stack([START[key], *(model[key] for model in models)])
        assert ((value >= stack.min(0) - 1e-6) & (value <= stack.max(0) + 1e-6)).all()


@each_aggregation
@pytest.mark.parametrize("more", [0, 1, 4])
def test_equal_clients_give_their_model(name: str, more: int) -> None:
    """One client, where one is enough."""
    (model,) = trained(1)
    count = AGGREGATIONS[name].min_clients(PLAIN) + more
    for key, value in one_round(made(name), answers([model] * count)).items():
        np.testing.assert_allclose(value, model[key], rtol=1e-6)


@each_aggregation
def test_messages_say_what_clients_need(name: str) -> None:
    strategy = made(name, Settings(proximal_mu=0.25))
    grid, config = LocalGrid({4: lambda message: None, 2: lambda message: None}), ConfigRecord({"learning-rate": 0.1})
    messages = list(strategy.configure_train(7, record(**START), config, grid))
    assert {message.metadata.dst_node_id for message in messages} == {2, 4}
    for message in messages:
        said = message.content["config"]
        assert (said["server-round"], said["learning-rate"]) == (7, 0.1)
        assert said["proximal-mu"] == strategy.proximal_mu == (0.25 if name == "fedprox" else 0.0)
        assert {key: array.numpy().tobytes() for key, array in message.content["arrays"].items()} == {
            key: value.tobytes() for key, value in START.items()
        }


@each_aggregation
def test_failed_replies_count_for_nothing_and_metrics_are_flowers_mean(name: str) -> None:
    replies = answers(trained(MANY))
    failed = Message(Error(code=2, reason="broken"), reply_to=request(3))
    ours = one_round(made(name), [failed, *replies])
    for key, value in one_round(made(name), replies).items():
        assert value.tobytes() == ours[key].tobytes()
    strategy = made(name)
    one_round(strategy, replies)
    _, metrics = strategy.aggregate_train(2, replies)
    assert metrics == flower.FedAvg().aggregate_train(2, replies)[1]
    assert strategy.aggregate_train(3, [failed]) == strategy.aggregate_train(3, []) == (None, None)


@each_aggregation
def test_replies_that_do_not_fit_are_refused(name: str) -> None:
    first, *others = trained(MANY)
    few = {key: value for key, value in first.items() if key != "z.w"}
    with pytest.raises((ValueError, InconsistentMessageReplies)):
        one_round(made(name), answers([few, *others]))
    with pytest.raises(ValueError, match=r"shape|fit"):
        one_round(made(name), answers([{**first, "z.w": np.zeros((2, 2), np.float32)}, *others]))
    for metric in AGGREGATIONS[name].client_metrics:
        replies = answers([first, *others])
        for message in replies:
            del message.content["metrics"][metric]
        with pytest.raises(ValueError, match=f"node 0: metric {metric} = None"):
            one_round(made(name), replies)


@each_aggregation
def test_a_restored_state_continues_with_the_same_bits(name: str) -> None:
    def run(strategy: Aggregation, model: Named, numbers: range) -> Named:
        for number in numbers:
            model = one_round(strategy, answers(trained(MANY, number)), model, number)
        return model

    strategy, again = made(name), made(name)
    assert strategy.state_arrays() == {}
    half = run(strategy, START, range(1, 3))
    state = {group: {n: v.copy() for n, v in named.items()} for group, named in strategy.state_arrays().items()}
    whole = run(strategy, half, range(3, 5))
    again.load_state_arrays(state)
    assert {group: list(named) for group, named in again.state_arrays().items()} == {
        g: list(n) for g, n in state.items()
    }
    for key, value in run(again, half, range(3, 5)).items():
        assert value.tobytes() == whole[key].tobytes()
    with pytest.raises(ValueError, match="no state"):
        made(name).load_state_arrays({"velocity": {}})


def test_the_registry_states_which_aggregations_are_robust() -> None:
    assert Settings.aggregation in aggregation_names()
    robust = aggregation_names(byzantine_robust=True)
    assert robust == tuple(name for name, one in AGGREGATIONS.items() if one.robust_aggregator(PLAIN))
    assert [AGGREGATIONS[name].min_clients(PLAIN) for name in robust] == [3, 5, 5, 6]
    assert {name: one.client_metrics for name, one in AGGREGATIONS.items() if one.client_metrics} == {
        "qffl": ("global-loss",)
    }
    assert [name for name, one in AGGREGATIONS.items() if one.aggregates_partial] == ["fedavg"]


@pytest.mark.parametrize(
    ("name", "changes", "attributes"),
    [
        ("fedprox", {"proximal_mu": 0.3}, {"proximal_mu": 0.3}),
        ("fedavgm", {"server_momentum": 0.5}, {"server_momentum": 0.5}),
        ("qffl", {"fairness": 2.0}, {"q": 2.0}),
        ("gma", {"mask_threshold": 0.4}, {"threshold": 0.4}),
        ("fedtrimmedavg", {"trim_fraction": 0.3}, {"aggregator.fraction": 0.3}),
        ("krum", {"krum_malicious": 2, "krum_keep": 4}, {"aggregator.malicious": 2, "aggregator.keep": 1}),
        ("multikrum", {"krum_malicious": 2, "krum_keep": 4}, {"aggregator.malicious": 2, "aggregator.keep": 4}),
    ],
)
def test_strategies_are_made_from_settings(name: str, changes: dict[str, Any], attributes: dict[str, Any]) -> None:
    strategy = made(name, Settings(**changes))
    for path, value in attributes.items():
        found: Any = strategy
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value


def test_flowers_own_strategies_have_the_default_facts() -> None:
    found = facts(flower.FedAdagrad())
    assert (found.client_metrics, found.state_arrays(), found.byzantine_robust) == ((), {}, False)
    mine = made("qffl")
    assert facts(mine) is mine


# -- collaborations


def personal(strategy: Collaborative) -> dict[int, Named]:
    return {node: as_numpy(arrays) for node, arrays in strategy.personal.items()}


@each_collaboration
def test_two_rounds_of_a_collaboration(name: str) -> None:
    devices = {70 - i: Device(i, i + 1) for i in range(4)}  # ids fall: the order is the grid's
    strategy, grid = begun(name), LocalGrid(devices)
    rounds(strategy, grid, range(1, 2))
    assert strategy.node_ids == [70, 69, 68, 67]
    assert strategy.weights is not None
    np.testing.assert_allclose(strategy.weights.sum(1), 1, atol=1e-12)
    assert (strategy.weights >= 0).all()
    mixtures = mix(strategy.weights, [device.state for device in devices.values()])
    before = personal(strategy)
    for node, mixture in zip(strategy.node_ids, mixtures, strict=True):
        for key, value in mixture.items():
            np.testing.assert_allclose(before[node][key], value, rtol=1e-6)
            assert before[node][key].dtype == np.float32
    rounds(strategy, grid, range(2, 3))
    for node, device in devices.items():
        assert device.received == [{"config", "arrays"}, {"config", "shared"}]
        np.testing.assert_array_equal(device.state["gamma"], before[node]["gamma"] + device.step)


@each_collaboration
@quick
@given(st.permutations(range(5)))
def test_weights_and_mixtures_follow_the_order_of_nodes(name: str, order: list[int]) -> None:
    ours, other = begun(name), begun(name)
    rounds(ours, LocalGrid({i: Device(i, i + 1) for i in range(5)}), range(1, 3))
    rounds(other, LocalGrid({i: Device(i, i + 1) for i in order}), range(1, 3))
    assert ours.weights is not None
    np.testing.assert_allclose(other.weights, ours.weights[np.ix_(order, order)], atol=1e-9)
    for node, arrays in personal(ours).items():
        for key, value in arrays.items():
            np.testing.assert_allclose(personal(other)[node][key], value, rtol=1e-5)


@each_collaboration
@pytest.mark.parametrize("number", [1, 3])
def test_equal_nodes_keep_their_arrays(name: str, number: int) -> None:
    devices = {i: Device(1) for i in range(number)}
    strategy = begun(name)
    rounds(strategy, LocalGrid(devices), range(1, 2))
    for node, device in devices.items():
        for key, value in device.state.items():
            np.testing.assert_array_equal(personal(strategy)[node][key], value)


@each_collaboration
def test_nothing_to_share(name: str) -> None:
    strategy = begun(name)
    statistics = {"normalisation": Device(1).normalisation}
    strategy.aggregate_train(1, [shared_reply(0, **statistics), shared_reply(1, shared=record(), **statistics)])
    assert strategy.weights is not None
    np.testing.assert_allclose(strategy.weights.sum(1), 1)
    messages = list(strategy.configure_train(2, record(), ConfigRecord({}), LocalGrid({0: Device(0), 1: Device(1)})))
    assert all("shared" not in message.content for message in messages)


@each_collaboration
def test_replies_of_a_collaboration_that_do_not_fit_are_refused(name: str) -> None:
    def answer(node: int, **metrics: float) -> Message:
        shared = record(w=np.zeros(node))
        sent = {"shared": shared, "start": shared, "normalisation": Device(1).normalisation}
        return shared_reply(node, **{**sent, **metrics})

    strategy = begun(name)
    with pytest.raises(ValueError, match="w of client 1"):
        strategy.aggregate_train(1, [answer(1), answer(2)])
    with pytest.raises(ValueError, match="node 9: num-examples = 0"):
        strategy.aggregate_train(1, [answer(9, examples=0)])
    assert (strategy.weights, strategy.personal) == (None, {})


@each_collaboration
def test_state_continues_under_new_node_ids(name: str) -> None:
    devices = {10 + i: Device(i, i + 1) for i in range(3)}
    strategy, again = begun(name), begun(name)
    rounds(strategy, LocalGrid(devices), range(1, 3))
    saved = strategy.state_arrays({i: 10 + i for i in range(3)})
    assert all(isinstance(value, np.ndarray) for value in saved.values())
    rounds(strategy, LocalGrid(devices), range(3, 5))
    renamed = {i: 90 - i for i in range(3)}
    again.load_state_arrays(saved, renamed)
    restored = again.state_arrays(renamed)
    assert {key: value.tobytes() for key, value in restored.items()} == {k: v.tobytes() for k, v in saved.items()}
    others = {90 - i: Device(i, i + 1) for i in range(3)}
    rounds(again, LocalGrid(others), range(3, 5))
    np.testing.assert_array_equal(again.weights, strategy.weights)
    for i in range(3):
        for key, value in devices[10 + i].state.items():
            np.testing.assert_array_equal(others[90 - i].state[key], value)


def test_what_each_collaboration_needs() -> None:
    assert {name for name, rule in COLLABORATIONS.items() if rule.needs_statistics} == {"pfedbbn"}
    assert {name for name, rule in COLLABORATIONS.items() if rule.needs_start} == {"fedavgm", "pfedgraph"}
    assert {name: rule().proximal for name, rule in COLLABORATIONS.items() if rule().proximal} == {"fedprox": 0.01}


@pytest.mark.parametrize(
    ("known", "name", "options"),
    [
        (COLLABORATIONS, "fedprox", {"proximal": -0.1}),
        (COLLABORATIONS, "fedavgm", {"momentum": 1.0}),
        (COLLABORATIONS, "fedamp", {"sigma": 0.0}),
        (COLLABORATIONS, "fedamp", {"alpha": -1.0}),
        (COLLABORATIONS, "pfedgraph", {"alpha": float("nan")}),
        (COLLABORATIONS, "pfedbbn", {"temperature": 0.0}),
        (AGGREGATIONS, "fedprox", {"proximal_mu": -1}),
        (AGGREGATIONS, "fedavgm", {"server_momentum": 1}),
        (AGGREGATIONS, "qffl", {"q": -1.0}),
        (AGGREGATIONS, "qffl", {"learning_rate": 0.0}),
        (AGGREGATIONS, "gma", {"threshold": -0.1}),
        (AGGREGATIONS, "gma", {"threshold": 1.1}),
    ],
)
def test_impossible_options(known: dict[str, Any], name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed is"):
        known[name](**options)
