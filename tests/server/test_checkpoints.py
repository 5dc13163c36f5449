"""Checkpoint files, and every reason to refuse to resume a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import fedtta.client.device
from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Train
from fedtta.models import load_arrays
from fedtta.server.app import run_folder, serve
from fedtta.server.checkpoints import (
    Checkpoint,
    Checkpoints,
    Position,
    checkpoint_files,
    memory_key,
    read_checkpoint,
    write_checkpoint,
)
from fedtta.server.events import RunError
from fedtta.server.resume import find_checkpoint, locked
from fedtta.settings import Settings, SettingsError
from tests.server.test_resume import SMALL, Killed, Killer, assert_same, devices, quicken, run


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder and the clients' folders of a run that was killed in its second round."""
    with pytest.MonkeyPatch.context() as patch:
        allow_messages()
        quicken(patch)
        folder = tmp_path_factory.mktemp("killed")
        settings = SMALL.replace(methods="fedrep", state_dir=str(folder / "state"))
        second = Killer("answered", only=lambda point: point[:3] == (Train.kind, "fedrep", "2"))
        with pytest.raises(Killed):
            serve(devices(settings, killer=second), settings, folder / "r")
        yield folder


@pytest.fixture
def cut(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "cut")
    return tmp_path / "cut"


def resume(folder: Path, **changes: Any) -> Path:
    return run(folder, SMALL.replace(methods="fedrep"), **{"resume": str(folder / "r"), **changes})


# -- the file


def checkpoint(**changes: Any) -> Checkpoint:
    records = {
        "strategy.current": {"z/b": np.arange(3, dtype=np.int64), "a": np.array(1.5), "": np.empty((0, 2), np.float32)},
        "arrays": {"z/b": np.float32([[np.nan, -0.0, np.inf]])},
        "strategy": {},
    }
    known: dict[str, Any] = {
        "position": Position("fedrep", "training", "", 3), "run": "abc",
        "settings": {"seed": 1, "alpha": 0.1, "b": True}, "world": {"sizes": [[1, 2, 3]]},
        "finished": ("x", "y"), "replied": {"fedrep": {0: 3, 11: 1}}, "seconds": 1.5,
        "offset": 77, "records": records, "notes": {"signature": {"shared": {"w": [[2], "float32"]}}},
    }  # fmt: skip
    return Checkpoint(**{**known, **changes})


def test_a_checkpoint_comes_back_with_all_bits_and_in_order(tmp_path: Path) -> None:
    path, one = tmp_path / "000001.safetensors", checkpoint()
    write_checkpoint(path, one)
    back = read_checkpoint(path)
    assert list(back.records) == list(one.records)
    for key, named in one.records.items():
        assert list(back.records[key]) == list(named)  # FedAvgM counts on the order
        for name, value in named.items():
            other = back.records[key][name]
            assert (other.dtype, other.shape, other.tobytes()) == (value.dtype, value.shape, value.tobytes())
    told = json.loads(load_arrays(path, finite=False)[1]["checkpoint"])  # as all versions of schema 1 write it
    assert (told["place"]["round"], told["world"], told["schema"]) == (3, {"sizes": [[1, 2, 3]]}, 1)
    for name in ("position", "run", "settings", "world", "finished", "replied", "seconds", "offset", "notes"):
        assert getattr(back, name) == getattr(one, name), name


def test_a_file_that_is_cut_changed_or_something_else_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "000001.safetensors"
    write_checkpoint(path, checkpoint())
    whole = path.read_bytes()
    for content in [whole[:n] for n in (0, 7, 100, len(whole) - 1)] + [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 37)
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=path.name):
            read_checkpoint(path)
    from fedtta.models import save_arrays

    save_arrays(path, {"w": np.ones(2)})
    with pytest.raises(ValueError, match=rf"{path.name}: no checkpoint"):
        read_checkpoint(path)
    save_arrays(path, {}, {"checkpoint": json.dumps({"schema": 2})})
    with pytest.raises(ValueError, match=rf"{path.name}: a checkpoint of schema 2; this version reads 1"):
        read_checkpoint(path)


@examples(deadline=None, max_examples=20)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 12))
def test_how_many_are_written_and_kept(
    tmp_path_factory: pytest.TempPathFactory, every: int, kept: int, rounds: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder, Settings(checkpoint_every=every, checkpoints_kept=kept))
    checkpoints.open("t")
    written = []
    for round in range(1, rounds + 1):
        if checkpoints.due(round, rounds):
            checkpoints.save(Position("t", "training", round=round), {"arrays": {"w": np.ones(round)}})
            written.append(round)
        files = checkpoint_files(folder)
        there = [read_checkpoint(path).position.round for path in files.values()]
        # the rounds that clients keep state of are exactly those that the server could resume from
        assert there == checkpoints.rounds("t") == written[-kept:]
        assert checkpoints.rounds("u") == []
    assert written == ([r for r in range(1, rounds + 1) if r % every == 0 or r == rounds] if every else [])
    shutil.rmtree(folder)


def test_only_private_state_of_the_same_thing_can_be_gone_back_to(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Settings(checkpoints_kept=9))
    cell = memory_key("tent[lr=0.01]", "fedavg")
    for position in (
        Position("t", "training", round=4), Position("t", "statistics", round=5), Position("t", "rates", "all", 7),
        Position("t", "finished"), Position("u", "training", round=1), Position("u", "cell", cell, 2),
    ):  # fmt: skip
        checkpoints.save(position, {})
    assert [checkpoints.rounds(key) for key in ("t", "u", cell, "all", "")] == [[4, 5], [1], [2], [], []]


def test_the_strategy_of_a_loop_that_has_ended_is_left_behind(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, Settings())
    checkpoints.open("t")
    one = {"w": np.ones(1)}
    checkpoints.save(Position("t", "training", round=1), {"arrays": one, "strategy.momentum": one})
    checkpoints.save(Position("t", "statistics", round=2), {"statistics": {"dle": np.ones(1)}})
    last = read_checkpoint(list(checkpoint_files(tmp_path).values())[-1])
    assert set(last.records) == {"arrays", "statistics"}


# -- refused


def refused(folder: Path, error: type[Exception], told: str, **changes: Any) -> None:
    before = snapshot(folder)
    with pytest.raises(error, match=told):
        resume(folder, **changes)
    assert snapshot(folder) == before


def test_no_such_run(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="resume = '/nowhere': allowed is the folder of a run, or a file in"):
        run_folder(SMALL.replace(resume="/nowhere"))
    refused(cut, SettingsError, "allowed is the folder of a run", resume=str(cut / "r" / "settings.toml"))
    other = SMALL.replace(methods="fedrep", resume=str(cut / "r"))
    with pytest.raises(SettingsError, match="a run is resumed in its own folder, not in"):
        serve(devices(other), other, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    assert run_folder(other) == cut / "r"
    assert run_folder(other.replace(resume=str(next(iter(checkpoint_files(cut / "r").values()))))) == cut / "r"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 2}, r": seed = 2, in the run it is 1; the run's are in .*/settings\.toml$"),
        ({"rounds": 9, "alpha": 0.2}, "alpha = 0.2, in the run it is 0.1; rounds = 9, in the run it is 2"),
        ({"methods": "fedavg"}, "methods = 'fedavg', in the run it is 'fedrep'"),
        ({"learning_rate": 0.1000000001}, "learning-rate = 0.1000000001, in the run it is 0.1"),
    ],
)
def test_other_settings(change: dict, told: str, cut: Path) -> None:
    refused(cut, SettingsError, told, **change)


def test_places_and_pace_may_change(cut: Path, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", SMALL.replace(methods="fedrep"))
    shutil.copytree(cut / "state", tmp_path / "moved")
    changes: dict[str, Any] = {
        "node_timeout": 6, "round_timeout": 61, "workers": 1, "checkpoint_every": 2, "checkpoints_kept": 1,
        "results": "x", "run_name": "y",
    }  # fmt: skip
    settings = SMALL.replace(methods="fedrep", resume=str(cut / "r"), state_dir=str(tmp_path / "moved"), **changes)
    serve(devices(settings), settings, run_folder(settings))
    assert_same(whole, cut / "r")
    refused(cut, SettingsError, "this run is complete; there is nothing to resume")
    refused(cut, SettingsError, "this run is complete", seed=3)


def test_no_readable_checkpoint(cut: Path) -> None:
    paths = list(checkpoint_files(cut / "r").values())
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    refused(cut, RunError, f"no checkpoint can be used: .*{paths[0].name}: .*; .*{paths[1].name}: ")
    refused(cut, RunError, f"no checkpoint can be used: .*{paths[0].name}: corrupt[^;]*$", resume=str(paths[0]))
    shutil.rmtree(cut / "r" / "checkpoints")
    refused(cut, RunError, "no checkpoint can be used: there is none; start a new run")


def test_a_checkpoint_that_leads_nowhere_is_not_used_and_half_files_are_removed(cut: Path) -> None:
    folder = cut / "r" / "checkpoints"
    (folder / "999999.safetensors").symlink_to(folder / "nowhere")
    left = [folder / ".000003.safetensors.0123abcd.tmp", folder.parent / ".model.safetensors.0123abcd.tmp"]
    for path in left:
        path.touch()
    resume(cut)
    assert not any(path.exists() for path in left)
    assert (folder / "999999.damaged").is_symlink()


def test_a_metrics_file_that_is_shorter_than_the_checkpoint_knows(cut: Path) -> None:
    metrics, copy = cut / "r" / "metrics.jsonl", cut / "r" / "checkpoints" / "metrics.jsonl"
    found = find_checkpoint(SMALL.replace(methods="fedrep", resume=str(cut / "r")))
    assert found.checkpoint.position.round == 1
    assert copy.stat().st_size == found.checkpoint.offset
    metrics.write_bytes(metrics.read_bytes()[: found.checkpoint.offset - 1])
    copy.unlink()  # as of a run of an earlier version
    found = find_checkpoint(SMALL.replace(methods="fedrep", resume=str(cut / "r")))
    assert found.checkpoint.position.stage == "begun"
    assert "metrics.jsonl has" in next(iter(found.damaged.values()))


def test_clients_that_have_lost_their_state(cut: Path) -> None:
    (state,) = (cut / "state").iterdir()
    shutil.rmtree(state / "1")
    told = "resume: client 1: the private state of fedrep at round 1 of fedrep is lost; .*set state-dir"
    for _ in range(2):  # a refusal costs nothing: the next attempt finds the same
        with pytest.raises(RunError, match=told):
            resume(cut)
        assert find_checkpoint(SMALL.replace(methods="fedrep", resume=str(cut / "r"))).checkpoint.position.round == 1
    kept = state / "0" / "fedrep@1.safetensors"
    assert load_arrays(kept)[0]
    kept.unlink()  # it has that of round 2, which is of no use
    with pytest.raises(RunError, match="resume: clients 0, 1: the private state of fedrep"):
        resume(cut)


def test_clients_with_other_data(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedtta.client.device, "resolve", lambda shifts, natural, **_: (["original", "fog"], None))
    with pytest.raises(RunError, match=r"clients 0, 1: shifts = \['original', 'fog'\], in the run it is \['orig"):
        resume(cut)


def test_a_run_that_another_process_is_writing(cut: Path) -> None:
    with locked(cut / "r"):
        refused(cut, RunError, "r: another process is writing this run")
    resume(cut)
