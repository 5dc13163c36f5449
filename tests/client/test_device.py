"""One client's rounds: what it sends, keeps, refuses, and that equal inputs give equal bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from client.app import ContextState
from client.device import Device
from client.evaluation import Row
from client.randomness import generator
from client.state import DirectoryState, MemoryState
from client.summary import summarise
from data import Federation
from tests.client.tiny import (
    CLASSES,
    FEATURES,
    device,
    federation_of_splits,
    global_arrays,
    images,
    network,
)

Arrays = dict[str, np.ndarray]


def same(one: Arrays, other: Arrays) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def state_of(device: Device) -> MemoryState:
    assert isinstance(device.state, MemoryState)
    return device.state


def through_statistics(client: Device, rounds: int = 2) -> tuple[Arrays, Arrays]:
    """Train alone for some rounds and take statistics in the next one."""
    arrays = global_arrays(network(seed=9))
    for round in range(1, rounds + 1):
        arrays, _ = client.train(round, "ce", "cross_entropy", arrays)
    means, _ = client.statistics(rounds + 1, "ce", arrays)
    return arrays, means


# -- what leaves the device


@pytest.mark.parametrize("norm", [False, True])
def test_a_reply_looks_like_the_global_state_and_holds_nothing_private(norm: bool) -> None:
    client = device(model=network(norm))
    arrays = global_arrays(client.model)
    sent, metrics = client.train(1, "ce", "cross_entropy", arrays)
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
    sent, _ = device(0, model=model).train(1, "ce", "cross_entropy", arrays)
    kept = {name: value.copy() for name, value in sent.items()}
    device(1, model=model).train(1, "ce", "cross_entropy", arrays)
    assert same(sent, kept)


def test_nothing_tells_label_counts() -> None:
    """Two clients with the same pictures but other labels say the same of themselves and count the same examples."""
    pictures = images(30)
    relabelled = dataclasses.replace(pictures, labels=np.zeros(30, np.int64))
    one, other = (device(world=federation_of_splits(p, (10, 5, 5), (10, 0, 0))) for p in (pictures, relabelled))
    assert one.describe() == other.describe()
    for client in (one, other):
        arrays = global_arrays(network())
        _, metrics = client.train(1, "ce", "balanced_softmax", arrays)
        means, statistics_metrics = client.statistics(2, "ce", arrays)
        assert not [key for key in (*metrics, *statistics_metrics, *means) if "label" in key or "count" in key]
        assert all(isinstance(value, int | float) for value in {**metrics, **statistics_metrics}.values())
        assert {name: value.shape for name, value in means.items()} == {
            "descriptor": (FEATURES,), "dle": (FEATURES,), "entropy_local": (1,), "entropy_global": (1,),
        }  # fmt: skip


def test_describe_is_sizes_and_kinds() -> None:
    client = device(1, shifts="brfl")
    assert client.describe() == {
        "partition-id": 1,
        "num-partitions": 3,
        "classes": ["class0", "class1", "class2"],
        "channels": 3,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "sizes": [24, 8, 8],
        "shifts": ["original", "corrupted", "out_of_client", "mixture"],
        "note": "no natural data set is at hand: the natural column is left out; mixture is equal parts of the "
        "other three",
    }
    natural = device(natural=images(30, seed=5, name="other")).describe()
    assert "natural" in natural["shifts"]
    assert natural["note"] == ""


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
        client.train(round, "ce", "cross_entropy", arrays)
        expected = personal_by_hand(client, arrays, start, generator(1, "personal", round, 1), epochs=2)
        kept = state_of(client).load("ce", round)
        assert kept is not None
        torch.testing.assert_close(torch.tensor(kept["personal_head.weight"]), expected, rtol=1e-3, atol=1e-4)
        start = kept["personal_head.weight"]
    client.statistics(3, "ce", first)
    expected = personal_by_hand(client, first, start, generator(1, "final", 3, 1), epochs=2)
    kept = state_of(client).load("ce", 3)
    assert kept is not None
    torch.testing.assert_close(torch.tensor(kept["personal_head.weight"]), expected, rtol=1e-3, atol=1e-4)


def test_all_clients_start_from_one_personal_head() -> None:
    heads = []
    for partition in (0, 2):
        client = device(partition, model=network(seed=partition), personal_epochs=0)
        client.train(1, "ce", "cross_entropy", global_arrays(network()))
        heads.append(state_of(client).entries["ce", 1]["personal_head.weight"])
    assert np.array_equal(*heads)
    other_seed = device(personal_epochs=0, seed=2)
    other_seed.train(1, "ce", "cross_entropy", global_arrays(network()))
    assert not np.array_equal(state_of(other_seed).entries["ce", 1]["personal_head.weight"], heads[0])


def test_trainings_keep_their_heads_apart() -> None:
    client, alone = device(), device()
    for round in (1, 2):
        client.train(round, "ce", "cross_entropy", global_arrays(network()))
        client.train(round, "balanced", "balanced_softmax", global_arrays(network(seed=5)))
        alone.train(round, "ce", "cross_entropy", global_arrays(network()))
    assert same(state_of(client).entries["ce", 2], state_of(alone).entries["ce", 2])
    assert not same(state_of(client).entries["ce", 2], state_of(client).entries["balanced", 2])


def test_the_objective_matters_to_the_shared_part_only() -> None:
    clients = device(), device()
    sent = [
        client.train(1, "t", objective, global_arrays(network()))[0]
        for client, objective in zip(clients, ("cross_entropy", "balanced_softmax"), strict=True)
    ]
    assert not same(*sent)
    assert same(*(state_of(client).entries["t", 1] for client in clients))


# -- statistics


def test_statistics_are_those_of_the_final_model_and_head_without_augmentation() -> None:
    client = device(1, augment=True)
    arrays = global_arrays(network(seed=4))
    sent, metrics = client.statistics(5, "ce", arrays)
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
    _, metrics = client.train(1, "ce", "cross_entropy", arrays)
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


def test_evaluation_needs_the_statistics_of_its_round() -> None:
    client = device()
    arrays = global_arrays(network())
    means = {"descriptor": np.ones(FEATURES), "dle": np.full(FEATURES, 0.5)}
    means |= {"entropy_local": np.ones(1), "entropy_global": np.ones(1)}
    rows = [Row("fedavg", "none")]
    with pytest.raises(ValueError, match="client 0 has no statistics of round 1"):
        client.evaluate(1, "ce", arrays, means, rows, ["original"])
    client.train(1, "ce", "cross_entropy", arrays)
    with pytest.raises(ValueError, match="client 0 has no statistics of round 2"):
        client.evaluate(2, "ce", arrays, means, rows, ["original"])
    client.statistics(2, "ce", arrays)
    client.evaluate(2, "ce", arrays, means, rows, ["original"])
    # a training that went on and lost this client's last statistics must not fall back on the earlier ones
    with pytest.raises(ValueError, match="client 0 has no statistics of round 4"):
        client.evaluate(4, "ce", arrays, means, rows, ["original"])


# -- bad input


def spoiled(arrays: Arrays, how: str) -> Arrays:
    made = {name: value.copy() for name, value in arrays.items()}
    if how == "not finite":
        made["head.weight"][0, 0] = np.nan
    elif how == "missing":
        del made["head.bias"]
    elif how == "unknown":
        made["personal_head.weight"] = np.zeros((CLASSES, FEATURES), np.float32)
    elif how == "shape":
        made["head.bias"] = made["head.bias"][:1]  # would broadcast
    elif how == "dtype":
        made["head.bias"] = made["head.bias"].astype(np.float64)
    elif how == "variance":
        made["encoder.norm.running_var"][0] = -1
    return made


CALLS: dict[str, Callable[[Device, Arrays], Any]] = {
    "train": lambda client, arrays: client.train(3, "ce", "cross_entropy", arrays),
    "statistics": lambda client, arrays: client.statistics(3, "ce", arrays),
    "evaluate": lambda client, arrays: client.evaluate(3, "ce", arrays, {}, [Row("a", "none")], ["original"]),
}


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("how", ["not finite", "missing", "unknown", "shape", "dtype", "variance"])
def test_arrays_that_do_not_fit_are_refused_by_name_and_change_nothing(call: str, how: str) -> None:
    client = device(model=network(norm=True))
    arrays, _ = client.train(1, "ce", "cross_entropy", global_arrays(network(norm=True)))
    client.statistics(2, "ce", arrays)
    before, weights = dict(state_of(client).entries), global_arrays(client.model)
    named = {"unknown": "personal_head.weight", "not finite": "head.weight", "variance": "encoder.norm.running_var"}
    with pytest.raises(ValueError, match=named.get(how, "head.bias")):
        CALLS[call](client, spoiled(arrays, how))
    assert state_of(client).entries.keys() == before.keys()
    assert all(same(state_of(client).entries[key], before[key]) for key in before)
    assert same(global_arrays(client.model), weights)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dle": np.full(FEATURES, 1.5)}, "mean dle: values"),
        ({"dle": None}, r"missing \['dle'\]"),
        ({"labels": np.ones(3)}, r"unknown \['labels'\]"),
        ({"descriptor": np.ones(FEATURES + 1)}, r"mean descriptor: float64\[7\] does not fit float64\[6\]"),
        ({"descriptor": np.ones(FEATURES, np.float32)}, "mean descriptor: float32"),
        ({"descriptor": np.full(FEATURES, np.nan)}, "mean descriptor: values"),
        ({"entropy_global": np.array([np.inf])}, "mean entropy_global: values"),
    ],
)
def test_means_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    client = device()
    arrays, means = through_statistics(client, rounds=0)
    spoiled_means = {name: value for name, value in {**means, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=told):
        client.evaluate(1, "ce", arrays, spoiled_means, [Row("a", "none")], ["original"])


def test_an_unknown_objective_is_refused_before_anything_changes() -> None:
    client = device()
    with pytest.raises(ValueError, match="there are: cross_entropy, balanced_softmax"):
        client.train(1, "ce", "focal", global_arrays(network()))
    assert not state_of(client).entries


@pytest.mark.parametrize("phase", ["personal", "local"])
def test_a_round_that_diverges_leaves_the_private_state_as_it_was(phase: str) -> None:
    client = device()
    arrays, _ = client.train(1, "ce", "cross_entropy", global_arrays(network()))
    before = dict(state_of(client).entries)
    wild = device(
        state=client.state, model=client.model, learning_rate=1e30, personal_epochs=3 if phase == "personal" else 0
    )
    with pytest.raises(FloatingPointError, match="personal head" if phase == "personal" else "local training"):
        wild.train(2, "ce", "cross_entropy", arrays)
    assert state_of(client).entries == before
    client.train(2, "ce", "cross_entropy", arrays)  # and the network works again


# -- the same bits


def a_run(client: Device) -> tuple[Arrays, Arrays, list[dict[str, Any]]]:
    arrays, means = through_statistics(client)
    rows = [Row("fedthe", "fedthe"), Row("btfl", "btfl")]
    _, results = client.evaluate(3, "ce", arrays, means, rows, ["original", "corrupted", "mixture"])
    return arrays, means, [{k: v for k, v in result.items() if k != "seconds"} for result in results]


def test_equal_inputs_give_equal_bits_whatever_ran_before() -> None:
    torch.manual_seed(1)
    first = a_run(device(1, augment=True))
    torch.manual_seed(2)
    model = network(seed=7)
    for other in (0, 2):  # another client's work in the same network
        a_run(device(other, model=model, augment=True))
    second = a_run(device(1, model=model, augment=True))
    assert same(first[0], second[0])
    assert same(first[1], second[1])
    assert first[2] == second[2]


def test_partition_round_and_seed_each_make_a_difference() -> None:
    """Also between clients that hold the same pictures: shuffles and augmentation are drawn for each."""
    one = federation_of_splits(images(30), (20, 5, 5))
    twins = Federation(one.images, one.splits * 2, one.seed)
    trained, heads = [], []
    for partition, round, seed in ((0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)):
        client = device(partition, world=twins, augment=True, seed=seed)
        trained.append(client.train(round, "ce", "cross_entropy", global_arrays(network()))[0])
        heads.append(state_of(client).entries["ce", round])
    for i, j in itertools.combinations(range(4), 2):
        assert not same(trained[i], trained[j])
        assert not same(heads[i], heads[j])


@pytest.mark.parametrize("backend", ["directory", "context"])
def test_a_device_made_anew_for_every_message_computes_the_same(backend: str, tmp_path: Path) -> None:
    from flwr.app import RecordDict

    records = RecordDict()

    def again() -> Device:
        state = DirectoryState(tmp_path, "run", 0) if backend == "directory" else ContextState(records)
        return device(state=state, model=network(norm=False, seed=11))

    arrays = global_arrays(network(seed=9))
    for round in (1, 2):
        arrays, _ = again().train(round, "ce", "cross_entropy", arrays)
    means, _ = again().statistics(3, "ce", arrays)
    rows = [Row("fedthe", "fedthe"), Row("btfl", "btfl")]
    _, results = again().evaluate(3, "ce", arrays, means, rows, ["original", "corrupted", "mixture"])
    expected = a_run(device())
    assert same(arrays, expected[0])
    assert same(means, expected[1])
    assert [{k: v for k, v in result.items() if k != "seconds"} for result in results] == expected[2]


def test_a_round_may_be_done_again_after_a_step_back() -> None:
    client = device()
    arrays = [global_arrays(network())]
    for round in (1, 2):
        arrays.append(client.train(round, "ce", "cross_entropy", arrays[-1])[0])
    again, _ = client.train(2, "ce", "cross_entropy", arrays[1])
    assert same(again, arrays[2])


# -- odd clients


def odd(sizes: tuple[int, int, int], norm: bool = False, **changes: Any) -> tuple[Device, Arrays, Arrays]:
    client = device(
        world=federation_of_splits(images(60), sizes, (10, 4, 6)), model=network(norm), clients=2, **changes
    )
    arrays = global_arrays(client.model)
    for round in (1, 2):
        arrays, metrics = client.train(round, "ce", "balanced_softmax", arrays)
        assert all(np.isfinite(value) for value in metrics.values())
        assert all(np.isfinite(value).all() for value in arrays.values())
    means, _ = client.statistics(3, "ce", arrays)
    return client, arrays, means


ALL = [Row(name, name) for name in ("none", "personal", "fixed_mix", "fedthe", "btfl")]
TUNED = [Row("memo", "memo", {"views": 2, "steps": 1}), Row("plus", "fedthe_plus", {"views": 2, "tune_steps": 1})]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sizes", [(1, 0, 1), (2, 0, 1), (5, 1, 2), (9, 3, 3)])
def test_a_client_with_fewer_samples_than_a_batch(sizes: tuple[int, int, int], norm: bool) -> None:
    client, arrays, means = odd(sizes, norm, batch_size=8)
    check, results = client.evaluate(3, "ce", arrays, means, ALL, ["original", "corrupted", "out_of_client"])
    assert check == {"checked": 3 * sizes[2], "leaked": 0}
    assert [result["total"] for result in results] == [sizes[2]] * 15


def test_a_client_with_one_class() -> None:
    pictures = dataclasses.replace(images(60), labels=np.repeat([1, 0, 2], 20).astype(np.int64))
    client = device(world=federation_of_splits(pictures, (12, 4, 4), (10, 5, 5), (10, 5, 5)))
    arrays = global_arrays(client.model)
    arrays, metrics = client.train(1, "ce", "balanced_softmax", arrays)
    assert np.isfinite(metrics["train-loss"])
    means, _ = client.statistics(2, "ce", arrays)
    _, results = client.evaluate(2, "ce", arrays, means, ALL, ["original", "out_of_client"])
    assert all(0 <= result["correct"] <= result["total"] == 4 for result in results)


def test_an_empty_test_stream_counts_nothing() -> None:
    client, arrays, means = odd((4, 2, 0))
    check, results = client.evaluate(3, "ce", arrays, means, ALL + TUNED, ["original", "corrupted", "mixture"])
    assert check == {"checked": 0, "leaked": 0}
    assert len(results) == 21
    for result in results:
        assert (result["correct"], result["total"]) == (0, 0)
        assert "weight_mean" not in result, "no sample, no mean weight"


def test_an_empty_validation_split_counts_nothing() -> None:
    client, arrays, _ = odd((4, 0, 2))
    _, metrics = client.statistics(4, "ce", arrays)
    assert (metrics["validation-total"], metrics["validation-correct"]) == (0, 0)
