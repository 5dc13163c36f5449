"""One poisoner among ten: what it adds to models, statistics, rates, test-time arrays and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.benchmarks import attacks
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Adapted, Evaluated, EvaluationResult, Identity, RefinedRates, Summarized, Trained
from fedtta.messages.requests import RefineRates, Request, Train
from fedtta.models import build
from fedtta.server.aggregation import make_strategy
from fedtta.server.app import serve
from fedtta.server.checkpoints import Checkpoint, Position, read_checkpoint, write_checkpoint
from fedtta.server.evaluation import evaluation_round, statistics_round
from fedtta.server.limits import Distances, RatesLimits, SharedLimits, StatisticsLimits
from fedtta.server.methods import plan
from fedtta.server.report import read_results
from fedtta.server.report.accuracy import MARK, client_section
from fedtta.server.report.scores import METRICS, client_outliers, outlying, table
from fedtta.server.training import train_round
from fedtta.server.trainings import TrainingStage
from fedtta.settings import Settings
from fedtta.strategies.arrays import weighted_mean
from tests.report.runs import evaluation, results_of
from tests.server.test_nodes import IDENTITY
from tests.server.test_rounds import COUNTS, Place
from tests.transports import Client, devices

TEN, POISONER = 10, 9
SIZE = 400
#: Where most clients' steps lead.
GOAL = np.ones(SIZE, np.float32) / np.sqrt(SIZE).astype(np.float32)
START: Arrays = {"w": np.zeros(SIZE, np.float32), "n.running_var": np.ones(8, np.float32)}
OFF = {"clip_factor": 0.0, "max_share": 0.0}
(CE,) = plan(Settings(methods="fedavg"))


def learner(partition: int) -> Client:
    """A client whose step is the common one and one of its own of the same length, as with few classes each."""

    def answer(request: Request) -> Trained:
        assert isinstance(request, Train)
        draw = np.random.default_rng([partition, request.round])
        own = draw.normal(size=SIZE).astype(np.float32) / np.float32(np.sqrt(SIZE))
        step = {"w": 0.1 * (GOAL + own), "n.running_var": draw.uniform(0, 1, 8).astype(np.float32)}
        arrays = {name: (request.arrays[name] + step[name]).astype(np.float32) for name in request.arrays}
        return Trained(arrays=arrays, num_examples=5 - partition % 3, **COUNTS)  # of some, more than the median

    return answer


def trained(
    attack: attacks.Attack, rounds: int = 3, poisoners: Sequence[int] = (POISONER,), **settings: Any
) -> tuple[float, Place]:
    """Return how far the model comes towards the goal (honest clients: 0.1 a round), and the federation."""
    place = Place({i: learner(i) for i in range(TEN)}, **settings)
    place.nodes.transport = attacks.Poisoned(place.transport, [100 + one for one in poisoners], attack)
    if attack is attacks.size_lie:
        for one in poisoners:
            place.nodes.identities[one] = replace(IDENTITY, name=str(one), sizes=[attacks.CLAIMED, 4, 4])
    federation, arrays, past = place.federation, START, Distances()
    strategy = make_strategy(TrainingStage(), federation.settings)
    for round in range(1, rounds + 1):
        arrays = train_round(federation, strategy, TrainingStage(), arrays, "cross_entropy", round, past)
    return float(arrays["w"] @ GOAL), place


ATTACKS: dict[str, attacks.Attack] = {
    "sign flip": attacks.sign_flip(1),
    "sign flip × 10": attacks.sign_flip(10),
    "10⁸ samples with a sign flip": attacks.size_lie,
    "a little is enough": attacks.alie(),
}


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedavgm", "gma"])
@pytest.mark.parametrize("name", ATTACKS)
def test_one_of_ten_slows_training_by_less_than_a_tenth(name: str, aggregation: str) -> None:
    honest, _ = trained(attacks.honest, aggregation=aggregation)
    reached, place = trained(ATTACKS[name], aggregation=aggregation)
    assert reached > 0.9 * honest
    limited = {event["partition"] for event in place.of("limited")}
    assert limited <= {POISONER}
    assert limited or name == "a little is enough", "which may stay within the spread of the others"


@pytest.mark.parametrize("name", ["sign flip × 10", "10⁸ samples with a sign flip"])
def test_without_limits_it_decides_the_model(name: str) -> None:
    reached, place = trained(ATTACKS[name], **OFF)
    assert reached < 0
    assert not place.of("limited")


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedavgm", "gma"])
def test_without_an_attack_limits_change_no_bit(aggregation: str) -> None:
    with_limits, place = trained(attacks.honest, aggregation=aggregation)
    without, _ = trained(attacks.honest, aggregation=aggregation, **OFF)
    assert with_limits == without
    assert not place.of("limited")


def test_two_of_ten_sampled_a_round_are_held_to_the_scale_of_earlier_rounds() -> None:
    """The median of two is their mean: alone it would protect nothing."""

    def late(request: Any, reply: Any, others: Sequence[Any]) -> Any:
        return attacks.sign_flip(1000)(request, reply, others) if getattr(request, "round", 0) > 4 else reply

    honest, _ = trained(attacks.honest, 16, fraction_train=0.2)
    reached, place = trained(late, 16, fraction_train=0.2)
    rounds = [event["round"] for event in place.of("limited") if event["partition"] == POISONER]
    assert rounds
    assert min(rounds) > 4
    assert reached > honest - len(rounds) * 3 * 0.2, "each time by three times the length of a step, at half the weight"
    assert trained(late, 16, fraction_train=0.2, **OFF)[0] < -10


def test_distances_of_earlier_rounds_survive_a_checkpoint(tmp_path: Path) -> None:
    past = Distances()
    for round in range(7):
        past.add(np.full(3, float(round)))
    assert past.all.tolist() == [3.0] * 3 + [4.0] * 3 + [5.0] * 3 + [6.0] * 3, "of the last four rounds"
    path = tmp_path / "000001.safetensors"
    write_checkpoint(path, Checkpoint(Position(), "run", {}, records=past.records()))
    found = Distances.load(read_checkpoint(path).records)
    assert found.all.tolist() == past.all.tolist()
    assert Distances.load({}).records() == {}


def test_a_reply_that_is_limited_is_an_event_with_node_and_reason() -> None:
    _, place = trained(attacks.size_lie, 1)
    (event,) = place.of("limited")
    assert (event["partition"], event["node_id"], event["round"]) == (POISONER, 100 + POISONER, 1)
    assert "100,000,000 samples count as 12, 3 times those of the median client" in event["reason"]
    assert "a step against the other clients'" in event["reason"]


# -- statistics


def summarized(partition: int) -> Summarized:
    draw = np.random.default_rng(partition)
    statistics = {
        "descriptor": draw.uniform(0.5, 1.5, 64),
        "dle": draw.uniform(0, 0.3, 64),
        "entropy_local": np.full(1, 0.5),
        "entropy_global": np.full(1, 0.5),
    }
    counts = {"validation_total": 4, "validation_correct": 1, "personal_validation_correct": 2, "seconds": 0.1}
    return Summarized(statistics=statistics, num_examples=5, **counts)


@pytest.mark.parametrize(("attack", "name"), [(attacks.descriptors, "descriptor"), (attacks.dles, "dle")])
def test_statistics_in_range_move_the_mean_by_less_than_honest_clients_do(attack: attacks.Attack, name: str) -> None:
    replies = [summarized(i) for i in range(TEN)]
    honest = weighted_mean([one.statistics for one in replies])
    replies[POISONER] = attack(None, replies[POISONER], [])  # type: ignore[assignment]
    limited = StatisticsLimits(5.0, 3.0)(replies)
    assert [i for i, one in enumerate(limited) if one.reason] == [POISONER]
    means = weighted_mean([one.reply.statistics for one in limited])
    spread = np.mean([np.linalg.norm(one.statistics[name] - honest[name]) for one in replies[:POISONER]])
    assert np.linalg.norm(means[name] - honest[name]) < 0.5 * spread
    without = weighted_mean([one.statistics for one in replies])
    assert np.linalg.norm(without[name] - honest[name]) > np.linalg.norm(means[name] - honest[name])
    assert [one.reply for one in limited[:POISONER]] == replies[:POISONER]


def test_a_negative_descriptor_behind_a_relu_is_refused() -> None:
    """One of -10⁹ would make every honest client refuse the mean."""

    def client(partition: int) -> Client:
        reply = summarized(partition)
        low = {**reply.statistics, "descriptor": np.full(64, -1e9)}
        return lambda _: replace(reply, statistics=low) if partition == POISONER else reply

    place = Place({i: client(i) for i in range(TEN)})
    (training,) = plan(Settings(methods="btfl"))
    model = build("cnn", num_classes=10, image_size=16, in_channels=1, seed=0)
    arrays = {name: value.numpy() for name, value in model.global_state().items()}
    means = statistics_round(place.federation, training, arrays, model, range(TEN))
    ((kind, partition, reason),) = place.incidents()
    assert (kind, partition) == ("refused", POISONER)
    assert reason.startswith("descriptor: values from -1000000000.0")
    assert means["descriptor"].min() >= 0


# -- rates and test-time rounds


def test_rates_in_the_opposite_direction() -> None:
    draw = np.random.default_rng(0)
    sent = {f"m{i}": np.asarray(0.0) for i in range(6)}
    request = RefineRates(settings="", run="", round=1, variant="all", network="", rates=sent)
    replies = [
        RefinedRates(
            rates={name: np.asarray(0.1 + draw.normal() / 50) for name in sent}, loss=1.0, correct=1, seconds=0.1
        )
        for _ in range(TEN)
    ]
    honest = weighted_mean([one.rates for one in replies])
    replies[POISONER] = attacks.rates(request, replies[POISONER], [])  # type: ignore[assignment]
    means = weighted_mean([one.reply.rates for one in RatesLimits(5.0, 3.0)(replies)])
    assert all(means[name] == pytest.approx(honest[name], abs=0.02) for name in sent)
    assert sum(weighted_mean([one.rates for one in replies]).values()) < 0


def test_arrays_times_minus_ten_in_test_time_rounds() -> None:
    def adapted(partition: int) -> Adapted:
        draw = np.random.default_rng(partition)
        shared = {
            "a.weight": 1 + draw.normal(size=16) / 100,
            "b.weight": 1 + draw.normal(size=32) / 100,
            "a.running_var": 5 + draw.uniform(size=16),
        }
        return Adapted(shared=shared, corruption=0, correct=[1], total=[1], seconds=0.1)

    replies = [adapted(i) for i in range(TEN)]
    honest = weighted_mean([one.shared for one in replies])
    replies[POISONER] = attacks.shared_arrays(None, replies[POISONER], [])  # type: ignore[assignment]
    limited = SharedLimits(5.0, 3.0)(replies)
    assert [i for i, one in enumerate(limited) if one.reason] == [POISONER]
    assert limited[POISONER].reason.count("pulled back") == 2, "weights of all layers, variances"
    means = weighted_mean([one.reply.shared for one in limited])
    for name, value in honest.items():
        np.testing.assert_allclose(means[name], value, rtol=0.05)
    assert (limited[POISONER].reply.shared["a.running_var"] > 0).all()


def test_one_federation_with_real_clients(tmp_path: Path) -> None:
    """Over the whole server: the model that a poisoner leaves is nearer to the honest one than without limits."""
    settings = Settings(
        clients=5, fraction=0.15, rounds=2, local_epochs=1, image_size=16, channels=1, partition="iid",
        methods="fedavg", shifts="original", device="cpu", learning_rate=0.1, checkpoint_every=0,
    )  # fmt: skip
    models = {}
    for name, changes in (("honest", {}), ("limited", {}), ("unlimited", OFF)):
        transport = devices(settings)
        attack = attacks.honest if name == "honest" else attacks.sign_flip(10)
        serve(attacks.Poisoned(transport, [900], attack), settings.replace(**changes), tmp_path / name)
        models[name] = vector_of(tmp_path / name)
    kinds = {one.event for one in read_results(tmp_path / "limited" / "metrics.jsonl").incidents}
    assert kinds == {"limited"}
    away = {name: np.linalg.norm(model - models["honest"]) for name, model in models.items()}
    assert away["limited"] < 0.5 * away["unlimited"]


def vector_of(folder: Path) -> np.ndarray:
    from fedtta.models import load_arrays

    arrays, _ = load_arrays(folder / "model.safetensors")
    return np.concatenate([arrays[name].ravel().astype(float) for name in sorted(arrays)])


# -- results


def evaluated(*results: EvaluationResult) -> Callable[[Request], Evaluated]:
    return lambda _: Evaluated(num_examples=4, checked=4, leaked=0, results=list(results))


def result(correct: int = 1, total: int = 4, label: str = "fedavg", **more: Any) -> EvaluationResult:
    return EvaluationResult(label=label, shift="original", correct=correct, total=total, seconds=0.5, **more)


def evaluate(*clients: Client) -> Place:
    place = Place(dict(enumerate(clients)))
    for i in range(len(clients)):
        identity: Identity = replace(IDENTITY, name=str(i), sizes=[5, 4, 40])
        place.nodes.identities[i] = identity
    evaluation_round(place.federation, CE, START, None, {}, ["original"], range(len(clients)))
    return place


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (
            evaluated(result(10**15, 10**15)),
            "fedavg, original: total = 1000000000000000, the client has 40 test samples",
        ),
        (
            evaluated(result(), result(40, 40, label="mine")),
            "missing results [], unknown results [('mine', 'original')]",
        ),
    ],
    ids=["10¹⁵ right", "a method of its own"],
)
def test_a_forged_result_is_refused(forged: Client, reason: str) -> None:
    place = evaluate(*[evaluated(result())] * 4, forged)
    assert place.incidents() == [("refused", 4, reason)]
    assert {(event["method"], event["total"]) for event in place.of("evaluation")} == {("fedavg", 4)}


def test_an_outlier_among_clients_is_noted_and_marked(tmp_path: Path) -> None:
    place = evaluate(*[evaluated(result(10 + i, 40)) for i in range(6)], evaluated(result(40, 40)))
    texts = [event["text"] for event in place.of("note")]
    assert texts == ["cross_entropy: accuracy of 6 is an outlier among the clients on fedavg, original"]
    lines = [evaluation("fedavg", "original", i, n, 40) for i, n in enumerate([10, 11, 12, 13, 14, 40])]
    results = results_of(tmp_path, lines)
    assert client_outliers(results) == {"fedavg": [5]}
    page = client_section(results)
    assert f"100.0{MARK}" in page
    assert page.count(MARK) == 2, "the cell, and what the mark means"


def test_outliers_by_hand() -> None:
    chance = dict.fromkeys(range(9), (20, 40))
    assert outlying({**chance, 9: (40, 40)}) == [9]  # sd of chance: sqrt(0.25/40) = 0.079
    assert outlying({**chance, 9: (31, 40)}) == []  # 0.275 < 3.5 · 0.079
    assert outlying({**chance, 9: (4, 4)}) == [], "four samples are right by chance"
    wide = {i: (n, 40) for i, n in enumerate((4, 10, 16, 24, 30, 36, 40))}
    assert outlying(wide) == [], "clients differ that much"
    assert outlying({0: (0, 40), 1: (40, 40), 2: (40, 40), 3: (40, 40)}) == [], "too few"
    assert outlying({**chance, 9: (0, 0)}) == []


def test_a_mean_over_samples_weighs_no_client_more_than_its_share_of_median_ones(tmp_path: Path) -> None:
    lines = [evaluation("fedavg", "original", i, 1, 10) for i in range(4)]
    lines.append(evaluation("fedavg", "original", 4, 10**12, 10**12))
    run = {"event": "run", "time": "", "versions": {}, "hardware": "", "settings": {"max-share": 5.0}}
    metric = next(one for one in METRICS if one.name == "sample_accuracy")
    (row,) = table(results_of(tmp_path, [run, *lines]), metric)
    assert row.mean("original") == pytest.approx((4 * 10 * 0.1 + 50 * 1.0) / 90)
    (row,) = table(results_of(tmp_path, lines), metric)  # of a version without the setting
    assert row.mean("original") == pytest.approx(1.0)
