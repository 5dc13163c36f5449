"""The part `deployment`: the empty app on a grid in this process and as a bundle; times from events by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fedtta.benchmarks.speed import deployment, empty_app
from fedtta.benchmarks.speed.deployment import RoundTime, Summary
from fedtta.messages import grid as transport
from fedtta.models import build
from fedtta.server.events import RunError
from fedtta.settings import Settings
from fedtta.simulation.superlink import FlowerError, program
from tests.flower import LocalGrid

SHAPES = [[2, 3], [4]]


def context(**config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)


def answer(message: Message) -> RecordDict:
    return empty_app.answer(message, context()).content


def event(number: int, wall: float, seconds: list[float], replied: int = 2) -> dict[str, Any]:
    who = {"sampled": [0, 1], "replied": list(range(replied))}
    return {"event": "round", "round": number, "wall_seconds": wall, "train_seconds": seconds, **who}


EVENTS = [
    {"event": "run"}, event(1, 99.0, [9.0, 9.0]), event(2, 8.0, [0.5, 1.0]), event(3, 9.0, [2.0, 1.5]), {"event": "end"}
]  # fmt: skip


def test_clients_answer_with_other_arrays_of_the_same_shapes() -> None:
    sent = empty_app.arrays_of(SHAPES)
    grid = LocalGrid({7: answer})
    request = Message(RecordDict({"arrays": sent}), dst_node_id=7, message_type="train")
    (reply,) = grid.pull_messages(grid.push_messages([request]))
    got = reply.content.array_records["arrays"]
    assert [(name, array.dtype, array.shape) for name, array in got.items()] == [
        (name, "float32", array.shape) for name, array in sent.items()
    ]
    assert not any(np.array_equal(got[name].numpy(), sent[name].numpy()) for name in sent)


def test_the_empty_app_writes_the_seconds_of_every_round(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    grid = LocalGrid({7: answer, 8: answer})
    config = {"nodes": 2, "rounds": 3, "timeout": 60.0, "shapes": json.dumps(SHAPES), "results": str(path)}
    empty_app.main(grid, context(**config))
    seconds = json.loads(path.read_text())
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert [message.metadata.dst_node_id for message in grid.sent] == [7, 8] * 3
    assert {message.metadata.ttl for message in grid.sent} == {60.0}
    values = [message.content["arrays"]["0"].numpy() for message in grid.sent]
    assert not np.array_equal(values[0], values[2])  # each round others, as weights are
    assert list(tmp_path.iterdir()) == [path]


def test_a_round_is_over_when_the_last_node_has_answered() -> None:
    asked = 0

    def late(message: Message) -> RecordDict | None:
        nonlocal asked
        asked += 1
        return answer(message) if asked == 3 else None

    empty_app.timed_round(LocalGrid({7: answer, 8: late}), [7, 8], empty_app.arrays_of(SHAPES), 60.0)
    assert asked == 3


def test_nodes_that_fail_stay_silent_or_are_missing_end_the_empty_app() -> None:
    def broken(message: Message) -> RecordDict:
        raise ValueError("no memory")

    arrays = empty_app.arrays_of(SHAPES)
    with pytest.raises(RuntimeError, match="a node failed: 2: no memory"):
        empty_app.timed_round(LocalGrid({7: answer, 8: broken}), [7, 8], arrays, 60.0)
    with pytest.raises(TimeoutError, match="1 of 2 nodes have not answered"):
        empty_app.timed_round(LocalGrid({7: answer, 8: lambda _: None}), [7, 8], arrays, 0.1)
    with pytest.raises(TimeoutError, match="1 of 2 nodes are there"):
        empty_app.wait(LocalGrid({7: answer}), 2, 0.1)
    refusing = LocalGrid({7: answer})
    refusing.push_messages = lambda messages: []  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="1 of 1 messages were not accepted"):
        empty_app.timed_round(refusing, [7], arrays, 60.0)


def test_the_empty_app_looks_for_replies_as_ours_does() -> None:
    for name in ("POLL", "IDLE", "REST"):
        assert getattr(empty_app, name) == getattr(transport, name), name


def test_the_empty_app_has_the_networks_arrays(tmp_path: Path) -> None:
    settings = Settings(clients=3, rounds=4, image_size=20, model="cnn")
    app = deployment.write_empty_app(tmp_path, settings, 30.0)
    known = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = known["config"]
    assert (config["nodes"], config["rounds"], config["timeout"]) == (3, 4, 30.0)
    expected = [list(value.shape) for value in build("cnn", 10, image_size=20, in_channels=3).global_state().values()]
    assert json.loads(config["shapes"]) == expected
    assert config["results"] == str(tmp_path / "empty.json")


@pytest.mark.slow
def test_flower_bundles_the_empty_app_and_it_needs_nothing_of_ours(tmp_path: Path) -> None:
    app = deployment.write_empty_app(tmp_path, Settings(clients=2, rounds=2), 30.0)
    subprocess.run(
        [program("flwr"), "build", "--app", str(app)], cwd=tmp_path, check=True, timeout=300,
        env={**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_DISABLE_UPDATE_CHECK": "1"},
    )  # fmt: skip
    (bundle,) = tmp_path.glob("*.fab")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(bundle) as file:
        assert set(file.namelist()) == {"empty_app.py", "pyproject.toml", ".info/CONTENT"}
        file.extractall(unpacked)
    packages = ["benchmarks", "client", "models", "server", "settings", "simulation", "torch"]
    code = (
        f"import sys, empty_app; print(sorted(set({packages}) & set(sys.modules)), empty_app.server, empty_app.client)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, capture_output=True, text=True, timeout=300, check=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.stdout.startswith("[] <flwr")


def test_round_times_by_hand() -> None:
    # the first is left out; the round waits for the client that trains longest
    assert deployment.round_times(EVENTS) == [RoundTime(2, 8.0, 1.0), RoundTime(3, 9.0, 2.0)]


def test_a_client_that_failed_spoils_the_round() -> None:
    with pytest.raises(RunError, match="round 2: only 1 of 2 replied"):
        deployment.round_times([EVENTS[1], event(2, 1.0, [1.0], replied=1)])


def test_medians_by_hand() -> None:
    ours = [RoundTime(2, 8.0, 1.0), RoundTime(3, 9.0, 2.0), RoundTime(4, 20.0, 0.5)]
    # medians 9, 1 and 6: 9 / 6 = 1.5, and 9 - 6 - 1 = 2
    assert deployment.summarise(ours, [5.0, 6.0, 7.0]) == Summary(9.0, 6.0, 1.0, 1.5, 2.0)


def test_events_are_read_from_the_runs_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    assert deployment.read_events(path) == EVENTS


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Flower and agents that only note what is asked of them; another project's run writes what the empty app would."""
    asked: list[Any] = []

    @contextmanager
    def deployed(home: Path, configs: Any) -> Iterator[None]:
        asked.append(("deployment", home.name, configs))
        yield
        asked.append("stopped")

    def run(home: Path, config: Any, timeout: float, project: Path | None = None) -> None:
        if project is not None:
            asked.append(("run", project.name, timeout))
            (project.parent / "empty.json").write_text("[9, 5, 6]")
            return
        asked.append(("run", config["methods"], timeout))
        folder = Path(config["results"]) / config["run-name"]
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))

    monkeypatch.setattr(deployment.nodes, "deployment", deployed)
    monkeypatch.setattr(deployment.nodes, "run", run)
    monkeypatch.setattr(deployment.nodes, "start_agent", lambda home, config: asked.append(config.name))
    monkeypatch.setattr(deployment.nodes, "wait_for_agents", lambda started: asked.append(len(started)))
    return asked


def test_both_apps_run_on_the_same_nodes(flower: list[Any], tmp_path: Path) -> None:
    settings = Settings(clients=2, rounds=3, methods="fedavg", shifts="original")
    floor, events = deployment.deployed(settings, tmp_path, 40.0)
    assert floor == [9, 5, 6]
    assert events == EVENTS
    (_, home, configs), *rest = flower
    assert home == "flower"
    assert [config["name"] for config in configs] == ["0", "1"]
    assert [config["agent"][-3:] for config in configs] == ["/r0", "/r1"]
    assert rest == [
        "device-0.toml", "device-1.toml", 2, ("run", "empty-app", 40.0), ("run", "fedavg", 40.0), "stopped"
    ]  # fmt: skip


def test_an_empty_app_that_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any, **__: Any) -> None:
        raise FlowerError("finished:failed: no such module")

    monkeypatch.setattr(deployment.nodes, "run", failed)
    with pytest.raises(FlowerError, match="no such module"):
        deployment.run_empty_app(tmp_path, tmp_path / "empty-app", 9.0)


def test_the_part_gives_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def deployed(settings: Settings, folder: Path, timeout: float) -> tuple[list[float], list[Any]]:
        seen.append(settings)
        assert not list(folder.iterdir())
        return [30.0, 5.0, 7.0], EVENTS

    monkeypatch.setattr(deployment, "deployed", deployed)
    measured = deployment.deployment(quick=False)
    (settings,) = seen
    assert (settings.clients, settings.rounds, settings.local_epochs, settings.dataset) == (2, 5, 1, "digits")
    # medians of 8 and 9, of 5 and 7, of 1 and 2
    assert measured.details["medians"] == asdict(Summary(8.5, 6.0, 1.5, 8.5 / 6, 1.0))
    assert measured.details["empty_app_rounds"] == [5, 7]
    assert measured.ratios[0].ratio == 8.5 / 6
