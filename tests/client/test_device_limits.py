"""What a device refuses, what it leaves unchanged, and clients of odd sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.app import ContextState
from fedtta.client.state import DirectoryState
from fedtta.data import Federation
from fedtta.messages.requests import AdapterRow as Row
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
    through_statistics,
)
from tests.client.tiny import Client as Device

Arrays = dict[str, np.ndarray]


def test_evaluation_needs_the_statistics_of_its_round() -> None:
    client = device()
    arrays = global_arrays(network())
    means = {"descriptor": np.ones(FEATURES), "dle": np.full(FEATURES, 0.5)}
    means |= {"entropy_local": np.ones(1), "entropy_global": np.ones(1)}
    rows = [Row("fedavg", "none")]
    with pytest.raises(ValueError, match="this client has no statistics of round 1"):
        client.evaluate(1, Task("ce"), arrays, means, rows, ["original"])
    client.train(1, Task("ce"), arrays)
    with pytest.raises(ValueError, match="this client has no statistics of round 2"):
        client.evaluate(2, Task("ce"), arrays, means, rows, ["original"])
    client.statistics(2, Task("ce"), arrays)
    client.evaluate(2, Task("ce"), arrays, means, rows, ["original"])
    # a training that went on and lost this client's last statistics must not fall back on the earlier ones
    with pytest.raises(ValueError, match="this client has no statistics of round 4"):
        client.evaluate(4, Task("ce"), arrays, means, rows, ["original"])


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
    "train": lambda client, arrays: client.train(3, Task("ce"), arrays),
    "statistics": lambda client, arrays: client.statistics(3, Task("ce"), arrays),
    "evaluate": lambda client, arrays: client.evaluate(3, Task("ce"), arrays, {}, [Row("a", "none")], ["original"]),
}


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("how", ["not finite", "missing", "unknown", "shape", "dtype", "variance"])
def test_arrays_that_do_not_fit_are_refused_by_name_and_change_nothing(call: str, how: str) -> None:
    client = device(model=network(norm=True))
    arrays, _ = client.train(1, Task("ce"), global_arrays(network(norm=True)))
    client.statistics(2, Task("ce"), arrays)
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
        client.evaluate(1, Task("ce"), arrays, spoiled_means, [Row("a", "none")], ["original"])


def test_an_unknown_objective_is_refused_before_anything_changes() -> None:
    client = device()
    with pytest.raises(ValueError, match="there are: cross_entropy, balanced_softmax"):
        client.train(1, Task("ce", objective="focal"), global_arrays(network()))
    assert not state_of(client).entries


@pytest.mark.parametrize("phase", ["personal", "local"])
def test_a_round_that_diverges_leaves_the_private_state_as_it_was(phase: str) -> None:
    client = device()
    arrays, _ = client.train(1, Task("ce"), global_arrays(network()))
    before = dict(state_of(client).entries)
    wild = device(
        state=client.state, model=client.model, learning_rate=1e30, personal_epochs=3 if phase == "personal" else 0
    )
    with pytest.raises(FloatingPointError, match="personal head" if phase == "personal" else "local training"):
        wild.train(2, Task("ce"), arrays)
    assert state_of(client).entries == before
    client.train(2, Task("ce"), arrays)  # and the network works again


# -- the same bits


def a_run(client: Device) -> tuple[Arrays, Arrays, list[dict[str, Any]]]:
    arrays, means = through_statistics(client)
    rows = [Row("fedthe", "fedthe"), Row("btfl", "btfl")]
    _, results = client.evaluate(3, Task("ce"), arrays, means, rows, ["original", "corrupted", "mixture"])
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
    """Also between clients that hold the same images_: shuffles and augmentation are drawn for each."""
    one = federation_of_splits(images(30), (20, 5, 5))
    twins = Federation(one.images, one.splits * 2, one.seed)
    trained, heads = [], []
    for partition, round, seed in ((0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)):
        client = device(partition, world=twins, augment=True, seed=seed)
        trained.append(client.train(round, Task("ce"), global_arrays(network()))[0])
        heads.append(state_of(client).entries["ce", round])
    for i, j in itertools.combinations(range(4), 2):
        assert not same(trained[i], trained[j])
        assert not same(heads[i], heads[j])


@pytest.mark.parametrize("backend", ["directory", "context"])
def test_a_new_device_for_every_message_computes_the_same(backend: str, tmp_path: Path) -> None:
    from flwr.app import RecordDict

    records = RecordDict()

    def again() -> Device:
        state = DirectoryState(tmp_path, "run", "0") if backend == "directory" else ContextState(records)
        return device(state=state, model=network(norm=False, seed=11))

    arrays = global_arrays(network(seed=9))
    for round in (1, 2):
        arrays, _ = again().train(round, Task("ce"), arrays)
    means, _ = again().statistics(3, Task("ce"), arrays)
    rows = [Row("fedthe", "fedthe"), Row("btfl", "btfl")]
    _, results = again().evaluate(3, Task("ce"), arrays, means, rows, ["original", "corrupted", "mixture"])
    expected = a_run(device())
    assert same(arrays, expected[0])
    assert same(means, expected[1])
    assert [{k: v for k, v in result.items() if k != "seconds"} for result in results] == expected[2]


def test_a_round_may_be_done_again_after_a_step_back() -> None:
    client = device()
    arrays = [global_arrays(network())]
    for round in (1, 2):
        arrays.append(client.train(round, Task("ce"), arrays[-1])[0])
    again, _ = client.train(2, Task("ce"), arrays[1])
    assert same(again, arrays[2])


# -- odd clients


def odd(sizes: tuple[int, int, int], norm: bool = False, **changes: Any) -> tuple[Device, Arrays, Arrays]:
    client = device(
        world=federation_of_splits(images(60), sizes, (10, 4, 6)), model=network(norm), clients=2, **changes
    )
    arrays = global_arrays(client.model)
    for round in (1, 2):
        arrays, metrics = client.train(round, Task("ce", objective="balanced_softmax"), arrays)
        assert all(np.isfinite(value) for value in metrics.values())
        assert all(np.isfinite(value).all() for value in arrays.values())
    means, _ = client.statistics(3, Task("ce"), arrays)
    return client, arrays, means


ALL = [Row(name, name) for name in ("none", "personal", "fixed_mix", "fedthe", "btfl")]
TUNED = [Row("memo", "memo", {"views": 2, "steps": 1}), Row("plus", "fedthe_plus", {"views": 2, "tune_steps": 1})]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sizes", [(1, 0, 1), (2, 0, 1), (5, 1, 2), (9, 3, 3)])
def test_a_client_with_fewer_samples_than_a_batch(sizes: tuple[int, int, int], norm: bool) -> None:
    client, arrays, means = odd(sizes, norm, batch_size=8)
    check, results = client.evaluate(3, Task("ce"), arrays, means, ALL, ["original", "corrupted", "out_of_client"])
    assert check == {"checked": 3 * sizes[2], "leaked": 0}
    assert [result["total"] for result in results] == [sizes[2]] * 15


def test_a_client_with_one_class() -> None:
    images_ = dataclasses.replace(images(60), labels=np.repeat([1, 0, 2], 20).astype(np.int64))
    client = device(world=federation_of_splits(images_, (12, 4, 4), (10, 5, 5), (10, 5, 5)))
    arrays = global_arrays(client.model)
    arrays, metrics = client.train(1, Task("ce", objective="balanced_softmax"), arrays)
    assert np.isfinite(metrics["train-loss"])
    means, _ = client.statistics(2, Task("ce"), arrays)
    _, results = client.evaluate(2, Task("ce"), arrays, means, ALL, ["original", "out_of_client"])
    assert all(0 <= result["correct"] <= result["total"] == 4 for result in results)


def test_an_empty_test_stream_counts_nothing() -> None:
    client, arrays, means = odd((4, 2, 0))
    check, results = client.evaluate(3, Task("ce"), arrays, means, ALL + TUNED, ["original", "corrupted", "mixture"])
    assert check == {"checked": 0, "leaked": 0}
    assert len(results) == 21
    for result in results:
        assert (result["correct"], result["total"]) == (0, 0)
        assert "weight_mean" not in result, "no sample, no mean weight"


def test_an_empty_validation_split_counts_nothing() -> None:
    client, arrays, _ = odd((4, 0, 2))
    _, metrics = client.statistics(4, Task("ce"), arrays)
    assert (metrics["validation-total"], metrics["validation-correct"]) == (0, 0)
