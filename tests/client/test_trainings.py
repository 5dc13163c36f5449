"""Trainings that keep something on the client: what is sent, what stays, what a client tests with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.algorithms import ALGORITHMS, LocalContext
from fedtta.client.algorithms.training import TrainingSet, cross_entropy, generator
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow as Row
from fedtta.models import TwoHead
from tests.client import tiny
from tests.client.tiny import Task, device, global_arrays, network, same, state_of

HEAD = {"head.weight", "head.bias"}
NORM = {f"encoder.norm.{part}" for part in ("weight", "bias", "running_mean", "running_var")}


def task(rule: str, kept: Iterable[str] = (), norm: bool = False, **more: Any) -> Task:
    names = set(network(norm=norm).global_state())
    return Task("t", rule, aggregated=frozenset(names - set(kept)), **more)


def shared(arrays: Arrays, what: Task) -> Arrays:
    assert what.aggregated is not None
    return {name: value for name, value in arrays.items() if name in what.aggregated}


@pytest.mark.parametrize(
    ("rule", "kept"), [("personalized", HEAD), ("fedrep", HEAD), ("personalized", NORM), ("personalized", HEAD | NORM)]
)
def test_what_is_kept_is_not_sent_and_goes_on_from_round_to_round(rule: str, kept: set[str]) -> None:
    """Two rounds with what is shared alone equal two rounds in which the server sends the kept arrays back."""
    what, whole = task(rule, kept, norm=True), task(rule, norm=True)
    client, alone = (device(model=network(norm=True, seed=1)) for _ in range(2))
    first = global_arrays(network(norm=True, seed=4))
    sent, _ = client.train(1, what, first)
    everything, _ = alone.train(1, whole, first)
    assert set(sent) == set(first) - kept
    assert same(sent, shared(everything, what))
    again, _ = client.train(2, what, sent)
    everything, _ = alone.train(2, whole, everything)
    assert same(again, shared(everything, what))
    private = state_of(client).load("t", 2)
    assert private is not None
    assert all(np.array_equal(private[f"kept.{name}"], everything[name]) for name in kept)


def test_kept_arrays_go_before_those_of_a_server_that_sends_all_again() -> None:
    what = task("personalized", HEAD)
    client, other = device(), device()
    first = global_arrays(network(seed=4))
    sent, _ = client.train(1, what, first)
    other.train(1, what, first)
    one, _ = client.train(2, what, sent)
    two, _ = other.train(2, what, {**first, **sent})  # as to a client whose reply was lost
    assert same(one, two)
    # at the end, where all arrays are the server's, what it sends counts
    _, (result,) = client.evaluate(2, Task("t", "personalized"), first, None, [Row("a", "none")], ["original"])
    _, (plain,) = device().evaluate(1, Task("t", "personalized"), first, None, [Row("a", "none")], ["original"])
    assert result["correct"] == plain["correct"]


@pytest.mark.parametrize("rule", list(ALGORITHMS))
def test_a_process_of_its_own_for_every_message_gives_the_same_bits(rule: str) -> None:
    """A network that has just been built is in training mode; one that has been used before is not."""
    sent = []
    for used in (False, True):
        model = network(norm=True, seed=2, rotation=True)
        client = device(model=model.eval() if used else model.train())
        first = global_arrays(network(norm=True, seed=4, rotation=True))
        arrays, metrics = client.train(1, Task("t", rule), first)
        statistics, _ = device(model=model.eval() if used else model.train()).statistics(1, Task("t", rule), first)
        sent.append({**arrays, **statistics, "right": np.array(metrics["validation-correct"])})
    assert same(*sent)


def test_a_client_that_has_never_had_an_array_says_so() -> None:
    what = task("personalized", HEAD)
    with pytest.raises(ValueError, match=r"missing \['head.weight', 'head.bias'\], which this client has not kept"):
        device().train(1, what, shared(global_arrays(network()), what))


@pytest.mark.parametrize("rule", ["fedavg", "ditto", "apfl", "classifier"])
def test_personalised_rows_get_what_the_rule_makes(rule: str) -> None:
    client, what = device(local_epochs=2), task(rule)
    arrays = global_arrays(network(seed=4))
    for round in (1, 2):
        arrays, _ = client.train(round, what, arrays)
    rows = [Row("personalized", "none", base="personalised"), Row("global", "none")]
    _, results = client.evaluate(3, what, arrays, None, rows, ["original", "out_of_client"])
    found = {(one["method"], one["shift"]): one["correct"] for one in results}

    private = state_of(client).load("t", 3)
    assert private is not None
    own = {name[4:]: torch.tensor(value) for name, value in private.items() if name.startswith("own.")}
    model = network()
    model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    data = TrainingSet.of_client(client.federation, 0, client.settings, client.device)
    draw = generator(client.settings.seed, "personalise", 3, 0)
    before = tiny.snapshot(model)
    correct = {"global": right(model, client, "original")}
    ALGORITHMS[rule].personalize(LocalContext(model, data, cross_entropy, client.settings, draw, own))
    assert tiny.changed(before, model)
    correct["personalized"] = right(model, client, "original")
    assert {name: found[name, "original"] for name in correct} == correct


def right(model: TwoHead, client: Any, shift: str) -> int:
    samples = client._stream(shift)
    with torch.no_grad():
        return int((model.eval()(samples.x).argmax(1) == samples.y).sum())


def test_statistics_of_labels_are_sent_only_when_wanted() -> None:
    client, arrays = device(), global_arrays(network(seed=4))
    plain, _ = client.statistics(1, Task("t"), arrays)
    assert set(plain) == {"descriptor", "dle", "entropy_local", "entropy_global"}
    asked, _ = client.statistics(1, Task("t"), arrays, ["label_prior", "confusion", "block_scores"])
    split = client.federation.splits[0]
    labels = client.federation.images.labels
    counts = np.bincount(labels[split.train], minlength=tiny.CLASSES)
    np.testing.assert_allclose(asked["label_prior"], counts / counts.sum())
    expected = np.zeros((tiny.CLASSES, tiny.CLASSES))
    with torch.no_grad():
        guessed = client.model(client.federation.images.batch(split.validation, client.device)).argmax(1)
    for guess, label in zip(guessed.tolist(), labels[split.validation], strict=True):
        expected[guess, label] += 1 / len(split.validation)
    np.testing.assert_allclose(asked["confusion"], expected)
    assert asked["block_scores"].shape == (3,)  # conv, fc, head
    assert ((asked["block_scores"] >= 0) & (asked["block_scores"] <= 1)).all()
    rows = [Row("em", "em"), Row("bbse", "bbse"), Row("surgical", "surgical")]
    _, results = client.evaluate(1, Task("t"), arrays, asked, rows, ["mixture"])
    assert [one["method"] for one in results] == ["em", "bbse", "surgical"]
    with pytest.raises(ValueError, match="mean confusion: values from"):
        client.evaluate(1, Task("t"), arrays, {**asked, "confusion": -expected}, rows, ["mixture"])


def test_a_client_that_only_tests_gets_the_pooled_means_alone() -> None:
    client, arrays = device(), global_arrays(network(seed=4))
    means, _ = client.statistics(1, Task("t"), arrays, ["label_prior"])
    target = device(1, role="target")
    _, (result,) = target.evaluate(1, Task("t"), arrays, means, [Row("em", "em")], ["original"])
    assert result["total"] > 0
    with pytest.raises(ValueError, match=r"needs statistics of .* descriptor_local \(of this"):
        target.evaluate(1, Task("t"), arrays, means, [Row("fedthe", "fedthe")], ["original"])


def test_neighbours_are_the_clients_own_training_images() -> None:
    """With all weight on the vote and one neighbour, training images would be told without error."""
    client, arrays = device(), global_arrays(network(seed=4))
    vote = Row("vote", "knn_per", {"weight": 1.0, "neighbours": 1})
    _, results = client.evaluate(1, Task("t"), arrays, None, [vote, Row("knn", "knn_per")], ["original"])
    split, images = client.federation.splits[0], client.federation.images
    with torch.no_grad():
        z, known = (client.model.features(images.batch(part, client.device)) for part in (split.test, split.train))
    nearest = torch.cdist(z.double(), known.double()).argmin(1).numpy()
    expected = (images.labels[split.train][nearest] == images.labels[split.test]).sum()
    assert {one["method"]: one["correct"] for one in results}["vote"] == expected
    with pytest.raises(ValueError, match="is a target"):
        device(1, role="target").evaluate(1, Task("t"), arrays, None, [vote], ["original"])
