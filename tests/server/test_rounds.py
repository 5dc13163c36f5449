"""The round loop with nodes that are functions: averages, faults, order, dtypes, sampling."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx
from hypothesis import given
from hypothesis import strategies as st

from server.errors import NoReplies
from server.events import Event, Events
from server.methods import Training
from server.rounds import Federation, to_numpy, to_record, train, train_round
from server.run import make_strategy
from server.trainings import Phase
from settings import Settings
from tests.flower import LocalGrid, record

CE = Training("cross_entropy", ())
START = {"w": np.zeros(3, np.float32), "n.running_var": np.ones(2, np.float32)}
METRICS = {
    "train-loss": 1.0,
    "seconds": 0.1,
    "validation-total": 4,
    "validation-correct": 1,
    "personal-validation-correct": 2,
}


def node(value: float, examples: int = 1, **metrics: float) -> Callable[[Message], RecordDict]:
    """A node that answers with `value` everywhere."""

    def answer(message: Message) -> RecordDict:
        sent = to_numpy(message.content.array_records["arrays"])
        arrays = {name: np.full_like(array, value) for name, array in sent.items()}
        values = {**METRICS, "num-examples": examples, **metrics}
        return RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(values)})

    return answer


def federation(
    nodes: dict[int, Callable], order: Callable = list, **settings: object
) -> tuple[Federation, list[Event]]:
    """Nodes 100, 101, ... hold the partitions 0, 1, ... in their order."""
    seen: list[Event] = []
    grid = LocalGrid({100 + i: answer for i, answer in nodes.items()}, order)
    where = {partition: 100 + partition for partition in nodes}
    return Federation(grid, where, Settings(clients=len(nodes), **settings), "run", Events(seen.append)), seen


def of_kind(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["event"] in kinds]


def run_round(
    nodes: dict[int, Callable], strategy: FedAvg | None = None, order: Callable = list
) -> tuple[dict, list[Event]]:
    place, events = federation(nodes, order)
    chosen = strategy or make_strategy(Phase(), place.settings)
    return to_numpy(train_round(place, chosen, Phase(), to_record(START), "cross_entropy", 1)), events


def test_mean_weighted_by_examples_by_hand() -> None:
    new, events = run_round({0: node(1, 1), 1: node(5, 3)})
    np.testing.assert_allclose(new["w"], 4.0)  # (1·1 + 3·5)/4
    assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in START.items()}
    (done,) = of_kind(events, "round")
    assert done["replied"] == done["sampled"] == [0, 1]
    assert done["validation_accuracy"] == 0.25
    assert done["bytes_up"] == done["bytes_down"] == 2 * 5 * 4


@hypothesis.settings(deadline=None, max_examples=25)
@given(st.permutations(range(4)), st.integers(0, 999))
def test_order_of_arrival_does_not_change_a_bit(order: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=4).astype(np.float32) ** 2
    nodes = {i: node(float(value), i + 1) for i, value in enumerate(values)}
    first, _ = run_round(nodes)
    other, _ = run_round(nodes, order=lambda ids: [ids[i] for i in order])
    np.testing.assert_array_equal(first["w"], other["w"])


def spoiled(change: Callable[[RecordDict], object]) -> Callable[[Message], RecordDict]:
    def answer(message: Message) -> RecordDict:
        content = node(1e6)(message)
        change(content)
        return content

    return answer


def raises(message: Message) -> RecordDict:
    raise RuntimeError("disk full")


@pytest.mark.parametrize(
    ("bad", "kind", "part"),
    [
        (raises, "failed", "disk full"),
        (node(np.nan), "refused", "not finite"),
        (node(1e6, -5), "refused", "num-examples"),
        (node(1e6, 0), "refused", "num-examples"),
        (node(-1.0), "refused", "running_var"),
        (spoiled(lambda c: c["arrays"].pop("w")), "refused", "missing arrays ['w']"),
        (spoiled(lambda c: c["arrays"].update(record(w=np.zeros(1, np.float32)))), "refused", "float32[1]"),
        (spoiled(lambda c: c["arrays"].update(record(more=np.zeros(1)))), "refused", "unknown arrays ['more']"),
        (spoiled(lambda c: c.update({"second": record(w=np.zeros(1))})), "refused", "array records"),
        (spoiled(lambda c: c["metrics"].pop("train-loss")), "refused", "train-loss = None"),
        (node(1e6, **{"validation-correct": 9}), "refused", "validation-correct = 9"),
        (spoiled(lambda c: c.pop("metrics")), "refused", "metric records"),
        (lambda message: RecordDict({}), "refused", "array records []"),
    ],
)
@pytest.mark.parametrize("strategy", [None, FedAvg, FedMedian])
def test_one_bad_reply_is_named_and_leaves_no_trace(
    bad: Callable, kind: str, part: str, strategy: type[FedAvg] | None
) -> None:
    settings = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    made = strategy(**settings) if strategy else None
    new, events = run_round({0: node(2), 1: bad, 2: node(4)}, made)
    np.testing.assert_allclose(new["w"], 3.0)
    (incident,) = of_kind(events, "refused", "failed")
    assert (incident["event"], incident["partition"], incident["node_id"]) == (kind, 1, 101)
    assert part in incident["reason"]
    assert of_kind(events, "round")[0]["replied"] == [0, 2]


def test_a_round_without_any_good_reply_ends_the_run_with_the_reasons() -> None:
    told = "failed client 0: error 2: disk full; refused client 1: w: values that are not finite"
    with pytest.raises(NoReplies, match=told):
        run_round({0: raises, 1: node(np.nan)})


def test_qffl_without_fairness_is_the_plain_mean_of_the_clients() -> None:
    """q = 0: Δ_k = L (w - w_k), h_k = L: (1 + 5) / 2 whoever has how many examples and whatever their losses."""
    nodes = {0: node(1, 1, **{"global-loss": 9.0}), 1: node(5, 3, **{"global-loss": 0.5})}
    place, _ = federation(nodes, aggregation="qffl", fairness=0.0)
    made = make_strategy(Phase(), place.settings)
    new = to_numpy(train_round(place, made, Phase(), to_record(START), "cross_entropy", 1))
    np.testing.assert_allclose(new["w"], 3.0, rtol=1e-6)


def test_qffl_by_hand() -> None:
    """q = 1, L = 1/0.5, w = (0, 0, 0), w_k = 1 and 5: Δ = F L (w - w_k), h = L² ‖w - w_k‖² + L F; no norm of n.var."""
    nodes = {0: node(1, 1, **{"global-loss": 2.0}), 1: node(5, 3, **{"global-loss": 0.5})}
    place, _ = federation(nodes, aggregation="qffl", fairness=1.0, learning_rate=0.5)
    made = make_strategy(Phase(), place.settings)
    new = to_numpy(train_round(place, made, Phase(), to_record(START), "cross_entropy", 1))
    delta = 2.0 * 2 * (0 - 1) + 0.5 * 2 * (0 - 5)
    h = (4 * 3 * 1 + 2 * 2.0) + (4 * 3 * 25 + 2 * 0.5)
    np.testing.assert_allclose(new["w"], -delta / h, rtol=1e-6)


@pytest.mark.parametrize("loss", [{}, {"global-loss": -1.0}, {"global-loss": float("nan")}])
def test_qffl_refuses_a_reply_without_a_possible_loss_and_goes_on(loss: dict[str, float]) -> None:
    nodes = {0: node(1, 1, **{"global-loss": 2.0}), 1: node(5, 3, **loss)}
    place, events = federation(nodes, aggregation="qffl", fairness=0.0)
    made = make_strategy(Phase(), place.settings)
    new = to_numpy(train_round(place, made, Phase(), to_record(START), "cross_entropy", 1))
    np.testing.assert_allclose(new["w"], 1.0, rtol=1e-6)
    (refused,) = of_kind(events, "refused")
    assert refused["partition"] == 1
    assert "global-loss" in refused["reason"]


def test_fedprox_tells_its_clients_how_strong_the_pull_is() -> None:
    place, _ = federation({0: node(1), 1: node(5, 3)}, aggregation="fedprox", proximal_mu=0.25)
    made = make_strategy(Phase(), place.settings)
    new = to_numpy(train_round(place, made, Phase(), to_record(START), "cross_entropy", 1))
    np.testing.assert_allclose(new["w"], 4.0)
    assert isinstance(place.grid, LocalGrid)
    assert {message.content.config_records["config"]["proximal-mu"] for message in place.grid.sent} == {0.25}


@pytest.mark.parametrize("strategy", [FedAvg, FedProx, FedAvgM, FedMedian, FedAdam])
def test_flowers_own_strategies_run_unchanged(strategy: type[FedAvg]) -> None:
    options = {"proximal_mu": 0.1} if strategy is FedProx else {}
    made = strategy(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **options)
    place, events = federation({0: node(1), 1: node(2), 2: node(3)}, rounds=3)
    if strategy is FedAdam:
        made.current_arrays = {name: array.copy() for name, array in START.items()}
    final = to_numpy(train(place, [made], CE, to_record(START)))
    assert [event["round"] for event in of_kind(events, "round")] == [1, 2, 3]
    assert all(np.isfinite(array).all() and array.dtype == np.float32 for array in final.values())


def test_a_fraction_is_sampled_by_partition_and_all_messages_carry_the_settings() -> None:
    place, events = federation({i: node(i) for i in range(10)}, fraction_train=0.3, rounds=4, seed=5)
    train(place, [make_strategy(Phase(), place.settings)], CE, to_record(START))
    cohorts = [event["sampled"] for event in of_kind(events, "round")]
    assert all(len(cohort) == 3 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert isinstance(place.grid, LocalGrid)
    for message in place.grid.sent:
        config = message.content.config_records["config"]
        assert config["fraction-train"] == 0.3
        assert config["run"] == "run"
