"""Clients whose splits are redrawn: each phase uses the samples of its round, and the leak is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client import device as device_module
from fedtta.client.algorithms.training import TrainingSet, labelled
from fedtta.client.evaluation import memorize
from fedtta.client.serving import baseline_predictions
from fedtta.client.statistics import Samples, requested_statistics
from fedtta.data import Federation, stream
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow as Row
from fedtta.settings import Settings
from tests.client.tiny import Client as Device
from tests.client.tiny import Task, device, global_arrays, images, made, network

ROUNDS = 5
GLOBAL, PERSONAL = Row("fedavg", "none"), Row("personal", "personal")
TUNED, NEIGHBOURS = Row("tuned", "none", base="personalised"), Row("near", "knn_per", {"weight": 0.5})
SHIFTS = ["original", "corrupted", "out_of_client"]


class Log:
    """Which samples clients in fact trained on: partition → one array for each training set that was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.train: dict[int, list[np.ndarray]] = {}
        original = TrainingSet.of_client

        def noted(federation: Federation, partition: int, *rest: Any) -> Any:
            data = original(federation, partition, *rest)
            self.train.setdefault(partition, []).append(data.index)
            return data

        monkeypatch.setattr(TrainingSet, "of_client", noted)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def world(redraw: bool = True) -> Federation:
    return Federation.create(images(240), 3, "iid", seed=1, resample_splits=redraw)


def trained(rounds: int = ROUNDS, statistics: bool = True) -> tuple[list[Device], Arrays, Arrays | None]:
    whole = world()
    clients = [device(partition, world=whole) for partition in range(3)]
    arrays = global_arrays(network(seed=1))
    for round in range(1, rounds + 1):
        sent = [client.train(round, Task("t"), arrays)[0] for client in clients]
        arrays = {name: np.mean([one[name] for one in sent], 0, dtype=np.float64).astype(np.float32) for name in arrays}
    if not statistics:
        return clients, arrays, None
    local = [client.statistics(rounds + 1, Task("t"), arrays)[0] for client in clients]
    return clients, arrays, {name: np.mean([one[name] for one in local], 0) for name in local[0]}


def counted(client: Device, shifts: list[str], seen: set[int]) -> int:
    streams = [stream(client.federation, client.partition, shift, seed=1) for shift in shifts]
    return sum(int(index) in seen for one in streams for index in one.index)


def test_every_round_trains_on_its_own_split(log: Log) -> None:
    clients, _, _ = trained()
    for partition, used in log.train.items():
        splits = [clients[0].federation.in_round(round).splits[partition] for round in range(1, ROUNDS + 2)]
        assert all(np.array_equal(one, other.train) for one, other in zip(used, splits, strict=True))
        assert len({one.tobytes() for one in used}) == ROUNDS + 1


@pytest.mark.parametrize("rows", [[GLOBAL, PERSONAL], [GLOBAL, TUNED]], ids=["heads", "tuned"])
def test_the_leak_is_what_was_in_fact_trained_on(log: Log, rows: list[Row]) -> None:
    """Own samples of all phases, and others' of the rounds of training; over 95 % of the own streams."""
    clients, arrays, means = trained()
    others = {int(index) for used in log.train.values() for one in used[:ROUNDS] for index in one}
    for client in clients:
        check, results = client.evaluate(ROUNDS + 1, Task("t"), arrays, means, rows, SHIFTS)
        own = {int(index) for one in log.train[client.partition] for index in one}
        assert check["checked"] == sum(one["total"] for one in results) / 2
        assert check["leaked"] == counted(client, SHIFTS, own | others)
        assert counted(client, SHIFTS[:2], own | others) > 0.95 * 2 * len(client.federation.splits[0].test)


def test_what_no_row_trains_on_does_not_count(log: Log) -> None:
    clients, arrays, _ = trained(rounds=1, statistics=False)
    seen = {int(index) for used in log.train.values() for one in used for index in one}
    own = clients[1].federation.in_round(2).splits[1].train
    checks = [clients[1].evaluate(2, Task("t"), arrays, None, [row], SHIFTS)[0] for row in (GLOBAL, TUNED, NEIGHBOURS)]
    leaked = [check["leaked"] for check in checks]
    assert leaked[0] == counted(clients[1], SHIFTS, seen)
    assert leaked[1] == leaked[2] == counted(clients[1], SHIFTS, seen | {int(index) for index in own}) > leaked[0]


def test_validation_and_statistics_are_those_of_the_round() -> None:
    clients, arrays, _ = trained(rounds=1)
    client, model = clients[0], network()
    _, metrics = client.train(2, Task("t"), arrays)
    model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    model.eval()
    current = client.federation.in_round(2)
    images_, now = current.images, current.splits[0]
    right = model(images_.batch(now.validation, "cpu")).argmax(1).numpy() == images_.labels[now.validation]
    assert (metrics["validation-correct"], metrics["validation-total"]) == (right.sum(), len(now.validation))

    local, _ = client.statistics(2, Task("t"), arrays, ["label_prior", "confusion"])
    z = model.features(images_.batch(now.train, "cpu")).detach().double()
    np.testing.assert_allclose(local["descriptor"], z.mean(0).numpy(), rtol=1e-5)
    np.testing.assert_allclose(local["label_prior"], np.bincount(images_.labels[now.train], minlength=3) / len(z))
    held_out = labelled(current, now.validation, client.device)
    samples = Samples(client.model, torch.ones(3), *held_out, client.settings)
    pooled = requested_statistics(samples, ["confusion"])
    np.testing.assert_array_equal(local["confusion"], pooled["confusion"])


def test_neighbours_and_what_is_usual_are_of_the_last_split() -> None:
    clients, arrays, _ = trained(rounds=1, statistics=False)
    client = clients[2]
    served = client.serve(2, Task("t"), arrays, None, NEIGHBOURS)
    now = client.federation.in_round(2)
    expected = memorize(client.model, now, 2, client.settings, client.device)
    assert served.datastore is not None
    assert torch.equal(served.datastore.features, expected.store.features)
    assert torch.equal(served.datastore.labels, expected.store.labels)
    ordinary = baseline_predictions(client.model, now, 2, client.device, 16, labelled=True)
    assert served.baseline.entropy == ordinary.entropy
    before = memorize(client.model, client.federation, 2, client.settings, client.device)
    assert not torch.equal(before.store.features, expected.store.features)


def test_rates_are_refined_on_the_rounds_validation_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    client, seen = device(1, world=world()), list[np.ndarray]()
    refine = device_module.refine_rates

    def noted(model: Any, x: Any, y: torch.Tensor, *rest: Any) -> Any:
        seen.append(y.numpy())
        return refine(model, x, y, *rest)

    monkeypatch.setattr(device_module, "refine_rates", noted)
    arrays = global_arrays(client.model)
    for round in (1, 2):
        client.refine_rates(round, arrays, {}, "all")
        held_out = client.federation.in_round(round).splits[1].validation
        assert np.array_equal(seen[-1], client.federation.images.labels[held_out])


def test_drawn_once_clients_train_on_the_one_split(log: Log) -> None:
    client = device(0, world=world(redraw=False))
    arrays = global_arrays(client.model)
    for round in (1, 2):
        arrays, _ = client.train(round, Task("t"), arrays)
    assert all(np.array_equal(one, client.federation.splits[0].train) for one in log.train[0])


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_node_that_only_trains_or_only_tests_is_refused(role: str) -> None:
    settings = Settings(fraction=0.1, image_size=16, clients=3, device="cpu", split="published")
    with pytest.raises(ValueError, match=f"role = '{role}': allowed for client 1 are both"):
        made(settings, 1, role)
    assert made(settings, 1, "both").federation.resample_splits
