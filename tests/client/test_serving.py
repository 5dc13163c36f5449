"""What a device serves is what it was evaluated with, also after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.client.adapters import AdapterContext, make_adapter
from fedtta.client.algorithms import find_algorithm
from fedtta.client.evaluation import memorize
from fedtta.client.node import make_device
from fedtta.client.served import NETWORK, REST, Baseline
from fedtta.client.serving import Served, missing_heads
from fedtta.messages.requests import AdapterRow
from tests.client.agent.world import SETTINGS, sample_images, served, trained

CPU = torch.device("cpu")
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("fedthe", "global", {"beta": 0.5}),
    ("btfl", "global", {}),
    ("tent", "personalised", {}),
    ("knn_per", "global", {}),
    ("t3a", "global", {}),
    ("shot", "global", {}),
    ("atp", "global", {}),
    ("tsa", "global", {}),  # has random views
]


def stream() -> list[torch.Tensor]:
    x = torch.from_numpy(sample_images(0, 60)).float() / 255
    return list(x.contiguous(memory_format=torch.channels_last).split(20))


@pytest.mark.parametrize(("name", "base", "options"), ROWS)
def test_files_give_the_same_predictions(tmp_path: Path, name: str, base: str, options: dict[str, Any]) -> None:
    one = replace(served(name, base, **options), origin="run/training/3")
    one.save(tmp_path)
    two = Served.load(tmp_path, CPU)
    assert (two.row, two.origin, two.classes, two.shape) == (one.row, one.origin, one.classes, one.shape)
    assert two.digest() == one.digest()
    np.testing.assert_array_equal(two.baseline.shares, one.baseline.shares)
    first, second = one.build(), two.build()
    for x in stream():
        assert torch.equal(first.predict(x), second.predict(x))


@pytest.mark.parametrize(("name", "base", "options"), ROWS)
def test_it_is_the_adapter_that_an_evaluation_makes(name: str, base: str, options: dict[str, Any]) -> None:
    node, request = trained()
    device = make_device(request, node)
    private, statistics = device._trained(request)
    if base == "personalised":
        device._personalize(request, private)
    rates = {"all": dict.fromkeys(request.arrays, 0.01)}
    neighbours = memorize(device.model, device.federation, 0, SETTINGS, CPU) if name == "knn_per" else None
    row = AdapterRow(name, name, options, base)
    expected = make_adapter(row, AdapterContext(device.model, device.settings, statistics, rates, neighbours))
    adapter = served(name, base, **options).build()
    for x in stream():
        assert torch.equal(adapter.predict(x), expected.predict(x))


def test_its_network_is_its_own() -> None:
    node, request = trained()
    before = served("fedthe").digest()
    model = make_device(request, node).model
    model.load_global_state({name: torch.zeros_like(value) for name, value in model.global_state().items()})
    assert served("fedthe").digest() == before


def test_other_weights_options_or_statistics_have_other_digests() -> None:
    one = served("fedthe")
    assert one.statistics is not None
    assert one.statistics.descriptor_local is not None
    moved = replace(one.statistics, descriptor_local=one.statistics.descriptor_local + 1)
    others = [
        replace(one, row=AdapterRow("fedthe", "fedthe", {"beta": 0.1})),
        replace(one, statistics=moved),
        replace(one, origin="other"),
        replace(one, baseline=Baseline.unknown(10)),
        served("fedthe", "personalised"),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 6


def test_what_is_usual_is_the_clients_own_mix() -> None:
    usual = served("none").baseline
    node, request = trained()
    device = make_device(request, node)
    labels = device.federation.images.labels[device.federation.splits[0].train]
    assert (usual.shares >= np.bincount(labels, minlength=10) / len(labels) - 1e-12).all()
    assert 0 < usual.entropy < np.log(10) / 2  # it has learned something


@pytest.mark.parametrize(
    ("adapter", "algorithm", "missing"),
    [
        ("btfl", "ditto", ["personal_head"]),
        ("fedrod", "fedavg", ["residual_head"]),
        ("ttt", "fedavg", ["rotation_head"]),
        ("btfl", "fedavg", []),
        ("tent", "ditto", []),
    ],
)
def test_heads_that_a_training_does_not_make_are_named(adapter: str, algorithm: str, missing: list[str]) -> None:
    assert missing_heads(AdapterRow(adapter, adapter), find_algorithm(algorithm)) == missing
    node, request = trained()
    if missing:
        other = replace(request, task=replace(request.task, algorithm=algorithm))
        with pytest.raises(ValueError, match=f"{adapter} needs a {missing[0]}.*{algorithm!r}"):
            make_device(other, node).serve(other, AdapterRow(adapter, adapter))


def test_heads_that_candidates_need_are_named() -> None:
    row = AdapterRow("auto", "auto", {"among": "t3a+fedrod"})
    assert missing_heads(row, find_algorithm("fedavg")) == ["residual_head"]
    assert missing_heads(AdapterRow("auto", "auto"), find_algorithm("fedavg")) == []


def test_an_adapter_without_its_statistics_is_not_served() -> None:
    node, request = trained()
    without = replace(request, statistics=None)
    with pytest.raises(ValueError, match="descriptor_local"):
        make_device(without, node).serve(without, AdapterRow("fedthe", "fedthe"))


def test_an_adapter_of_whole_sets_is_not_built() -> None:
    with pytest.raises(ValueError, match="whole test set"):
        replace(served("none"), row=AdapterRow("f", "fedicon", {"mode": "offline"})).build()


@pytest.mark.parametrize("name", [NETWORK, REST])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    served("btfl").save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-20] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        Served.load(tmp_path, CPU)


def test_files_of_two_models_do_not_go_together(tmp_path: Path) -> None:
    served("btfl").save(tmp_path / "one")
    served("btfl", "personalised").save(tmp_path / "two")
    (tmp_path / "two" / NETWORK).replace(tmp_path / "one" / NETWORK)
    with pytest.raises(ValueError, match="do not belong together"):
        Served.load(tmp_path / "one", CPU)
