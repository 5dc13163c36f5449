"""Several clients at once against one after another: weights, private state, metrics and failures."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedtta.client import cohort
from fedtta.client.algorithms import ALGORITHMS, FedAvg
from fedtta.client.algorithms.training import epoch
from fedtta.client.cohort import cohort_epoch, padded
from fedtta.client.state import MemoryState
from fedtta.data import Federation
from fedtta.messages.arrays import Arrays
from fedtta.models import TwoHead, build
from fedtta.models.vectorized import VectorizedNetwork, is_stochastic
from tests.client.tiny import (
    CLASSES,
    Task,
    device,
    federation_of_splits,
    global_arrays,
    images,
    network,
    training_set,
)  # fmt: skip
from tests.client.tiny import Client as Device

RAGGED = ((9, 3, 2), (30, 4, 2), (16, 2, 2), (1, 2, 2))  # with batches of 8: two, four, two and one
TOLERANCE = 1e-8
TASK = Task("t", "fedavg", "cross_entropy")


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that would be float32 be float64, so that rounding hides no difference."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def world(sizes: tuple[tuple[int, int, int], ...] = RAGGED) -> Federation:
    return federation_of_splits(images(sum(map(sum, sizes))), *sizes)


def clients(model: TwoHead, splits: Federation, **changes: Any) -> list[Device]:
    settings = {"clients": len(splits.splits), "local_epochs": 2, "personal_epochs": 2, **changes}
    return [device(i, MemoryState(), splits, model, **settings) for i in range(len(splits.splits))]


def alone(members: list[Device], task: Task, arrays: list[Arrays], rounds: int, **more: Any) -> list[list[Any]]:
    """Results round by round of one client after another."""
    found = []
    for round in range(1, rounds + 1):
        results: list[Any] = []
        for one, received in zip(members, arrays, strict=True):
            try:
                results.append(one.train(round, task, received, **more))
            except (ValueError, FloatingPointError) as error:
                results.append(error)
        found.append(results)
    return found


def together(members: list[Device], round: int, task: Task, arrays: list[Arrays], **more: Any) -> list[Any]:
    requests = [one.request(round, task, own, **more) for one, own in zip(members, arrays, strict=True)]
    results = cohort.train([one.inner for one in members], requests)
    return [one if isinstance(one, Exception) else (one.arrays, one.to_record().values) for one in results]


def fits(member: Device, task: Task) -> bool:
    return cohort.fits(member.inner, member.request(1, task, {}))


def compare(one: tuple[Arrays, dict], other: tuple[Arrays, dict], tolerance: float) -> None:
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert value.dtype == other[0][name].dtype
        np.testing.assert_allclose(value, other[0][name], rtol=tolerance, atol=tolerance, err_msg=name)
    ours, theirs = ({k: v for k, v in metrics.items() if k != "seconds"} for _, metrics in (one, other))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert one[1]["seconds"] > 0


#: What the server aggregation asks of clients.
ASKED: dict[str, dict[str, Any]] = {"prox": {"proximal_mu": 0.5}, "qffl": {"client_metrics": ["global-loss"]}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "sgd": ({}, "cross_entropy", "plain"),
    "momentum": ({"momentum": 0.9, "weight_decay": 0.01}, "balanced_softmax", "plain"),
    "adam": ({"optimizer": "adam", "learning_rate": 1e-3, "weight_decay": 0.01}, "cross_entropy", "plain"),
    "prox": ({}, "cross_entropy", "plain"),
    "augmented": ({"augment": True}, "cross_entropy", "plain"),
    "heads": ({"personal_objective": "balanced_softmax", "local_epochs": 1}, "cross_entropy", "plain"),
    "qffl": ({}, "cross_entropy", "plain"),
    "batch": ({"momentum": 0.9}, "balanced_softmax", "batch"),
    "group": ({"local_epochs": 1, "personal_epochs": 1}, "cross_entropy", "group"),
    "frozen": ({"momentum": 0.9, "weight_decay": 0.01}, "cross_entropy", "frozen"),
    "layer": ({"momentum": 0.9, "local_epochs": 1, "personal_epochs": 1}, "cross_entropy", "layer"),
}


def start(kind: str) -> TwoHead:
    if kind == "layer":
        quiet = {"attention_dropout": 0.0, "stochastic_depth": 0.0}
        return build("cct-4/3x2", CLASSES, in_channels=3, image_size=16, seed=0, **quiet).double()
    model = network(norm=kind != "plain")
    if kind == "group":
        model.encoder.norm = nn.GroupNorm(2, 4)
    if kind == "frozen":
        model.encoder.conv.requires_grad_(False)
    return model.double()


@pytest.mark.parametrize("name", list(CASES))
def test_two_rounds_are_those_of_one_after_another(name: str) -> None:
    changes, objective, kind = CASES[name]
    task, model, splits = Task("t", "fedavg", objective), start(kind), world()
    arrays = [global_arrays(model)] * len(splits.splits)
    one_by_one, at_once = clients(copy.deepcopy(model), splits, **changes), clients(model, splits, **changes)
    asked = ASKED.get(name, {})
    expected = alone(one_by_one, task, arrays, 2, **asked)
    for round in (1, 2):
        found = together(at_once, round, task, arrays, **asked)
        for ours, theirs in zip(found, expected[round - 1], strict=True):
            assert not isinstance(ours, Exception), ours
            compare(ours, theirs, TOLERANCE)
    for one, other in zip(at_once, one_by_one, strict=True):
        ours, theirs = one.state.load("t", 2), other.state.load("t", 2)
        assert ours is not None
        assert theirs is not None
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            np.testing.assert_allclose(value, theirs[key], rtol=TOLERANCE, atol=TOLERANCE)


def test_clients_that_keep_a_part_train_on_different_encoders() -> None:
    model, splits = network(norm=True).double(), world(RAGGED[:3])
    arrays = global_arrays(model)
    joined = frozenset(name for name in arrays if "norm" not in name)
    task = Task("t", "personalized", "cross_entropy", joined)
    one_by_one, at_once = clients(copy.deepcopy(model), splits), clients(model, splits)
    expected = alone(one_by_one, task, [arrays] * 3, 3)
    for round in (1, 2, 3):
        for ours, theirs in zip(together(at_once, round, task, [arrays] * 3), expected[round - 1], strict=True):
            assert not isinstance(ours, Exception)
            compare(ours, theirs, TOLERANCE)


def test_who_diverges_or_has_no_labels_is_named_and_the_others_go_on() -> None:
    model, splits = network().double(), world(RAGGED[:3])
    arrays = [global_arrays(model) for _ in range(3)]
    wild = {name: np.full_like(value, 1e300) if name == "head.weight" else value for name, value in arrays[1].items()}
    members = clients(model, splits)
    members[2] = device(2, MemoryState(), splits, model, role="target", **{"clients": 3})
    received = [arrays[0], wild, arrays[2]]
    found = together(members, 1, TASK, received)
    expected = alone(clients(copy.deepcopy(model), splits)[:1], TASK, arrays[:1], 1)[0][0]
    assert not isinstance(found[0], Exception)
    compare(found[0], expected, TOLERANCE)
    assert isinstance(found[1], FloatingPointError)
    assert "diverged: mean loss" in str(found[1])
    assert isinstance(found[2], ValueError)
    assert "is a target" in str(found[2])
    assert members[1].state.load("t", 1) is None  # a failed round leaves no trace


def test_arrays_that_do_not_fit_are_one_clients_failure() -> None:
    model, splits = network().double(), world(RAGGED[:2])
    arrays = global_arrays(model)
    found = together(clients(model, splits), 1, TASK, [{"nothing": np.zeros(1)}, arrays])
    assert isinstance(found[0], ValueError)
    assert not isinstance(found[1], Exception)
    everybody = together(clients(model, splits), 1, TASK, [{"nothing": np.zeros(1)}] * 2)
    assert all(isinstance(one, ValueError) for one in everybody)


def test_a_client_that_cannot_save_is_one_clients_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, splits = network().double(), world(RAGGED[:2])
    members, arrays = clients(model, splits), [global_arrays(model)] * 2

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(members[0].state, "save", full)
    found = together(members, 1, TASK, arrays)
    assert isinstance(found[0], OSError)
    assert not isinstance(found[1], Exception)


def test_layers_that_draw_and_other_rules_do_not_fit() -> None:
    member = clients(network(), world())[0]
    assert fits(member, TASK)
    assert fits(member, Task("t", "personalized", "cross_entropy"))
    assert not fits(member, Task("t", "ditto", "cross_entropy"))
    assert not fits(member, Task("t", "ttt", "cross_entropy"))
    noisy = build("cct-4/3x2", CLASSES, in_channels=3, image_size=16, seed=0)
    assert is_stochastic(noisy)
    assert not fits(clients(noisy, world())[0], TASK)
    assert not is_stochastic(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)))


def test_networks_whose_layers_share_a_tensor_do_not_fit() -> None:
    """They have two names for it, of which one would be trained and the other loaded."""
    model = network()
    model.encoder.add_module("again", nn.Linear(model.feature_dim, model.feature_dim))
    model.encoder.add_module("twice", nn.Linear(model.feature_dim, model.feature_dim))
    assert fits(clients(model, world())[0], TASK)
    model.encoder.twice.weight = model.encoder.again.weight
    assert not fits(clients(model, world())[0], TASK)


def test_stackable_is_said_of_what_trains_as_fedavg_does() -> None:
    said = {name: algorithm.stackable for name, algorithm in ALGORITHMS.items()}
    assert said == {name: type(algorithm).train is FedAvg.train for name, algorithm in ALGORITHMS.items()}


def test_batches_side_by_side_are_each_clients_own() -> None:
    sets = [training_set(count) for count in (9, 5, 5, 1)]

    def draws_of() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(place) for place in range(4)]

    found = list(cohort_epoch(sets, 4, draws_of()))
    assert [len(batch.x) for batch in found] == [4, 3, 1]
    for place, (data, draw) in enumerate(zip(sets, draws_of(), strict=True)):
        for number, (x, labels) in enumerate(epoch(data, 4, draw)):
            batch = found[number]
            there = batch.mask[place].bool()
            assert int(there.sum()) == len(labels)
            assert torch.equal(batch.x[place][there], x)
            assert torch.equal(batch.labels[place][there], labels)
            assert not batch.x[place][~there].any()
    assert [len(batch.x) for batch in cohort_epoch(sets, 4, draws_of(), smallest=2)] == [3, 1]


def test_padding_moves_no_running_statistics() -> None:
    model = network(norm=True).double().train()
    x = torch.rand(5, 3, 16, 16, dtype=torch.float64)
    batch = padded([(x, torch.zeros(5, dtype=torch.int64)), (x[:3], torch.zeros(3, dtype=torch.int64))])
    parameters = {name: torch.stack([value.detach()] * 2) for name, value in model.named_parameters()}
    buffers = {name: torch.stack([b] * 2) for name, b in model.named_buffers() if b.is_floating_point()}
    output, moved = VectorizedNetwork(model)(parameters, buffers, batch.x, batch.mask)
    assert set(moved) == {"encoder.norm.running_mean", "encoder.norm.running_var"}
    for place, count in ((0, 5), (1, 3)):
        twin = copy.deepcopy(model)
        torch.testing.assert_close(output[place][:count], twin(x[:count]))
        for name, value in moved.items():
            torch.testing.assert_close(value[place], twin.state_dict()[name])
    assert "forward" not in model.encoder.norm.__dict__
