"""Trackers: read back with their own readers, they have a run's numbers, each once, also of a run that was resumed."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Request, Train
from fedtta.server import trackers
from fedtta.server.app import serve
from fedtta.server.events import Event, Events, JsonLines
from fedtta.server.points import SERIES, Means, Point, point_of
from fedtta.server.trackers import FOLDER, Start, Trackers, Worker, tracker_names
from fedtta.settings import Settings, SettingsError
from fedtta.simulation import engine
from tests.server.test_resume import UNEQUAL
from tests.server.test_run import assert_same_results
from tests.transports import devices

ALL = ("tensorboard", "mlflow", "wandb")
SMALL = Settings(
    clients=2,
    fraction=0.06,
    rounds=4,
    checkpoint_every=2,
    local_epochs=1,
    image_size=16,
    methods="fedavg,fedthe[beta=0.3]",
    shifts="original,corrupted",
    learning_rate=0.1,
    device="cpu",
    node_timeout=5,
    round_timeout=60,
)
#: name → (step, value) of each of its points.
Curves = dict[str, list[tuple[int, float]]]


class Killed(BaseException):
    """The server is gone."""


def events_of(folder: Path) -> list[Event]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# A run with all three, killed in round 4 after a checkpoint of round 2, and resumed


class Tracked(NamedTuple):
    folder: Path
    plain: Path
    settings: Settings


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    import wandb  # takes seconds

    allow_messages()
    root = tmp_path_factory.mktemp("tracked")
    settings = SMALL.replace(track=",".join(ALL), state_dir=str(root / "state"))

    def kill(partition: int, request: Request) -> None:
        if isinstance(request, Train) and request.round == 4:
            raise Killed

    with pytest.MonkeyPatch.context() as environment:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "WANDB_PROJECT", "WANDB_NAME"):
            environment.delenv(name, raising=False)
        environment.setenv("WANDB_MODE", "offline")
        environment.setattr("os.fsync", lambda file: None)
        environment.setattr(logging.getLogger("flwr"), "disabled", True)
        with pytest.raises(Killed):
            serve(devices(settings, watch=kill), settings, root / "r")
        for worker in threading.enumerate():  # a real kill takes them along; here they come to an end by themselves
            if isinstance(worker, Worker):
                worker._points.join()
        wandb.teardown()
        serve(devices(settings), settings.replace(resume=str(root / "r")), root / "r")
        serve(devices(SMALL), SMALL.replace(state_dir=str(root / "other")), root / "plain")
        yield Tracked(root / "r", root / "plain", settings)
    wandb.teardown()


def expected(folder: Path) -> Curves:
    """The numbers of a run by hand, from its events."""
    events, found = events_of(folder), dict[str, list[tuple[int, float]]]()
    fields = {
        "loss": "train_loss", "validation_accuracy": "validation_accuracy", "seconds": "wall_seconds",
        "personal_validation_accuracy": "personal_validation_accuracy", "bytes_up": "bytes_up",
        "bytes_down": "bytes_down",
    }  # fmt: skip
    for event in (event for event in events if event["event"] == "round"):
        for name, key in fields.items():
            found.setdefault(f"train/{event['training']}/{name}", []).append((event["round"], event[key]))
        found.setdefault(f"train/{event['training']}/clients", []).append((event["round"], len(event["replied"])))
    cells: dict[tuple[str, str], list[Event]] = {}
    for event in (event for event in events if event["event"] == "evaluation"):
        method = event["method"].replace("[", "_").replace("=", "_").replace("]", "_")
        cells.setdefault((f"test/{event['training']}/{method}", event["shift"]), []).append(event)
    for (name, shift), there in cells.items():
        accuracies = [one["correct"] / one["total"] for one in there]
        found[f"{name}/{shift}/accuracy"] = [(0, sum(accuracies) / len(accuracies))]
        (one, other) = there  # of equal size, so that each sample counts as each client does
        assert one["total"] == other["total"]
        found[f"{name}/{shift}/sample_accuracy"] = found[f"{name}/{shift}/accuracy"]
        found[f"{name}/{shift}/seconds"] = [(0, (one["seconds"] + other["seconds"]) / 2 / one["total"])]
        if one["weight_mean"] is not None:
            found[f"{name}/{shift}/weight_mean"] = [(0, (one["weight_mean"] + other["weight_mean"]) / 2)]
    return found


def from_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]}


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fedtta")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def from_mlflow(folder: Path) -> Curves:
    client, run = mlflow_run(folder)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted((one.step, one.value) for one in history) for name, history in histories.items()}


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of the files that `wandb sync` sends: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(content):
            if (left := 32768 - position % 32768) < 7:  # blocks of 32 KiB; no header is divided
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", content, position)
            record += content[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or its last part
                yield Record.FromString(record)
                record = b""


def from_wandb(folder: Path) -> Curves:
    found: Curves = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
            steps = {name.removesuffix("/step"): int(value) for name, value in row.items() if name.endswith("/step")}
            for name, value in row.items():
                if not name.startswith("_") and not name.endswith("/step"):
                    found.setdefault(name, []).append((steps.get(name.rpartition("/")[0], 0), value))
    return found


@pytest.mark.parametrize(
    ("read", "precision"), [(from_tensorboard, 1e-6), (from_mlflow, 1e-12), (from_wandb, 1e-12)], ids=ALL
)
def test_each_tracker_has_each_number_of_a_resumed_run_once(
    tracked: Tracked, read: Callable[[Path], Curves], precision: float
) -> None:
    found, wanted = read(tracked.folder), expected(tracked.folder)
    assert set(found) == set(wanted)
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        if name.endswith("/seconds") or name.endswith("/bytes_down"):
            continue  # round 3 was done twice; of that the first time counts, in the events the second one
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=precision), name
    assert [step for step, _ in wanted["train/cross_entropy/loss"]] == [1, 2, 3, 4]
    assert len(list(tracked.folder.glob("metrics-*.cut.jsonl"))) == 1  # or round 3 was not repeated


def test_parameters_are_the_settings_and_tags_say_the_versions(tracked: Tracked) -> None:
    settings = {key: value for key, value in tracked.settings.flat().items() if key != "state-dir"}
    (started,) = (event for event in events_of(tracked.folder) if event["event"] == "run")
    _, run = mlflow_run(tracked.folder)
    assert run.data.params == {key: str(value) for key, value in settings.items()}
    assert {"python", "torch", "flwr"} < set(run.data.tags)
    assert run.data.tags["torch"] == started["versions"]["torch"]
    assert run.data.tags.get("commit") == started["commit"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    runs = [one.run for one in wandb_records(tracked.folder) if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1
    config = {one.key: json.loads(one.value_json) for one in runs[0].config.update}
    assert {key: config[key] for key in settings} == settings
    assert "state-dir" not in config
    assert str(tracked.settings.state_dir).encode() not in b"".join(
        path.read_bytes() for path in (tracked.folder / "tensorboard").iterdir()
    )


def test_trackers_change_no_bit_of_the_results(tracked: Tracked) -> None:
    assert_same_results(tracked.folder, tracked.plain)

    def told(folder: Path) -> list[Event]:
        kinds = ("clients", "round", "statistics", "evaluation", "leak_check")
        there = [event for event in events_of(folder) if event["event"] in kinds]
        return [{key: value for key, value in event.items() if key not in UNEQUAL} for event in there]

    assert told(tracked.folder) == told(tracked.plain)


# Without a run


class Fake:
    """A tracker that notes what it gets, and fails when told to."""

    started: list[Start]
    points: list[Point]
    ended: list[bool]
    failing: Callable[[Point], object]

    def __init__(self, start: Start) -> None:
        self.id = start.id or f"id{len(self.started)}"
        self.started.append(start)

    def write(self, point: Point) -> None:
        self.failing(point)
        self.points.append(point)

    def end(self, completed: bool) -> None:
        self.ended.append(completed)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    made = type("Made", (Fake,), {"started": [], "points": [], "ended": [], "failing": lambda self, point: None})
    monkeypatch.setitem(trackers.TRACKERS, "wandb", (made, "json"))
    return made


RUN: dict[str, Any] = {"commit": None, "hardware": "one core", "versions": {"python": "3"}}
WITH = SMALL.replace(track="wandb")


def a_round(number: int) -> dict[str, Any]:
    return {
        "training": "ce", "round": number, "replied": [0, 1], "train_loss": 1 / number, "validation_accuracy": None,
        "wall_seconds": 1.0, "bytes_up": 1, "bytes_down": 2,
    }  # fmt: skip


def listen(folder: Path) -> Events:
    return Events(JsonLines(folder / "metrics.jsonl"), Trackers(WITH, folder))


def test_a_tracker_that_fails_is_named_once_and_ends_nothing(
    fake: type[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: Fake, point: Point) -> None:
        if point.step in (2, 3) or point.step > 5:
            raise OSError("no route to https://me:secret@tracker.example/api")

    fake.failing = failing
    events = listen(tmp_path)
    events("run", **RUN)
    for number in range(1, 31):
        events("round", **a_round(number))
    events("end", seconds=1.0, status="completed")
    assert [point.step for point in fake.points] == [1, 4, 5]
    assert [start.id for start in fake.started] == [""] + 19 * ["id0"]  # opened again after a failure, until given up
    assert fake.ended == []
    assert [record.getMessage() for record in caplog.records] == [
        "tracker wandb: OSError: no route to https://***@tracker.example/api; the run goes on",
        "tracker wandb: 28 writes failed or were not waited for",
    ]
    assert fake.points[0].numbers == {
        "train/ce/loss": 1, "train/ce/seconds": 1, "train/ce/bytes_up": 1, "train/ce/bytes_down": 2,
        "train/ce/clients": 2,
    }  # fmt: skip


def test_what_compressed_updates_saved_and_cost_has_points() -> None:
    compressed = {"bytes_up_float32": 4, "trained_accuracy": 0.5, "decoded_accuracy": None}
    point = point_of({"event": "round", "at": 1.0, **a_round(1), **compressed})
    assert point is not None
    assert point.numbers["train/ce/bytes_up_float32"] == 4
    assert point.numbers["train/ce/trained_accuracy"] == 0.5
    assert "train/ce/decoded_accuracy" not in point.numbers


def test_the_end_of_a_run_does_not_wait_for_ever(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, others = threading.Event(), set(threading.enumerate())
    fake.failing = lambda self, point: go.wait(60)
    monkeypatch.setattr(trackers, "PATIENCE", 0.1)
    events = listen(tmp_path)
    events("run", **RUN)
    for number in range(1, 4):
        events("round", **a_round(number))
    events("end", seconds=1.0, status="failed: OSError: disk")
    go.set()
    for thread in set(threading.enumerate()) - others:  # it must not write into the next test's tracker
        thread.join(60)
    assert "tracker wandb: 4 writes failed or were not waited for" in caplog.text  # three rounds, and the end


def test_a_tracker_that_is_added_to_a_resumed_run_gets_what_came_before(fake: type[Fake], tmp_path: Path) -> None:
    earlier = Events(JsonLines(tmp_path / "metrics.jsonl"))
    earlier("run", **RUN)
    for number in (1, 2):
        earlier("round", **a_round(number))
    for last in (3, 4):
        events = listen(tmp_path)
        events("resumed", **RUN)
        events("round", **a_round(last))
        events("end", seconds=1.0, status="failed: killed" if last == 3 else "completed")
    assert [point.step for point in fake.points] == [1, 2, 3, 4]
    assert [start.id for start in fake.started] == ["", "id0"]
    assert fake.ended == [False, True]
    assert {start.tags["hardware"] for start in fake.started} == {"one core"}
    (tmp_path / "trackers" / "wandb.json").write_text("{")
    events = listen(tmp_path)
    events("resumed", **RUN)
    events("end", seconds=1.0, status="completed")
    assert len(fake.started) == 2  # what a tracker has is unknown: nothing is written twice


def test_a_new_run_in_the_folder_of_one_whose_events_were_removed_is_tracked_from_its_start(
    fake: type[Fake], tmp_path: Path
) -> None:
    for _ in range(2):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        events = listen(tmp_path)
        events("run", **RUN)
        events("round", **a_round(1))
        events("end", seconds=1.0, status="completed")
    assert [point.step for point in fake.points] == [1, 1]
    assert [start.id for start in fake.started] == ["", ""]


def test_what_cannot_be_removed_is_told_and_ends_no_run(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).mkdir()

    def refused(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("shutil.rmtree", refused)
    events = listen(tmp_path)
    events("run", **RUN)
    events("round", **a_round(1))
    events("end", seconds=1.0, status="completed")
    assert "its runs in trackers go on: not yours" in caplog.text
    assert [point.step for point in fake.points] == [1]


def test_one_that_is_unknown_or_not_installed_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"track = 'mlflow,aim': 'aim' is none of tensorboard, mlflow, wandb"):
        serve(devices(SMALL), SMALL.replace(track="mlflow,aim"), tmp_path / "r")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find(name))
    with pytest.raises(SettingsError, match=r"mlflow is not installed: pip install 'fedtta\[mlflow\]'"):
        engine.check(SMALL.replace(track="tensorboard, mlflow"))
    assert tracker_names(SMALL.replace(track="wandb, tensorboard,wandb")) == ["wandb", "tensorboard"]
    assert not (tmp_path / "r").exists()


def test_names_are_those_that_all_trackers_allow() -> None:
    rates = {"event": "rates", "at": 0.5, "training": "ce", "variant": "all", "rates": {"layers.0.bn": 0.5, "é;$": 1}}
    adapt = {
        **a_round(3), "event": "adapt_round", "at": 1, "method": "tent[base=personalised;x=1e-3]",
        "collaboration": "pfedbbn[temperature=1]", "accuracy": 0.5,
    }  # fmt: skip
    points = [point_of(rates), point_of(adapt)]
    assert all(re.fullmatch(r"[/\w.\- :]*", name) for point in points if point for name in point.numbers)
    assert points[0] == Point(
        "learned_rates/ce/all", None, {"learned_rates/ce/all/layers.0.bn": 0.5, "learned_rates/ce/all/é__": 1}, 0.5
    )
    assert points[1] is not None
    assert points[1].step == 3
    assert points[1].numbers["adapt/tent_base_personalised_x_1e-3_/pfedbbn_temperature_1_/accuracy"] == 0.5
    assert point_of({"event": "privacy", "at": 1, "epsilon": 2.5}) == Point(
        "privacy", None, {"privacy/epsilon": 2.5}, 1
    )
    assert point_of({"event": "note", "at": 1, "text": "x"}) is None
    assert len({series.name for series in SERIES.values()}) == len(SERIES)


def test_a_test_time_round_has_the_accuracy_of_its_samples() -> None:
    means = Means(SMALL)
    about = {"method": "tent", "collaboration": "none", "round": 1, "at": 0}
    for correct, total in (([1, 0], [2, 2]), ([4], [4])):
        list(means({**about, "event": "adapted", "correct": correct, "total": total}))
    (first,) = means({**about, "event": "adapt_round"})
    (second,) = means({**about, "event": "adapt_round", "round": 2})
    assert (first["accuracy"], second["accuracy"]) == (5 / 8, None)
