"""The list of methods: facts from the tables, passes through the network counted by hand, costs that are kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import cost, methods
from server.methods import METHODS
from server.trainings import TRAININGS
from settings import SettingsError
from tta.registry import ADAPTERS, NEEDS


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    methods.add_arguments(parser)
    return parser.parse_args(words)


def run(*words: str) -> str:
    """Run the command; return what it prints."""
    console = Console(width=250, record=True, quiet=True)
    methods.run(parsed(*words), console)
    return console.export_text()


def test_every_method_is_listed_with_what_the_tables_say() -> None:
    listed = {entry.method: entry for entry in methods.entries()}
    assert list(listed) == list(METHODS)
    assert set(methods.WORDS) == NEEDS
    for name, entry in listed.items():
        method = METHODS[name]
        assert (entry.training, entry.adapter, entry.base) == (method.training, method.adapter, method.base)
        assert entry.training_source == TRAININGS[method.training].summary
        assert (entry.adapts, entry.per) == (ADAPTERS[method.adapter].adapts, ADAPTERS[method.adapter].per)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("fedavg", ()),
        ("tent", ("BatchNorm",)),
        ("em", ("pooled label frequencies",)),
        ("memo", ("many gradients for each sample",)),
        ("fedbn", ("BatchNorm", "labels of the client's own")),  # its layers stay on the client
        ("fedavg_ft", ("labels of the client's own",)),  # fine-tuning
        ("fedrod", ("a residual personal head", "labels of the client's own")),
        ("knn_per", ("the client's memorised training samples", "labels of the client's own")),
    ],
)
def test_needs_in_words(method: str, needs: tuple[str, ...]) -> None:
    (entry,) = [entry for entry in methods.entries() if entry.method == method]
    assert entry.needs == needs


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("none", 1, 0),
        ("fedthe", 1, 0),  # its gradient is analytic
        ("btfl", 1, 0),
        ("em", 1, 0),
        ("tent", 1, 1),
        ("bbn", 4, 2),  # teacher twice, student, source; gradients of student and teacher
        ("fedicon", 3, 2),  # two views, then the image
        ("memo", 3 * 32 + 1, 3 * 32),  # three steps on 32 views, then the image
        ("ttt", 32 + 1, 32),
    ],
)
def test_images_through_the_network_for_each_image_predicted(name: str, forward: int, backward: int) -> None:
    client = cost.Client.of(cost.setting_up("cnn", None, 4, 2), ADAPTERS[name].needs >= {"rotation_head"})
    x = torch.rand(4, 3, cost.SIDE, cost.SIDE, generator=torch.Generator().manual_seed(2))
    assert cost.count_passes(client, name, x, 2) == (forward, backward)
    assert not client.device.model.encoder._forward_hooks


@pytest.fixture
def three_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time three adapters only."""
    few = {name: ADAPTERS[name] for name in ("none", "btfl", "tent")}
    monkeypatch.setattr(cost, "ADAPTERS", few)


@pytest.mark.usefixtures("three_adapters")
def test_costs_are_measured_recorded_and_kept(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    run("--cost", "--samples", "6", "--batch", "3", "--repeats", "1", *out)
    found: dict[str, Any] = json.loads((tmp_path / "methods.json").read_text())
    costs = found["cost"]["adapters"]
    assert set(costs) == {"none", "btfl", "tent"}
    assert costs["none"]["ratio"] == 1
    assert all(one["processor_milliseconds"] > 0 and one["milliseconds"] > 0 for one in costs.values())
    assert (costs["tent"]["forward"], costs["tent"]["backward"]) == (1, 1)
    assert (found["cost"]["model_options"], found["cost"]["samples"], found["cost"]["batch"]) == ("norm=batch", 6, 3)
    assert found["cost"]["hardware"]
    page = (tmp_path / "methods.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| `tent`")]
    assert line.endswith(f"| {costs['tent']['ratio']:.3g} | 1 + 1 |")
    run(*out)  # facts alone
    assert json.loads((tmp_path / "methods.json").read_text())["cost"] == found["cost"]
    assert (tmp_path / "methods.md").read_text() == page


@pytest.mark.usefixtures("three_adapters")
def test_adapters_that_do_not_fit_the_network_have_no_cost(tmp_path: Path) -> None:
    words = (
        "--cost",
        "--samples",
        "2",
        "--batch",
        "2",
        "--repeats",
        "1",
        "--model-options",
        "",
        "--out",
        str(tmp_path),
    )
    run(*words)
    assert set(json.loads((tmp_path / "methods.json").read_text())["cost"]["adapters"]) == {"none", "btfl"}
    lines = (tmp_path / "methods.md").read_text().splitlines()
    assert next(line for line in lines if line.startswith("| `tent`")).endswith("| does not fit |  |  |")
    assert not [line for line in lines if line.startswith("| `btfl`") and "does not fit" in line]


def test_facts_alone_have_no_costs(tmp_path: Path) -> None:
    run("--out", str(tmp_path))
    found = json.loads((tmp_path / "methods.json").read_text())
    assert found["cost"] is None
    assert [one["method"] for one in found["methods"]] == list(METHODS)
    page = (tmp_path / "methods.md").read_text()
    assert "ms a sample" not in page
    assert all(recipe.summary in page for recipe in TRAININGS.values())
    assert all(info.paper in page for info in ADAPTERS.values())


@pytest.mark.parametrize("content", ["no json", "[1]", "{}"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "methods.json").write_text(content)
    with pytest.raises(SettingsError, match="is no list of methods"):
        run("--out", str(tmp_path))
    assert (tmp_path / "methods.json").read_text() == content


def test_bad_options_of_the_network(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model-options = 'depth=8': .*depth"):
        run("--cost", "--model-options", "depth=8", "--out", str(tmp_path))
    with pytest.raises(SystemExit):
        parsed("--samples", "0")
