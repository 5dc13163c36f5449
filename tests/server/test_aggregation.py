"""Server aggregation by name: what is refused, what a round needs, and state that survives a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from fedtta.messages.flower import NodesView
from fedtta.messages.record import MOST
from fedtta.messages.requests import Adapt, Evaluate, RefineRates, Request, Summarize, Train
from fedtta.server.aggregation import (
    check_aggregation,
    load_strategy_records,
    make_strategy,
    most_examples,
    needed_replies,
    robust_aggregator,
    strategy_records,
)
from fedtta.server.checkpoints import Checkpoint, Position, read_checkpoint, write_checkpoint
from fedtta.server.events import QuorumMissed, RunError
from fedtta.server.methods import plan
from fedtta.server.trainings import TRAININGS, TrainingStage
from fedtta.settings import Settings, SettingsError
from fedtta.strategies import AGGREGATIONS, FedAvg, RobustFedAvg, aggregation_names
from fedtta.strategies.aggregation import NumpyAggregation
from tests.flower import record, reply
from tests.server.test_nodes import IDENTITY, raises
from tests.server.test_rounds import Place, client

LEAST = {"fedmedian": 3, "fedtrimmedavg": 5, "krum": 5, "multikrum": 6}
#: What a strategy replaces in each round, or only saves bandwidth with.
REPLACED = {"_sent", "_lipschitz", "sent_bytes", "_met", "_asked"}


def test_an_unknown_aggregation_is_refused_before_training() -> None:
    with pytest.raises(SettingsError, match=r"aggregation = 'fedavgg': allowed are fedavg, .*multikrum"):
        plan(Settings(aggregation="fedavgg"))
    assert type(make_strategy(TrainingStage(), Settings())) is FedAvg
    assert robust_aggregator(Settings()) is None
    assert set(LEAST) == set(aggregation_names(byzantine_robust=True))


@pytest.mark.parametrize("changes", [{"leave_one_out": True}, {"statistics_weighting": "examples"}])
def test_weighted_statistics_do_not_go_with_a_robust_rule(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="aggregation = 'krum': allowed with leave-one-out = False"):
        plan(Settings(aggregation="krum", **changes))
    check_aggregation(Settings(**changes))


def test_a_stage_that_aggregates_a_part_does_not_go_with_a_robust_rule() -> None:
    partial = [stage for recipe in TRAININGS.values() for stage in recipe.stages if stage.partial]
    assert partial
    for stage in partial:
        with pytest.raises(SettingsError, match="aggregation = 'fedmedian': allowed where all arrays are aggregated"):
            make_strategy(stage, Settings(clients=10, aggregation="fedmedian"))


@pytest.mark.parametrize("aggregation", LEAST)
def test_byzantine_clients_do_not_move_a_robust_model(aggregation: str) -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    place = Place({**{i: client(v, 5) for i, v in enumerate(values)}, 6: client(1e30, 5)}, aggregation=aggregation)
    assert isinstance(make_strategy(TrainingStage(), place.federation.settings), RobustFedAvg)
    assert 1.0 <= float(place.round()["w"][0]) <= 1.5


@pytest.mark.parametrize(("aggregation", "least"), LEAST.items())
def test_fewer_replies_than_a_robust_rule_needs_never_become_a_mean(aggregation: str, least: int) -> None:
    place = Place({i: client(1) if i else raises for i in range(least)}, aggregation=aggregation)
    with pytest.raises(QuorumMissed, match=f"{least - 1} usable replies, {least} needed; failed client 0"):
        place.round()
    few = Settings(aggregation=aggregation, clients=least - 1)
    with pytest.raises(SettingsError, match=f"'{aggregation}' needs {least} clients a round: fraction-train = 1 of"):
        make_strategy(TrainingStage(), few)
    with pytest.raises(SettingsError, match="rates-clients = 2 samples 2"):
        robust_aggregator(Settings(aggregation=aggregation, clients=least, rates_clients=2))
    robust_aggregator(few.replace(clients=least))


def test_needed_replies() -> None:
    settings = Settings(clients=10, min_replies=4)
    assert [needed_replies(settings, kind, 10) for kind in (Train, Evaluate, Adapt)] == [4, 4, 4]
    assert needed_replies(settings, Evaluate, 2) == 2, "of fewer clients asked, all"
    robust = settings.replace(aggregation="krum")
    kinds = (Train, Summarize, RefineRates, Adapt, Evaluate)
    assert [needed_replies(robust, kind, 10) for kind in kinds] == [5, 5, 5, 4, 4]


@pytest.mark.parametrize(("kind", "most"), [(Train, 5), (Summarize, 5), (RefineRates, 4), (Adapt, 20)])
def test_claims_are_bounded_by_the_sizes_in_a_clients_identity(kind: type[Request], most: int) -> None:
    settings = Settings(max_examples=50, stream_batch=20)
    assert most_examples(settings, kind, IDENTITY) == most
    assert most_examples(settings.replace(max_examples=2), kind, IDENTITY) == 2
    assert most_examples(settings, Train, None) == 50


def test_an_evaluation_has_as_many_samples_as_its_distributions_together() -> None:
    """With `max-examples` above each split, yet below the sum of all test streams, none was left of the results."""
    assert most_examples(Settings(max_examples=50), Evaluate, IDENTITY) == MOST


# -- checkpoints


def rounds_of(strategy: Any, first: int, last: int, arrays: ArrayRecord) -> tuple[ArrayRecord, list[dict[str, Any]]]:
    """Run rounds with invented replies; return the model and the strategy's attributes after each."""
    seen = []
    for round in range(first, last + 1):
        list(strategy.configure_train(round, arrays, ConfigRecord({"learning-rate": 0.1}), NodesView(range(6))))
        replies = []
        for node in range(6):
            draw = np.random.default_rng([round, node])
            sent = {name: array.numpy() for name, array in arrays.items()}
            moved = {n: (v + abs(draw.normal(size=v.shape))).astype(v.dtype) for n, v in sent.items()}
            replies.append(reply(record(**moved), examples=node + 1, node=node, **{"global-loss": 1.0 + node}))
        new, _ = strategy.aggregate_train(round, replies)
        assert new is not None
        arrays = record(**{n: a.numpy().astype(arrays[n].dtype) for n, a in new.items()})
        seen.append({name: repr(value) for name, value in vars(strategy).items()})
    return arrays, seen


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_strategy_continues_from_a_checkpoint_with_the_same_bits(aggregation: str, tmp_path: Path) -> None:
    settings = Settings(aggregation=aggregation)
    start = record(**{"z": np.float32([1, 2]), "n.running_var": np.ones(2, np.float32), "a": np.float64([0.5])})
    whole, _ = rounds_of(make_strategy(TrainingStage(), settings), 1, 4, start)
    strategy = make_strategy(TrainingStage(), settings)
    half, seen = rounds_of(strategy, 1, 2, start)
    records = {"arrays": {n: a.numpy() for n, a in half.items()}, **strategy_records(strategy)}
    write_checkpoint(
        tmp_path / "c.safetensors", Checkpoint(Position("t", "training", "", 2), "run", {}, records=records)
    )
    records = read_checkpoint(tmp_path / "c.safetensors").records
    again = make_strategy(TrainingStage(), settings)
    load_strategy_records(again, records)
    resumed, _ = rounds_of(again, 3, 4, record(**records["arrays"]))
    assert {n: a.numpy().tobytes() for n, a in resumed.items()} == {n: a.numpy().tobytes() for n, a in whole.items()}
    # state that no checkpoint keeps would show here, even if these numbers did not change
    changed = {name for name in seen[0] if seen[0][name] != seen[1][name]}
    kept = {"current_arrays", "momentum_vector"} if set(records) > {"arrays"} else set()
    assert changed - REPLACED <= kept


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"w": np.zeros(3)}, r"missing \['n.running_var'\], unknown \[\]"),
        ({"w": np.zeros(3), "n.running_var": np.ones(2), "v": np.ones(1)}, r"missing \[\], unknown \['v'\]"),
        ({"w": np.zeros(2), "n.running_var": np.ones(2)}, r"w: shape \(2,\) does not fit \(3,\)"),
        ({"w": np.full(3, np.nan), "n.running_var": np.ones(2)}, "w holds values that are not finite"),
    ],
)
def test_a_rule_of_ones_own_that_returns_no_model_is_named_and_not_the_clients(
    answer: dict[str, np.ndarray], told: str
) -> None:
    class Mine(NumpyAggregation):
        def aggregate(self, replies: Any) -> dict[str, np.ndarray]:
            return answer

    place = Place({0: client(1), 1: client(5)})
    with pytest.raises(RunError, match=f"round 1: Mine returned no model of this network: {told}"):
        place.round(Mine())
