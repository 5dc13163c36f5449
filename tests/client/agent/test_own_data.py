"""The device's own data outside a run: counted on request, and used to check a model file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedtta.client.agent import own_data, scans
from fedtta.client.agent.core import Agent
from fedtta.client.config import AgentConfig
from fedtta.client.node import Node, make_device, perform
from fedtta.client.own import _of_run, index_path
from fedtta.client.state import MemoryState
from fedtta.data.sources.scan import Reader
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


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    """No run of another test counts."""
    _of_run.cache_clear()
    yield
    _of_run.cache_clear()


def logged(agent: Agent, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in agent.log.path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


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
    assert [line["used"] for line in logged(agent, "rescan")] == [60, 61]
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


# The scan at the start, and one index ------------------------------------------------------------------------------


class Reads:
    """Counts the samples that are read; they wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
        self.count, self.begun, self.go = 0, threading.Event(), threading.Event()
        real = Reader.read

        def read(reader: Reader, i: int) -> Any:
            self.count += 1
            self.begun.set()
            assert not wait or self.go.wait(60)
            return real(reader, i)

        monkeypatch.setattr(Reader, "read", read)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_first_scan_fills_the_index_while_predictions_go_on_and_a_run_waits_for_it(
    tmp_path: Path, own: Any, labelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "m.safetensors", network(0.0), SPEC)  # type: ignore[arg-type]
    first = Agent(config(tmp_path, adapter="none", model=str(tmp_path / "m.safetensors")))  # it has no data yet
    first.close()
    source = of_colours(tmp_path / "data", labelled)  # of other classes and another size than the model's
    reads = Reads(monkeypatch, wait=True)
    agent = Agent(own(source, name="site-a"))
    with ThreadPoolExecutor(1) as pool:
        assert reads.begun.wait(60)
        assert scans.SCANNING in agent.status().data_notes
        assert len(agent.predict(np.zeros((1, 3, 16, 16), np.uint8)).probabilities) == 1
        settings = to_json(RUN.replace(image_size=24, window="0,4095"))
        identified = pool.submit(agent.perform, Identify(settings=settings, run="run1"))
        until(lambda: agent.status().training == "identify")
        assert not identified.done()
        assert reads.count == 1  # by the scan; the run does not read beside it
        reads.go.set()
        assert identified.result(60).samples == 90
    until(lambda: not agent.scanning)
    assert scans.SCANNING not in agent.status().data_notes
    (line,) = logged(agent, "scan")
    assert (line["samples"], line["used"], line["skipped"]) == (90, 90, 0)
    assert line["seconds"] >= 0
    assert reads.count == 90  # the run reads no file again
    agent.close()


def test_without_data_of_its_own_nothing_is_scanned_and_a_scan_that_fails_is_noted(tmp_path: Path, own: Any) -> None:
    agent = Agent(config(tmp_path / "none"))
    assert (agent.scanning, logged(agent, "scan")) == (False, [])
    agent.close()
    agent = Agent(own(tmp_path / "nowhere"))
    until(lambda: logged(agent, "scan"))
    assert "nowhere" in logged(agent, "scan")[0]["error"]
    assert any("nowhere" in note for note in agent.status().notes)
    agent.close()


def test_what_was_ever_tested_is_remembered_in_one_file_by_scans_and_runs_with_and_without_agent(
    tmp_path: Path, own: Any
) -> None:
    source = of_colours(tmp_path / "data", True)
    keys = own(source, name="site-a", runs_kept=1, class_map="rouge=red")
    agent = Agent(keys)
    until(lambda: logged(agent, "scan"))
    index = index_path(tmp_path / "state", "site-a")
    tested = json.loads(index.read_text())["tested"]
    assert 0 < len(tested) < 90
    names = [f"{path.parent.name}/{path.name}" for path in source.rglob("*.png")]
    rows = "".join(f"{name},{name.split('/')[0]},train\n" for name in sorted(names))
    (source / "labels.csv").write_text(f"path,label,split\n{rows}")  # all of them are to be trained on now
    for run in ("run1", "run2", "run3"):  # none but the last one is kept
        identity = agent.perform(Identify(settings=to_json(RUN), run=run))
        assert isinstance(identity, Identity)
        assert identity.sizes == [90 - len(tested), 0, 0]
        assert any("was in the test split before" in note for note in identity.notes)
    assert [path.name for path in (tmp_path / "state" / "private").glob("run*")] == ["run3"]
    assert agent.rescan().used == 90 - len(tested)
    agent.close()
    assert [path for path in (tmp_path / "state").rglob("*.json") if "tested" in path.read_text()] == [index]
    alone = Node("site-a", MemoryState(), f"folder:{source}", settings={"state-dir": str(tmp_path / "state")})
    found = perform(Identify(settings=to_json(RUN), run="run4"), alone)
    assert isinstance(found, Identity)
    assert found.sizes == identity.sizes


def test_a_device_that_only_trains_tests_nothing_in_a_scan(tmp_path: Path, own: Any) -> None:
    agent = Agent(own(of_colours(tmp_path / "data", True), name="site-a", role="source"))
    until(lambda: logged(agent, "scan"))
    assert json.loads(index_path(tmp_path / "state", "site-a").read_text())["tested"] == []
    agent.close()


def test_a_run_gets_the_devices_limits(tmp_path: Path, own: Any) -> None:
    source = folder(tmp_path / "data")  # 1 of 61 is damaged
    run = to_json(RUN.replace(classes="cat,dog"))
    strict = Agent(own(source, max_skipped=0.0))
    with pytest.raises(ValueError, match="max-skipped = 0 allows 0"):
        strict.perform(Identify(settings=run, run="run1"))
    strict.close()
    small = own(source, max_megapixels=0.0001, image_cache_mb=7)  # 100 pixels
    agent = Agent(small)
    with pytest.raises(ValueError, match="61 of 61 samples cannot be used"):
        agent.perform(Identify(settings=run, run="run1"))
    agent.close()
    agent = Agent(own(source, image_cache_mb=7))
    settings = make_device(Identify(settings=run, run="run1"), agent.backend.node).settings
    assert (settings.image_cache_mb, settings.max_megapixels, settings.max_skipped) == (7, 100.0, 0.1)
    agent.close()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_target_cannot_personalise_and_a_note_says_so(tmp_path: Path, own: Any, labelled: bool) -> None:
    role = "target" if labelled else ""
    agent = Agent(own(of_colours(tmp_path / "b", labelled), name="site-b", base="personalised", role=role))
    rows = [AdapterRow("fedavg", "none")]
    reply = agent.perform(Evaluate(task=TASK, arrays=initial(), rows=rows, shifts=[], round=1, **about()))
    told = "base = personalised trains on labels, and site-b is a target; use base = global"
    assert isinstance(reply, Evaluated)
    assert reply.served == f"refused: {told}"
    assert any(told in note for note in agent.status().notes)
    assert agent.status().version == ""
    agent.close()


@pytest.mark.parametrize(
    ("adapter", "lacking"),
    [("personal", "personal_head"), ("fedthe", "descriptor, personal_head"), ("knn_per", "datastore")],
)
def test_a_target_serves_no_adapter_that_needs_labels_and_a_note_says_why(
    tmp_path: Path, own: Any, adapter: str, lacking: str
) -> None:
    agent = Agent(replace(own(of_colours(tmp_path / "b", labelled=False), name="site-b"), adapter=adapter))
    rows = [AdapterRow("fedavg", "none")]
    reply = agent.perform(Evaluate(task=TASK, arrays=initial(), rows=rows, shifts=[], round=1, **about()))
    told = f"{adapter} needs {lacking}, learned from labels of its own, and site-b is a target"
    assert isinstance(reply, Evaluated)
    assert reply.served == f"refused: {told}"
    assert any(told in note for note in agent.status().notes)
    agent.close()
