"""The device's own data outside a run: counted on request, and used to check a model file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedtta.client.agent import own_data
from fedtta.client.agent.config import AgentConfig
from fedtta.client.agent.core import Agent
from fedtta.messages.replies import Evaluated, Identity
from fedtta.messages.requests import AdapterRow, Evaluate, Identify, Train, TrainingTask
from fedtta.models import build, save_model
from fedtta.settings import to_json
from tests.client.agent.world import config, served
from tests.client.folders import CLASSES, OWN, SIZE
from tests.client.folders import folder as colours

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
def own(tmp_path: Path) -> Any:
    """Make a device's config with data of its own."""

    def make(source: Path, **changes: Any) -> AgentConfig:
        return config(tmp_path, adapter="none", data=f"folder:{source}", **changes)

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


RUN = OWN.replace(local_epochs=20, learning_rate=0.1)
TASK = TrainingTask("cross_entropy")


def about() -> dict[str, Any]:
    return {"settings": to_json(RUN), "run": "run1"}


@lru_cache(maxsize=1)
def initial() -> dict[str, np.ndarray]:
    network = build("cnn", len(CLASSES), image_size=SIZE, seed=5)
    return {name: value.numpy().copy() for name, value in network.global_state().items()}


@pytest.mark.parametrize("labelled", [True, False])
def test_in_a_run_a_bad_model_is_refused_by_devices_with_and_without_labels(
    tmp_path: Path, own: Any, labelled: bool
) -> None:
    trainer = Agent(config(tmp_path / "trainer", name="site-a", data=f"folder:{of_colours(tmp_path / 'a', True)}"))
    arrays = trainer.perform(Train(round=1, task=TASK, arrays=initial(), **about())).arrays  # type: ignore[attr-defined]
    trainer.close()
    agent = Agent(own(of_colours(tmp_path / "b", labelled), name="site-b"))
    identity = agent.perform(Identify(**about()))
    assert isinstance(identity, Identity)
    assert identity.labelled == labelled
    assert agent.status().data_samples == identity.samples == 90

    def evaluated(**changes: np.ndarray) -> str:
        shifts = ["original"] if labelled else []
        rows = [AdapterRow("fedavg", "none")]
        given = {"arrays": {**arrays, **changes}, "rows": rows, "shifts": shifts, "round": 1}
        reply = agent.perform(Evaluate(task=TASK, **given, **about()))
        assert isinstance(reply, Evaluated)
        return reply.served

    bias = arrays["head.bias"]
    one = evaluated(**{"head.bias": bias + np.array([1000, 0, 0], np.float32)})
    assert one.startswith("refused: it predicts 'blue' for 100%")
    assert evaluated() == f"promoted {agent.status().version}"
    before = agent.status().version
    turned = {name: np.roll(arrays[name], 1, 0) for name in ("head.weight", "head.bias")}
    told = evaluated(**turned)
    assert told.startswith("refused: accuracy 0." if labelled else "refused: it agrees with the served model on ")
    assert agent.status().version == before
    figures = agent.models()[-1][0].check
    assert ("accuracy" in figures) == labelled
    agent.close()


def of_colours(path: Path, labelled: bool) -> Path:
    """Ninety images of three colours."""
    colours(path, dict.fromkeys(CLASSES, 30))
    if not labelled:
        for file in list(path.rglob("*.png")):
            file.rename(path / f"{file.parent.name}-{file.name}")
        for name in CLASSES:
            (path / name).rmdir()
    return path
