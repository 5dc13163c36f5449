"""The device's own data outside a run: counted on request, and used to check a model file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from client.agent import own_data
from client.agent.config import AgentConfig
from client.agent.core import Agent
from models import build, save_model
from tests.client.agent.world import config, served

SPEC = {"name": "cnn", "num_classes": 2, "in_channels": 3, "image_size": 16, "seed": 1, "classes": ["cat", "dog"]}


def folder(path: Path, each: int = 30, labelled: bool = True) -> Path:
    """Images of two classes, dark and bright ones, and one that is damaged."""
    rng = np.random.default_rng(0)
    for name, level in (("cat", 40), ("dog", 200)):
        inside = path / name if labelled else path
        inside.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = rng.integers(level - 30, level + 30, (20, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(inside / f"{name}{number}.png")
    (inside / "bad.png").write_bytes(b"no image")
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a device's config with data of its own."""

    def make(source: Path, **changes: Any) -> AgentConfig:
        text = f"folder:{source}"
        monkeypatch.setattr(own_data, "_source", lambda config: text)
        return config(tmp_path, adapter="none", **changes)

    return make


def test_a_device_without_data_of_its_own_says_so(tmp_path: Path) -> None:
    agent = Agent(config(tmp_path))
    with pytest.raises(ValueError, match=r"this device has no data of its own"):
        agent.rescan()
    agent.close()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_scan_counts_and_names_what_cannot_be_used_and_sees_new_files(
    tmp_path: Path, own: Any, labelled: bool
) -> None:
    source = folder(tmp_path / "data", labelled=labelled)
    agent = Agent(own(source))
    found = agent.rescan()
    assert (found.samples, found.used, found.skipped) == (61, 60, 1)
    assert any("bad.png" in note for note in found.notes)
    assert agent.status().data_samples == 61
    assert agent.status().data_skipped == 1
    extra = next(source.rglob("cat1.png"))
    Image.open(extra).rotate(90).save(extra.with_name("new.png"))
    assert agent.rescan().used == 61
    lines = [json.loads(line) for line in agent.log.path.read_text().splitlines()]
    assert [line["used"] for line in lines if line["event"] == "rescan"] == [60, 61]
    agent.close()


def network(bias: float) -> torch.nn.Module:
    made = build(**SPEC)  # type: ignore[arg-type]
    with torch.no_grad():
        made.head.bias += torch.tensor([bias, 0.0])
    return made


@pytest.mark.parametrize("labelled", [True, False])
def test_a_model_file_is_checked_on_the_devices_own_data(tmp_path: Path, own: Any, labelled: bool) -> None:
    keys = own(folder(tmp_path / "data", each=60, labelled=labelled), model=str(tmp_path / "m.safetensors"))
    save_model(tmp_path / "m.safetensors", network(1000.0), SPEC)  # type: ignore[arg-type]
    agent = Agent(keys)
    assert agent.status().version == ""
    assert "it predicts 'cat' for 100%" in agent.status().refused
    agent.close()


def test_samples_are_validation_samples_with_labels(tmp_path: Path, own: Any) -> None:
    keys = own(folder(tmp_path / "data"))
    model = served("none")

    @dataclass(frozen=True)
    class Like:
        classes: tuple[str, ...] = ("cat", "dog")
        preprocessing: Any = model.preprocessing
        shape: tuple[int, int, int] = model.shape

    found = own_data.samples_of(keys, Like())  # type: ignore[arg-type]
    assert found.labels is not None
    assert 0 < len(found.labels) < 40
    bright = found.pixels.reshape(len(found.pixels), -1).mean(1) > 120
    np.testing.assert_array_equal(bright, found.labels == 1)
    unlabelled = own(folder(tmp_path / "flat", labelled=False))
    assert own_data.samples_of(unlabelled, Like()).labels is None  # type: ignore[arg-type]
