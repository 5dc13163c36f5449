"""One client's rounds: what it sends, keeps, refuses, and that equal inputs give equal bits."""

from __future__ import annotations

import copy
import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedtta.client import resources
from fedtta.client.algorithms.training import generator
from fedtta.client.resources import federation_of, natural_of, network_spec
from fedtta.client.statistics import summarise
from fedtta.data import CORRUPTIONS
from fedtta.settings import Settings
from tests.client.tiny import (
    CLASSES,
    FEATURES,
    Task,
    device,
    federation_of_splits,
    global_arrays,
    images,
    network,
    same,
    state_of,
)
from tests.client.tiny import Client as Device

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize("norm", [False, True])
def test_a_reply_looks_like_the_global_state_and_holds_nothing_private(norm: bool) -> None:
    client = device(model=network(norm))
    arrays = global_arrays(client.model)
    sent, metrics = client.train(1, Task("ce"), arrays)
    assert list(sent) == list(arrays)
    assert not [name for name in sent if "personal" in name or "num_batches" in name]
    for name, value in sent.items():
        assert value.shape == arrays[name].shape
        assert value.dtype == arrays[name].dtype == np.float32
        assert value.flags.c_contiguous
        assert not np.array_equal(value, arrays[name]), f"{name} was not trained"
    assert set(metrics) == {
        "num-examples", "train-loss", "seconds", "validation-total", "validation-correct",
        "personal-validation-correct",
    }  # fmt: skip
    assert metrics["num-examples"] == len(client.federation.splits[0].train) == 24


def test_what_was_sent_stays_as_it_was_when_the_next_client_trains() -> None:
    """All clients of a process share one network; a reply must not be a view of it."""
    model = network()
    arrays = global_arrays(model)
    sent, _ = device(0, model=model).train(1, Task("ce"), arrays)
    kept = {name: value.copy() for name, value in sent.items()}
    device(1, model=model).train(1, Task("ce"), arrays)
    assert same(sent, kept)
    lent, _ = device(0, model=model).train(1, Task("ce"), arrays, lend=True)
    assert same(lent, sent)
    device(1, model=model).train(1, Task("ce"), arrays)
    assert not same(lent, sent)


def test_running_averages_over_all_batches_do_not_count_those_of_others() -> None:
    """Without a momentum, BatchNorm weighs a batch by how many there have been; that number does not travel."""
    model = network(norm=True)
    model.encoder.norm = nn.BatchNorm2d(4, momentum=None)
    arrays = global_arrays(model)
    alone, _ = device(1, model=copy.deepcopy(model)).train(1, Task("ce"), arrays)
    device(0, model=model).train(1, Task("ce"), arrays)
    after_another, _ = device(1, model=model).train(1, Task("ce"), arrays)
    assert same(after_another, alone)


def test_nothing_tells_label_counts() -> None:
    """Two clients with the same images_ but other labels say the same of themselves and count the same examples."""
    images_ = images(30)
    relabelled = dataclasses.replace(images_, labels=np.zeros(30, np.int64))
    one, other = (device(world=federation_of_splits(p, (10, 5, 5), (10, 0, 0))) for p in (images_, relabelled))
    assert one.describe() == other.describe()
    for client in (one, other):
        arrays = global_arrays(network())
        _, metrics = client.train(1, Task("ce", objective="balanced_softmax"), arrays)
        means, statistics_metrics = client.statistics(2, Task("ce"), arrays)
        assert not [key for key in (*metrics, *statistics_metrics, *means) if "label" in key or "count" in key]
        assert all(isinstance(value, int | float) for value in {**metrics, **statistics_metrics}.values())
        assert {name: value.shape for name, value in means.items()} == {
            "descriptor": (FEATURES,), "dle": (FEATURES,), "entropy_local": (1,), "entropy_global": (1,),
        }  # fmt: skip


def test_describe_is_sizes_and_kinds() -> None:
    client = device(1, shifts="brfl")
    assert client.describe() == {
        "name": "1",
        "classes": ["class0", "class1", "class2"],
        "channels": 3,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "sizes": [24, 8, 8],
        "shifts": ["original", "corrupted", "out_of_client", "mixture"],
        "note": "no natural data set is at hand: the natural column is left out; mixture is equal parts of the "
        "other three",
        "role": "both",
        "corruptions": [],
        "stream-rounds": 0,
        "own-data": False,
        "images": len(client.federation.images),
        "pixel-mean": pytest.approx(client.federation.images.pixels.mean()),
        "labelled": True,
        "samples": 0,
        "skipped": 0,
        "notes": [],
    }
    natural = device(natural=images(30, seed=5, name="other")).describe()
    assert "natural" in natural["shifts"]
    assert natural["note"] == ""
    # with test-time rounds: how many there are and under which corruptions; nothing is left out of those
    streams = {"stream_size": 12, "stream_batch": 4, "collaborations": "fedavg"}
    told = device(1, shifts="brfl", **streams).describe()
    assert told == {
        **client.describe(), "note": "", "corruptions": list(CORRUPTIONS), "stream-rounds": 3 * len(CORRUPTIONS),
    }  # fmt: skip


def test_describe_refuses_a_shift_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown shift 'nonsense'; there are: brfl"):
        device(shifts="original,nonsense").describe()


# -- the personal head


def personal_by_hand(
    client: Device, arrays: Arrays, start: np.ndarray, draw: torch.Generator, epochs: int
) -> torch.Tensor:
    """Plain SGD of a bias-free softmax layer on the features of the received network, in evaluation mode."""
    twin = network(norm=True)
    twin.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    own = client.federation.splits[client.partition].train
    labels = torch.tensor(client.federation.images.labels[own])
    with torch.no_grad():
        features = twin.eval().features(client.federation.images.batch(own))
    w, given = torch.tensor(start), client.settings
    for _ in range(epochs):
        for chosen in torch.randperm(len(own), generator=draw).split(given.batch_size):
            z, y = features[chosen], functional.one_hot(labels[chosen], CLASSES).float()
            gradient = (torch.softmax(z @ w.T, 1) - y).T @ z / len(chosen)
            w = w - given.learning_rate * (gradient + given.weight_decay * w)
    return w


def test_the_personal_head_goes_on_from_round_to_round_on_the_received_encoder() -> None:
    client = device(1, model=network(norm=True), weight_decay=0.02, personal_epochs=2)
    first, second = (global_arrays(network(norm=True, seed=seed)) for seed in (3, 4))
    bound = FEATURES**-0.5
    start = torch.empty(CLASSES, FEATURES).uniform_(-bound, bound, generator=generator(1, "head")).numpy()
    for round, arrays in ((1, first), (2, second)):
        client.train(round, Task("ce"), arrays)
        expected = personal_by_hand(client, arrays, start, generator(1, "personal", round, 1), epochs=2)
        kept = state_of(client).load("ce", round)
        assert kept is not None
        torch.testing.assert_close(torch.tensor(kept["personal_head.weight"]), expected, rtol=1e-3, atol=1e-4)
        start = kept["personal_head.weight"]
    client.statistics(3, Task("ce"), first)
    expected = personal_by_hand(client, first, start, generator(1, "final", 3, 1), epochs=2)
    kept = state_of(client).load("ce", 3)
    assert kept is not None
    torch.testing.assert_close(torch.tensor(kept["personal_head.weight"]), expected, rtol=1e-3, atol=1e-4)


def test_all_clients_start_from_one_personal_head() -> None:
    heads = []
    for partition in (0, 2):
        client = device(partition, model=network(seed=partition), personal_epochs=0)
        client.train(1, Task("ce"), global_arrays(network()))
        heads.append(state_of(client).entries["ce", 1]["personal_head.weight"])
    assert np.array_equal(*heads)
    other_seed = device(personal_epochs=0, seed=2)
    other_seed.train(1, Task("ce"), global_arrays(network()))
    assert not np.array_equal(state_of(other_seed).entries["ce", 1]["personal_head.weight"], heads[0])


def test_trainings_keep_their_heads_apart() -> None:
    client, alone = device(), device()
    for round in (1, 2):
        client.train(round, Task("ce"), global_arrays(network()))
        client.train(round, Task("balanced", objective="balanced_softmax"), global_arrays(network(seed=5)))
        alone.train(round, Task("ce"), global_arrays(network()))
    assert same(state_of(client).entries["ce", 2], state_of(alone).entries["ce", 2])
    assert not same(state_of(client).entries["ce", 2], state_of(client).entries["balanced", 2])


def test_the_objective_matters_to_the_shared_part_only() -> None:
    clients = device(), device()
    sent = [
        client.train(1, Task("t", objective=objective), global_arrays(network()))[0]
        for client, objective in zip(clients, ("cross_entropy", "balanced_softmax"), strict=True)
    ]
    assert not same(*sent)
    assert same(*(state_of(client).entries["t", 1] for client in clients))


# -- statistics


def test_statistics_are_those_of_the_final_model_and_head_without_augmentation() -> None:
    client = device(1, augment=True)
    arrays = global_arrays(network(seed=4))
    sent, metrics = client.statistics(5, Task("ce"), arrays)
    kept = state_of(client).entries["ce", 5]
    twin = network(seed=4)
    with torch.no_grad():
        twin.personal_head.weight.copy_(torch.tensor(kept["personal_head.weight"]))
    pixels = client.federation.images.pixels[client.federation.splits[1].train]
    expected = summarise(twin, torch.tensor(pixels), 1000)
    for name, value in expected.items():
        assert sent[name].dtype == np.float64
        np.testing.assert_allclose(sent[name], value, rtol=1e-6, err_msg=name)
        assert np.array_equal(kept[f"statistics.{name}"], sent[name])
    assert metrics["num-examples"] == 24
    assert same(global_arrays(client.model), arrays), "statistics must not train the shared part"


def test_validation_counts_the_received_global_head_and_the_new_personal_head() -> None:
    client = device(2, eval_batch_size=3)
    arrays = global_arrays(network(seed=4))
    _, metrics = client.train(1, Task("ce"), arrays)
    twin = network(seed=4).eval()
    with torch.no_grad():
        twin.personal_head.weight.copy_(torch.tensor(state_of(client).entries["ce", 1]["personal_head.weight"]))
        correct = {"validation-correct": 0, "personal-validation-correct": 0}
        for index in client.federation.splits[2].validation:
            z, y = twin.features(client.federation.images.batch([index])), client.federation.images.labels[index]
            correct["validation-correct"] += int(twin.head(z).argmax()) == y
            correct["personal-validation-correct"] += int(twin.personal_head(z).argmax()) == y
    assert metrics["validation-total"] == 8
    assert {name: metrics[name] for name in correct} == correct


def test_a_data_set_that_is_divided_has_the_channels_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(channels=1, clients=2, fraction=0.15, image_size=16)
    grey = federation_of(settings).images
    assert grey.shape == (1, 16, 16)
    assert network_spec(grey, settings)["in_channels"] == 1
    asked = Mock(return_value=None)
    monkeypatch.setattr(resources, "load_natural", asked)
    natural_of(settings)
    assert asked.call_args.args == ("digits", None, 16, 1)
