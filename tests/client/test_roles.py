"""Clients that only train and clients that only test: by their data, by their node's config, refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.client.resources import federation_of
from fedtta.data import Federation
from fedtta.messages.arrays import digest
from fedtta.messages.requests import AdapterRow as Row
from fedtta.messages.requests import Identify, RefineRates, Summarize, Train, TrainingTask
from fedtta.settings import Settings
from tests.client import tiny
from tests.client.through_app import about, ask, node
from tests.client.tiny import Client as Device
from tests.client.tiny import Task

CLIENTS = 4
SETTINGS = Settings(
    dataset="digits", fraction=0.1, image_size=16, clients=CLIENTS, partition="iid", model="cnn", local_epochs=1,
    device="cpu", shifts="original",
)  # fmt: skip
SPLIT = SETTINGS.replace(target_fraction=0.25)


def target() -> int:
    return federation_of(SPLIT).roles.index("target")


def source() -> int:
    return federation_of(SPLIT).roles.index("source")


def make(settings: Settings, partition: int, role: str | None = None) -> Device:
    return tiny.made(settings, partition, role)


def world(**changes: Any) -> Federation:
    return Federation.create(tiny.images(120), 3, scheme="iid", seed=1, **changes)


def test_a_target_neither_trains_nor_gives_statistics_nor_refines_rates() -> None:
    federation = world(target_fraction=0.34)
    client = tiny.device(federation.roles.index("target"), world=federation)
    arrays = tiny.global_arrays(client.model)
    for act in (
        lambda: client.train(1, Task("ce"), arrays),
        lambda: client.statistics(1, Task("ce"), arrays),
        lambda: client.refine_rates(1, arrays, {}, "all"),
    ):
        with pytest.raises(ValueError, match=f"client {client.partition} is a target: it has no labels to train on"):
            act()
    assert not tiny.state_of(client).entries
    assert client.describe()["sizes"] == [0, 0, 40]


def test_a_target_is_evaluated_on_all_its_samples() -> None:
    federation = world(target_fraction=0.34, domains="corruptions")
    client = tiny.device(federation.roles.index("target"), world=federation)
    arrays = tiny.global_arrays(client.model)
    check, results = client.evaluate(1, Task("ce"), arrays, None, [Row("fedavg", "none")], ["original"])
    images = federation.images
    predicted = tiny.network()(images.batch(federation.splits[client.partition].test)).argmax(1).numpy()
    labels = images.labels[federation.splits[client.partition].test]
    assert check == {"checked": 40, "leaked": 0}
    assert (results[0]["correct"], results[0]["total"]) == ((predicted == labels).sum(), 40)


def test_a_source_trains_and_refines_on_the_held_out_part() -> None:
    federation = world(target_fraction=0.34)
    client = tiny.device(federation.roles.index("source"), world=federation)
    assert client.describe()["sizes"] == [32, 8, 0]
    assert client.describe()["role"] == "source"
    arrays = tiny.global_arrays(client.model)
    _, metrics = client.train(1, Task("ce"), arrays)
    assert metrics["num-examples"] == 32
    _, metrics = client.refine_rates(1, arrays, {}, "all")
    assert metrics["num-examples"] == 8


def test_the_data_decide_the_role() -> None:
    roles = federation_of(SPLIT).roles
    assert sorted(roles) == ["source"] * 3 + ["target"]
    assert [make(SPLIT, partition).role for partition in range(CLIENTS)] == list(roles)
    assert [make(SETTINGS, partition).role for partition in range(CLIENTS)] == ["both"] * CLIENTS


@pytest.mark.parametrize("role", ["both", "source", "target"])
def test_a_node_whose_data_allow_everything_may_do_less(role: str) -> None:
    client = make(SETTINGS, 1, role)
    assert client.role == role
    assert client.describe()["role"] == role
    if role == "target":
        with pytest.raises(ValueError, match="client 1 is a target"):
            client.train(1, Task("ce"), tiny.global_arrays(client.model))


@pytest.mark.parametrize(
    ("settings", "who", "role", "allowed"),
    [
        (SPLIT, target, "source", "target"),
        (SPLIT, target, "both", "target"),
        (SPLIT, source, "target", "source"),
        (SETTINGS, lambda: 2, "trainer", "both, source, target"),
    ],
)
def test_a_role_that_the_data_do_not_allow_is_refused(settings: Settings, who: Any, role: str, allowed: str) -> None:
    partition = who()
    with pytest.raises(ValueError, match=f"^role = '{role}': allowed for client {partition} are {allowed}$"):
        make(settings, partition, role)


def test_the_role_in_a_nodes_config(tmp_path: Path) -> None:
    """`role=target` in the node's config; a role in a request is no setting."""
    common = about(SETTINGS.replace(state_dir=str(tmp_path)))
    assert ask(node(role="target"), Identify(**common)).role == "target"
    assert ask(node(), Identify(**common)).role == "both"
    arrays, task = tiny.global_arrays(make(SETTINGS, 1).model), TrainingTask("ce")
    for request in (
        Train(round=1, task=task, arrays=arrays, **common),
        Summarize(round=1, task=task, arrays=arrays, **common),
        RefineRates(round=1, variant="all", network=digest(arrays), arrays=arrays, **common),
    ):
        with pytest.raises(ValueError, match="client 1 is a target"):
            ask(node(role="target"), request)
    with pytest.raises(ValueError, match="role = 'judge': allowed for client 1 are both, source, target"):
        ask(node(role="judge"), Identify(**common))
    with pytest.raises(ValueError, match="unknown setting 'role'"):
        ask(node(), Identify(settings=json.dumps({**SETTINGS.flat(), "role": "target"}), run="run1"))


def test_rates_through_the_app_the_network_travels_once(tmp_path: Path) -> None:
    settings = SETTINGS.replace(state_dir=str(tmp_path), model="resnet20-bn", model_options="depth=8;width=4")
    arrays = tiny.global_arrays(make(settings, 1).model)
    first = RefineRates(round=1, variant="all", network=digest(arrays), arrays=arrays, **about(settings))
    again = replace(first, arrays=None)
    sent = ask(node(), first)
    assert list(sent.rates) == list(arrays)  # the rates have the names of what they move, in order of definition
    assert tiny.same(sent.rates, ask(node(), again).rates)  # from its disk
    assert all(value.shape == () and value.dtype == np.float64 for value in sent.rates.values())
    assert any(value != 0 for value in sent.rates.values())
    assert sent.context_bytes == 0
    (kept,) = tmp_path.rglob("*.safetensors")
    assert kept == tmp_path / "networks" / f"{digest(arrays)}.safetensors"
    kept.unlink()
    with pytest.raises(ValueError, match="is not here; it must be sent again"):
        ask(node(), again)
    with pytest.raises(ValueError, match=r"rates of head\.bias are not finite"):
        ask(node(), replace(first, rates={**sent.rates, "head.bias": np.array(np.nan)}))
