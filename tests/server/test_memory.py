"""Replies that have no room in memory: the same bits for every rule and limit, in memory that does not grow."""

from __future__ import annotations

import errno
import os
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp import strategy as flower

from fedtta.messages.arrays import Arrays, channels_last
from fedtta.messages.record import with_arrays
from fedtta.messages.replies import Adapted, RefinedRates, Reply, Summarized, Trained
from fedtta.messages.requests import Adapt, AdapterRow, Request, Train
from fedtta.messages.store import IN_MEMORY, Store, StoredArrays
from fedtta.server import rounds
from fedtta.server.adaptation import needed_records, strategy_message
from fedtta.server.aggregation import make_strategy
from fedtta.server.events import RunError
from fedtta.server.limits import Limits, RatesLimits, SharedLimits, StatisticsLimits
from fedtta.server.rounds import Round
from fedtta.server.training import train_round
from fedtta.server.trainings import TrainingStage
from fedtta.server.validation import AdaptCheck
from fedtta.strategies import AGGREGATIONS, COLLABORATIONS
from fedtta.strategies import arrays as blocks
from tests.flower import record
from tests.hostile.test_privacy import Place as SecurePlace
from tests.messages.test_store import files
from tests.server.test_rounds import COUNTS, Place
from tests.transports import Client

DRAW = np.random.default_rng(0)
START: Arrays = {
    "conv.weight": channels_last(DRAW.normal(size=(8, 3, 3, 3)).astype(np.float32)),
    "n.weight": np.ones(8, np.float32),
    "n.running_mean": np.zeros(8, np.float32),
    "n.running_var": np.ones(8, np.float32),
    "head.bias": np.zeros(4, np.float64),
}
CLIENTS = 9
NODES = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
FLOWERS = {"FedAdam": flower.FedAdam, "FedMedian": flower.FedMedian, "MultiKrum": flower.MultiKrum}
#: Of nine clients one sends its step ten times as far, one backwards, and one claims ten times as many samples.
FAR, BACK, GREEDY = 2, 4, 6


def trains(partition: int) -> Client:
    def answer(request: Request) -> Reply:
        assert isinstance(request, Train)
        draw = np.random.default_rng([partition, request.round])
        common = np.random.default_rng(request.round)
        factor = {FAR: -10.0, BACK: -0.6}.get(partition, 1.0)
        arrays = {}
        for name, value in request.arrays.items():
            step = 0.1 * factor * (common.normal(size=value.shape) + 0.7 * draw.normal(size=value.shape))
            arrays[name] = channels_last((np.abs(value + step) if "var" in name else value + step).astype(value.dtype))
        count = 1000 if partition == GREEDY else 20 + partition
        return Trained(arrays=arrays, num_examples=count, global_loss=1.0 + partition, **COUNTS)

    return answer


def trained(
    room: int, monkeypatch: pytest.MonkeyPatch, order: Any = list, strategy: Any = None, **settings: Any
) -> tuple[list[bytes], list[Any]]:
    """The bits of two rounds' models, and what was limited, with so many bytes of room in memory."""
    monkeypatch.setattr(rounds, "Store", partial(Store, in_memory=room))
    monkeypatch.setattr(blocks, "BLOCK", 64 * CLIENTS)  # several blocks of an array
    place = Place({i: trains(i) for i in range(CLIENTS)}, order=order, **settings)
    for i, identity in place.nodes.identities.items():
        place.nodes.identities[i] = replace(identity, sizes=[1000, 5, 5])
    stage = TrainingStage()
    chosen, arrays, found = strategy or make_strategy(stage, place.federation.settings), START, []
    for number in (1, 2):
        arrays = train_round(place.federation, chosen, stage, arrays, "cross_entropy", number)
        found += [value.tobytes() for value in arrays.values()]
    return found, [(one["partition"], one["reason"]) for one in place.of("limited")]


@pytest.mark.parametrize("clip", [0.0, 3.0])
@pytest.mark.parametrize("name", [*AGGREGATIONS, *FLOWERS])
def test_every_aggregation_has_the_same_bits(name: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def models(room: int, order: Any = list) -> Any:
        own = FLOWERS[name](**NODES) if name in FLOWERS else None
        settings = {} if own else {"aggregation": name}
        return trained(room, monkeypatch, order, own, clip_factor=clip, max_share=clip, **settings)

    model_bytes = sum(value.nbytes for value in START.values())
    found, limited = models(IN_MEMORY)
    assert models(0) == models(0, lambda requests: requests[::-1]) == (found, limited)
    assert models(4 * model_bytes, lambda requests: requests[3:] + requests[:3]) == (found, limited)
    limits = (clip and name not in AGGREGATIONS) or (clip and not AGGREGATIONS[name].byzantine_robust)
    assert {partition for partition, _ in limited} == ({FAR, BACK, GREEDY} if limits else set())


def test_secure_sums_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SecurePlace(4).round()
    stores: list[Any] = []

    class NoRoom(Store):
        def keep(self, arrays: Arrays) -> Any:
            stores.append(super().keep(arrays))
            return stores[-1]

    monkeypatch.setattr(rounds, "Store", partial(NoRoom, in_memory=0))
    place = SecurePlace(4)
    other = place.round()
    assert {name: value.tobytes() for name, value in found.items()} == {n: v.tobytes() for n, v in other.items()}
    assert [list(one) for one in stores if isinstance(one, StoredArrays)] == [["sum"]] * 4, "the masked replies"


def adapts(partition: int) -> Client:
    def answer(request: Request) -> Reply:
        assert isinstance(request, Adapt)
        draw = np.random.default_rng([partition, request.round])
        start = {"a.weight": np.ones((4, 3, 3, 3)), "b.weight": np.zeros(40), "a.running_var": np.ones(8)}
        before = request.shared or start
        factor = -30.0 if partition == FAR else 1.0
        shared = {name: channels_last(np.abs(v + factor * draw.normal(size=v.shape))) for name, v in before.items()}
        return Adapted(
            shared=shared,
            normalization={"a.mean": draw.normal(size=8), "a.variance": np.abs(draw.normal(size=8))}
            if request.send_normalization
            else None,
            start=start if request.send_start else None,
            corruption=0,
            correct=[1],
            total=[1],
            seconds=0.0,
        )

    return answer


def mixed(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, bytes], list[Any]]:
    monkeypatch.setattr(rounds, "Store", partial(Store, in_memory=room))
    monkeypatch.setattr(blocks, "BLOCK", 16 * CLIENTS)
    place, strategy = Place({i: adapts(i) for i in range(CLIENTS)}), COLLABORATIONS[name]()
    strategy.begin(record(w=np.zeros(4)))
    row, check = AdapterRow("tent", "tent"), AdaptCheck(1, 1)
    for round in (1, 2):
        template = Adapt(**place.federation.common("c"), round=round, cell="c", row=row, share="all", network="")
        check.records = needed_records(strategy)
        limits = SharedLimits.of(place.federation.settings) if strategy.mixes else None
        ask = Round(place.federation, check, "t", round, "cell", strategy, limits).ask
        outcome = ask(lambda: place.federation.configured(strategy, round, {}, template, place.federation.testers))  # noqa: B023
        strategy.aggregate_train(round, [strategy_message(one, check.records) for one in outcome.replies])
    state = strategy.state_arrays(place.nodes.by_partition)
    return {key: value.tobytes() for key, value in state.items()}, [one["reason"] for one in place.of("limited")]


@pytest.mark.parametrize("name", COLLABORATIONS)
def test_every_collaboration_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, limited = mixed(name, IN_MEMORY, monkeypatch)
    assert mixed(name, 0, monkeypatch) == (found, limited)
    assert bool(limited) == COLLABORATIONS[name].mixes
    assert len(found) >= 3 * CLIENTS


@pytest.mark.parametrize("limits", [StatisticsLimits(5.0, 1.2), RatesLimits(5.0, 1.2)])
def test_other_limits_have_the_same_bits(limits: Limits) -> None:
    draw = np.random.default_rng(0)
    names = {StatisticsLimits: ["descriptor", "dle"], RatesLimits: ["a", "b"]}[type(limits)]
    size = {StatisticsLimits: 6, RatesLimits: ()}[type(limits)]
    values = [{name: np.asarray(draw.normal(size=size)) for name in names} for _ in range(CLIENTS)]
    counts = {"validation_total": 4, "validation_correct": 1, "seconds": 0.1}
    replies: list[Reply] = (
        [Summarized(statistics=one, **counts) for one in values]
        if isinstance(limits, StatisticsLimits)
        else [RefinedRates(rates=one, loss=1.0, correct=1, seconds=0.1) for one in values]
    )
    found = limits(replies)
    other = limits([with_arrays(one, Store(None, 0).keep) for one in replies])
    assert any(one.reason for one in found)
    assert [one.reason for one in other] == [one.reason for one in found]
    for one, same in zip(found, other, strict=True):
        ours, theirs = getattr(one.reply, limits.arrays), getattr(same.reply, limits.arrays)
        assert {n: v.tobytes() for n, v in ours.items()} == {n: v.tobytes() for n, v in theirs.items()}


# -- memory

LARGE: Arrays = {"w": np.zeros((256, 256), np.float32), "n.running_var": np.ones(64, np.float32)}
MODEL = sum(value.nbytes for value in LARGE.values())


def sends(partition: int) -> Client:
    def answer(request: Request) -> Reply:
        draw = np.random.default_rng(partition)
        factor = -10.0 if partition % 8 == 1 else 1.0  # an eighth of the clients is limited
        step = factor * (1 + draw.random(LARGE["w"].shape, np.float32))
        arrays = {"w": step, "n.running_var": LARGE["n.running_var"]}
        return Trained(arrays=arrays, num_examples=5, global_loss=1.0, **COUNTS)

    return answer


def peak(clients: int, room: int, monkeypatch: pytest.MonkeyPatch, aggregation: str) -> float:
    """The most memory of a round, in models."""
    monkeypatch.setattr(rounds, "Store", partial(Store, in_memory=room))
    monkeypatch.setattr(blocks, "BLOCK", 1 << 13)
    place = Place({i: sends(i) for i in range(clients)}, aggregation=aggregation)
    stage = TrainingStage()
    strategy = make_strategy(stage, place.federation.settings)
    tracemalloc.start()
    try:
        train_round(place.federation, strategy, stage, LARGE, "cross_entropy", 1)
        return tracemalloc.get_traced_memory()[1] / MODEL
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "gma", "krum"])
def test_memory_does_not_grow_with_the_clients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (peak(number, 0, monkeypatch, name) for number in (8, 32))
    assert many - few < 3, "24 clients more, and not 24 models"
    assert many < 28, "also of the rules that go through a whole array in float64"
    if name == "fedavg":
        assert peak(32, IN_MEMORY, monkeypatch, name) > 32, "what the others are compared with"


def test_the_file_of_a_round_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "Store", partial(Store, in_memory=0))
    open_during: list[int] = []
    for name in AGGREGATIONS:
        place = Place({i: sends(i) for i in range(8)}, aggregation=name)
        federation, stage = replace(place.federation, folder=tmp_path), TrainingStage()
        federation.events.listeners.append(
            lambda event: event["event"] == "round" and open_during.append(len(files(tmp_path)))
        )
        train_round(federation, make_strategy(stage, federation.settings), stage, LARGE, "cross_entropy", 1)
        assert files(tmp_path) == [], name
    assert open_during == [1] * len(AGGREGATIONS)


def test_a_refused_reply_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Arrays] = []
    keep = Store.keep
    monkeypatch.setattr(Store, "keep", lambda self, arrays: kept.append(arrays) or keep(self, arrays))

    def wrong(request: Request) -> Reply:
        return replace(trains(1)(request), arrays={"other": np.ones(1000)})  # type: ignore[call-arg]

    place = Place({0: trains(0), 1: wrong})
    for i, identity in place.nodes.identities.items():
        place.nodes.identities[i] = replace(identity, sizes=[1000, 5, 5])
    stage = TrainingStage()
    train_round(place.federation, make_strategy(stage, place.federation.settings), stage, START, "cross_entropy", 1)
    assert [list(one) for one in kept] == [list(START)]
    assert [(kind, partition) for kind, partition, _ in place.incidents()] == [("refused", 1)]


def test_a_full_disk_ends_the_round_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rounds, "Store", partial(Store, in_memory=0))
    monkeypatch.setattr(os, "pwrite", full)
    place = Place({i: trains(i) for i in range(3)})
    for i, identity in place.nodes.identities.items():
        place.nodes.identities[i] = replace(identity, sizes=[1000, 5, 5])
    federation, stage = replace(place.federation, folder=tmp_path), TrainingStage()
    with pytest.raises(RunError, match=rf"train cross_entropy, round 1: .* to {tmp_path}: No space left on device"):
        train_round(federation, make_strategy(stage, federation.settings), stage, START, "cross_entropy", 1)
    assert list(tmp_path.iterdir()) == []
