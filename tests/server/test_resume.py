"""Killed anywhere and resumed: the files and the numbers of an undisturbed run, bit for bit, or a refusal in words."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtta.server.app
import fedtta.server.checkpoints
import fedtta.server.run
from fedtta.messages.replies import SharedKeys
from fedtta.messages.requests import Adapt, Identify, RefineRates, Request
from fedtta.models import load_arrays
from fedtta.server.app import serve
from fedtta.server.checkpoints import FOLDER, Checkpoint, Position, checkpoint_files, read_checkpoint
from fedtta.server.environment import describe
from fedtta.server.events import RunError
from fedtta.server.report import METRICS_FILE
from fedtta.server.resume import Found, roll_back, run_folder_of
from fedtta.settings import Settings
from tests import transports
from tests.transports import FakeTransport

SMALL = Settings(
    clients=2,
    fraction=0.06,
    rounds=2,
    local_epochs=1,
    image_size=16,
    methods="fedavg,btfl",
    shifts="original",
    learning_rate=0.1,
    device="cpu",
    node_timeout=5,
    round_timeout=60,
)
BATCHNORM = {"model": "resnet20-bn", "model_options": "depth=8;width=4"}
ROUNDS: dict[str, dict[str, Any]] = {
    "statistics and two trainings": {"methods": "fedavg,btfl,fedthe", "rounds": 1},
    "momentum, int8 updates": {"methods": "fedavgm", "rounds": 3, "update_format": "int8"},
    "q-FFL": {"methods": "qffl"},
    "limits by the distances of earlier rounds": {"methods": "fedavg", "rounds": 3, "clip_factor": 0.5},
    "a head that stays": {"methods": "fedrep"},
    "layers that stay, some clients": {
        "methods": "fedbn", "clients": 3, "fraction_train": 0.67, "model_options": "norm=batch",
        "update_format": "float16",
    },
    "own models": {"methods": "apfl"},
    "two phases": {"methods": "fedicon", "classifier_rounds": 2},
    "rates": {"methods": "fedavg,atp", "rounds": 1, "rates_rounds": 2, "rates_clients": 1, **BATCHNORM},
    "two variants of rates": {"methods": "atp[adapt=params],atp", "rounds": 0, "rates_rounds": 2, **BATCHNORM},
    "cells": {
        "methods": "bbn", "rounds": 0, "collaborations": "fedavgm,pfedbbn", "stream_size": 16, "stream_batch": 8,
        "stream_rounds": 2, **BATCHNORM,
    },
}  # fmt: skip
#: What differs between two runs of the same thing: time, what is computed from it, and the network that a client is
#: sent once more.
UNEQUAL = ("at", "digest", "seconds", "wall_seconds", "train_seconds", "bytes_down")
RESULTS = (
    "plan", "clients", "round", "statistics", "rates_round", "rates", "adapt_round", "adapted", "evaluation",
    "leak_check",
)  # fmt: skip


class Killed(BaseException):
    """The server is gone: no `except Exception` may tidy up."""


class Killer:
    """Kills the server when it comes to a point of these kinds for the first time; `only` picks among them."""

    def __init__(self, *kinds: str, only: Callable[[tuple], bool] = lambda point: True) -> None:
        self.kinds, self.only, self.met = kinds, only, dict[tuple, None]()

    def reach(self, kind: str, *point: object) -> None:
        if kind in self.kinds and self.only(point) and (kind, *point) not in self.met:
            self.met[(kind, *point)] = None
            raise Killed(kind, *point)


@functools.cache
def described() -> dict[str, Any]:
    return describe(Settings())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than these runs: waiting for the disk, looking at all installed packages."""
    known = described()
    for module in (fedtta.server.app, fedtta.server.run):
        monkeypatch.setattr(module, "describe", lambda settings, bundle: {**known, "settings": settings.flat()})
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", True)


class Killable(FakeTransport):
    """Clients that have just been started, with a server that may be killed before or after each reply."""

    def __init__(self, started: FakeTransport, partitions: dict[int, int], killer: Killer | None) -> None:
        super().__init__(started.clients)
        for node, client in started.clients.items():
            self.clients[node] = self._killable(client, partitions[node], killer)

    def _killable(self, client: transports.Client, partition: int, killer: Killer | None) -> transports.Client:
        def answer(request: Request) -> Any:
            point = (*point_of(request), partition)
            if killer is not None:
                killer.reach("asked", *point)
            reply = client(request)
            if killer is not None:
                killer.reach("answered", *point)
            return reply

        return answer


def point_of(request: Request) -> tuple[str, str, str]:
    """Return kind, training, cell or variant, and round of a request."""
    task = getattr(request, "task", None)
    part = request.cell if isinstance(request, Adapt) else request.variant if isinstance(request, RefineRates) else ""
    return request.kind, task.training if task else part, str(getattr(request, "round", None))


def devices(settings: Settings, first: int = 100, killer: Killer | None = None) -> FakeTransport:
    """Clients that have just been started, with node ids of their own; their private state is on the disk."""
    # the order of ids, and with it that of requests to identify, is not the order of partitions
    ids = {i: first + (7 * i) % 10 for i in range(settings.clients)}
    started = transports.devices(settings, ids=lambda partition: ids[partition])
    return Killable(started, {node: partition for partition, node in ids.items()}, killer)


def run(folder: Path, settings: Settings, **changes: Any) -> Path:
    """Run or resume in `folder`/r with the clients' private state in `folder`/state."""
    settings = settings.replace(state_dir=str(folder / "state"), **changes)
    serve(devices(settings), settings, folder / "r")
    return folder / "r"


def run_to_the_end(
    folder: Path, settings: Settings, killer: Killer, between: Callable[[Path], None] = lambda folder: None
) -> int:
    """Start a run, and resume it with new devices whenever it was killed; return how often that was."""
    settings = settings.replace(state_dir=str(folder / "state"))
    kills = 0
    for attempt in itertools.count():
        assert attempt < 200
        begun = bool(checkpoint_files(folder / "r"))
        if not begun:  # killed before the first checkpoint
            shutil.rmtree(folder / "r", ignore_errors=True)
        now = settings.replace(resume=str(folder / "r")) if begun else settings
        listener = [lambda event: killer.reach("event", Seen(cleaned(event)))]
        try:
            serve(devices(now, 100 * attempt, killer), now, folder / "r", listener)
            return kills
        except Killed:
            kills += 1
            between(folder / "r")
    raise AssertionError


class Seen(dict):
    """An event that can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def cleaned(event: dict) -> dict:
    return {key: value for key, value in event.items() if key not in UNEQUAL}


def events(folder: Path, *kinds: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if not kinds or event["event"] in kinds]


def assert_same(one: Path, other: Path) -> None:
    """Models, statistics, rates, tables and all that was counted are equal; so are all numbers on the way."""
    names = sorted(path.name for path in one.iterdir() if path.suffix in (".safetensors", ".csv"))
    assert names == sorted(path.name for path in other.iterdir() if path.suffix in (".safetensors", ".csv"))
    for name in names:
        if name.endswith(".csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
            continue
        ours, theirs = load_arrays(one / name)[0], load_arrays(other / name)[0]
        assert {k: v.tobytes() for k, v in ours.items()} == {k: v.tobytes() for k, v in theirs.items()}, name
    assert [cleaned(e) for e in events(one, *RESULTS)] == [cleaned(e) for e in events(other, *RESULTS)]
    assert events(one)[-1]["status"] == events(other)[-1]["status"] == "completed"


# -- the same bits


@pytest.mark.parametrize("name", ROUNDS)
def test_killed_after_every_message_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    settings = SMALL.replace(**ROUNDS[name])
    whole = run(tmp_path / "whole", settings)
    killer = Killer("answered")
    kills = run_to_the_end(tmp_path / "cut", settings, killer)
    asked = {key for key in killer.met if key[1] != Identify.kind}
    assert kills == len(killer.met) > len(asked) > 2 * settings.clients
    assert_same(whole, tmp_path / "cut" / "r")


def test_killed_at_every_event_and_around_every_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", SMALL.replace(methods="fedrep,btfl"))
    killer = Killer("event", "before", "after", only=lambda p: isinstance(p[0], str) or p[0]["event"] in RESULTS)
    write = fedtta.server.checkpoints.write_checkpoint

    def dangerous(path: Path, checkpoint: Any) -> None:
        killer.reach("before", str(checkpoint.position))
        write(path, checkpoint)
        killer.reach("after", str(checkpoint.position))

    monkeypatch.setattr(fedtta.server.checkpoints, "write_checkpoint", dangerous)
    kills = run_to_the_end(tmp_path / "cut", SMALL.replace(methods="fedrep,btfl"), killer)
    kinds = [key[0] for key in killer.met]
    assert kills == len(kinds)
    assert kinds.count("before") == kinds.count("after") == 1 + 3 + 4  # begun, each round, statistics, finished
    assert kinds.count("event") == 2 + 4 + 1 + 4 + 2  # plan, clients; rounds, statistics, evaluations, leak checks
    assert_same(whole, tmp_path / "cut" / "r")


def test_a_checkpoint_every_few_rounds_and_clients_that_are_ahead(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedrep", rounds=5, checkpoint_every=3)
    whole = run(tmp_path / "whole", settings.replace(checkpoint_every=0))
    assert not (whole / "checkpoints").exists()
    killer = Killer("answered")
    run_to_the_end(tmp_path / "cut", settings, killer)
    resumed = {event["round"] for event in events(tmp_path / "cut" / "r", "resumed")}
    assert resumed == {0, 3, 5}
    assert_same(whole, tmp_path / "cut" / "r")


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": "fedrep", "rounds": 4},
        {"methods": "fedavgm", "rounds": 3},
        {**ROUNDS["cells"], "methods": "tent", "collaborations": "fedavgm", "stream_size": 24, "stream_rounds": 3},
    ],
)
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_used(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """After each kill: the server goes back by one more checkpoint, and clients have what belongs to it."""
    settings = SMALL.replace(**changes)
    whole = run(tmp_path / "whole", settings)
    damaged: list[Path] = []

    def damage(folder: Path) -> None:
        files = list(checkpoint_files(folder).values())
        if len(files) > 1:
            content = bytearray(files[-1].read_bytes())
            content[len(content) // 2] ^= 0x10
            files[-1].write_bytes(content)
            damaged.append(files[-1])

    run_to_the_end(tmp_path / "cut", settings, Killer("answered"), damage)
    folder = tmp_path / "cut" / "r"
    assert_same(whole, folder)
    assert damaged
    assert damaged[-1].with_suffix(".damaged").exists()
    cut_off = [line for path in folder.glob("*.cut.jsonl") for line in path.read_text().splitlines()]
    notes = [event["text"] for event in map(json.loads, cut_off) if event["event"] == "note"]
    notes += [event["text"] for event in events(folder, "note")]
    for path in damaged:
        assert any(f"was not used: checkpoints/{path.name}" in note for note in notes)


def test_nothing_that_was_written_is_lost_and_the_folder_tells_the_story(tmp_path: Path) -> None:
    killer = Killer("event", only=lambda point: point[0]["event"] in ("round", "evaluation"))
    run_to_the_end(tmp_path, SMALL, killer)
    folder = tmp_path / "r"
    resumed = events(folder, "resumed")  # those after which there was a checkpoint, and the last
    places = [("", "begun", 0), ("cross_entropy", "training", 1), ("cross_entropy", "statistics", 3)]
    assert [(event["training"], event["stage"], event["round"]) for event in resumed] == places
    last = resumed[-1]
    assert last["checkpoint"] == f"checkpoints/{1 + 2 + 1:06d}.safetensors"
    assert "T" in last["time"]
    # one file for each kill: what came after the checkpoint, which is gone on with in the main file
    cuts = sorted(folder.glob("metrics-*.cut.jsonl"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))
    assert len(cuts) == len(killer.met) == 2 + 2 * 2
    assert cuts[-1].name == last["cut"]
    firsts = [json.loads(path.read_text().splitlines()[0]) for path in cuts]
    assert [event["event"] for event in firsts] == ["round", "round", "evaluation", "resumed", "resumed", "resumed"]
    notes = [event["text"] for event in events(folder, "note")]
    about = "resumed after the statistics of cross_entropy (checkpoints/000004.safetensors); later events are in "
    assert notes[-1] == about + last["cut"]
    assert len(events(folder, "run")) == len(events(folder, "plan")) == len(events(folder, "clients")) == 1
    assert len(checkpoint_files(folder)) == 2


def test_the_files_are_few_and_say_where_the_run_is(tmp_path: Path) -> None:
    folder = run(tmp_path, SMALL, checkpoints_kept=20)
    found = [read_checkpoint(path) for path in checkpoint_files(folder).values()]
    assert [str(one.position) for one in found] == [
        "the start", "round 1 of cross_entropy", "round 2 of cross_entropy", "the statistics of cross_entropy",
        "all of cross_entropy",
    ]  # fmt: skip
    assert [sorted(one.records) for one in found] == [
        [],
        ["arrays", "strategy-distances"],
        ["arrays", "strategy-distances"],
        ["arrays", "statistics"],
        [],
    ]
    assert len({one.run for one in found}) == 1
    assert [one.replied.get("cross_entropy") for one in found] == [None, *({0: n, 1: n} for n in (1, 2, 3, 3))]
    for one in found:
        head = (folder / "metrics.jsonl").read_bytes()[: one.offset]
        assert head.endswith(b"\n")
        assert head.count(b'"event": "round"') == min(one.position.round, 2) + 2 * (one.position.stage == "finished")
    few = run(tmp_path / "few", SMALL, checkpoints_kept=1)
    assert [path.name for path in checkpoint_files(few).values()] == ["000005.safetensors"]


@pytest.mark.parametrize("resume", [".", "checkpoints/..", "./checkpoints/000001.safetensors"])
def test_a_run_that_is_resumed_from_within_its_folder_has_its_name(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r" / FOLDER).mkdir(parents=True)
    (tmp_path / "r" / METRICS_FILE).touch()
    (tmp_path / "r" / FOLDER / "000001.safetensors").touch()
    monkeypatch.chdir(tmp_path / "r")
    assert run_folder_of(resume) == tmp_path / "r"


def test_an_older_checkpoint_can_be_named(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedrep", rounds=3, checkpoints_kept=4, state_dir=str(tmp_path / "cut" / "state"))
    whole = run(tmp_path / "whole", settings)
    folder = tmp_path / "cut" / "r"
    with pytest.raises(Killed):
        serve(devices(settings, killer=Killer("asked", only=lambda p: p[0] == "evaluate")), settings, folder)
    files = checkpoint_files(folder)
    assert str(read_checkpoint(files[2]).position) == "round 1 of fedrep"
    assert_same(whole, run(tmp_path / "cut", settings, resume=str(files[2])))
    assert sorted(path.name for path in (folder / "checkpoints").glob("*.cut")) == ["000003.cut", "000004.cut"]


def test_checkpoints_that_are_given_up_again_replace_none_of_the_first_time(tmp_path: Path) -> None:
    """Their counters are the same, since those of the first time are no checkpoints any more."""
    folder = tmp_path / "r" / FOLDER
    folder.mkdir(parents=True)
    (tmp_path / "r" / METRICS_FILE).touch()
    for content in (b"first", b"second", b"third"):
        (folder / "000002.safetensors").write_bytes(content)
        (folder / "000003.safetensors").write_bytes(content)
        later, damaged = [folder / "000002.safetensors"], {folder / "000003.safetensors": "damaged"}
        checkpoint = Checkpoint(Position(), "r", {})
        roll_back(Found(tmp_path / "r", folder / "000001.safetensors", checkpoint, {}, damaged, later))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "000002.cut": b"first", "000002-1.cut": b"second", "000002-2.cut": b"third",
        "000003.damaged": b"first", "000003-1.damaged": b"second", "000003-2.damaged": b"third",
    }  # fmt: skip


def killed_in_round(folder: Path, round: int) -> Settings:
    """Run until a round is asked for the second time; return the settings of the run."""
    settings = SMALL.replace(methods="fedrep", rounds=3, state_dir=str(folder / "state"))
    killer = Killer("answered", only=lambda point: point[2] == str(round))
    with pytest.raises(Killed):
        serve(devices(settings, killer=killer), settings, folder / "r")
    return settings


def test_damaged_events_are_restored_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", SMALL.replace(methods="fedrep", rounds=3))
    settings = killed_in_round(tmp_path / "cut", 3)
    folder = tmp_path / "cut" / "r"
    metrics = folder / "metrics.jsonl"
    harmed = metrics.read_bytes().replace(b'"event": "round"', b'"evemt": "round"', 1)
    metrics.write_bytes(harmed)
    assert_same(whole, run(tmp_path / "cut", settings, resume=str(folder)))
    notes = [event["text"] for event in events(folder, "note")]
    assert any("is damaged" in note and "restored from checkpoints/metrics.jsonl" in note for note in notes)
    assert (folder / "metrics-1.damaged.jsonl").read_bytes() == harmed


def test_events_that_are_gone_come_from_the_copy(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", SMALL.replace(methods="fedrep", rounds=3))
    settings = killed_in_round(tmp_path / "cut", 3)
    (tmp_path / "cut" / "r" / "metrics.jsonl").unlink()
    assert_same(whole, run(tmp_path / "cut", settings, resume=str(tmp_path / "cut" / "r")))


@pytest.mark.parametrize("harm", [b'"evemt": "round"', b'"event" : "round"', b"\xff\x00"])
def test_damage_without_a_copy_is_named_by_its_line(tmp_path: Path, harm: bytes) -> None:
    settings = killed_in_round(tmp_path, 3)
    metrics = tmp_path / "r" / "metrics.jsonl"
    (tmp_path / "r" / "checkpoints" / "metrics.jsonl").unlink()
    number = next(n for n, line in enumerate(metrics.read_bytes().splitlines(), 1) if b'"event": "round"' in line)
    metrics.write_bytes(metrics.read_bytes().replace(b'"event": "round"', harm, 1))
    with pytest.raises(
        RunError, match=rf"no checkpoint can be used: .*metrics\.jsonl, line {number}, which came before"
    ):
        run(tmp_path, settings, resume=str(tmp_path / "r"))


@pytest.mark.parametrize(("killed", "sums"), [(1, [True] * 2), (2, [False] + [True] * 2)])
def test_a_client_that_spoilt_a_secure_sum_stays_left_out(killed: int, sums: list[bool], tmp_path: Path) -> None:
    """It spoils that of round 1; killed in round 1, the server goes back to before that, and the event is cut off."""
    settings = SMALL.replace(
        methods="fedavg", clients=4, fraction=0.12, secure_aggregation=True, secure_threshold=0.6,
        state_dir=str(tmp_path / "state"),
    )  # fmt: skip

    def lying() -> FakeTransport:
        transport = devices(settings)
        honest = transport.clients[104]  # partition 2

        def liar(request: Request) -> Any:
            reply = honest(request)
            return replace(reply, shares=["00" * 160] * 4) if isinstance(reply, SharedKeys) else reply

        transport.clients[104] = liar
        return transport

    killer = Killer("event", only=lambda point: point[0] == ("round", killed))
    listener = [lambda event: killer.reach("event", (event["event"], event.get("round")))]
    with pytest.raises(Killed):
        serve(lying(), settings, tmp_path / "r", listener)
    serve(lying(), settings.replace(resume=str(tmp_path / "r")), tmp_path / "r")
    assert [event["unmasked"] for event in events(tmp_path / "r", "secure_aggregation")] == sums
    assert [event["replied"] for event in events(tmp_path / "r", "round")] == [[0, 1, 3]] * 2
