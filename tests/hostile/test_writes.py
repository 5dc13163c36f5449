"""Every write, flush, rename and removal of agent and server fails once: nothing is lost without a word.

After each failure: what was said to be saved is there, there is a model to serve, and the next attempt succeeds.
"""

from __future__ import annotations

import json
import queue
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtta.server.app
from fedtta.client.agent.__main__ import LOST
from fedtta.client.agent.__main__ import run as run_agent
from fedtta.client.agent.core import Agent
from fedtta.client.agent.store import Store
from fedtta.client.state import DirectoryState, NetworkStore
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import Evaluate
from fedtta.server.app import serve
from fedtta.server.checkpoints import checkpoint_files
from fedtta.server.events import RunError
from fedtta.server.report import read_results
from fedtta.server.report.journal import read_lines
from tests.client.agent import fake
from tests.client.agent.test_encoded import encoded, model_file
from tests.client.agent.test_lifecycle import kill, moved, offer
from tests.client.agent.test_main import ROOT, START, command
from tests.client.agent.test_store import model, state
from tests.client.agent.world import config, sample_images, train
from tests.hostile.disk import FULL, Disk, from_on, numbers, once
from tests.server.test_resume import SMALL, assert_same, described, devices

# -- the agent's store


def steps() -> list[Callable[[Store], object]]:
    """Snapshots, a model in shadow that is promoted, one that is refused, a roll-back and another adapter."""
    return [
        lambda store: store.save(state(1), 10, model().digest()),
        lambda store: store.add(model(2), "shadow", {"agreement": 0.5}),
        lambda store: store.promote("2", check={"shadow_agreement": 0.9}),
        lambda store: store.save(state(2), 20, model(2).digest()),
        lambda store: store.refuse(model(3).digest(), "run/ce/1", "it predicts 'a' for 100% of 60 samples"),
        lambda store: store.promote("1", "rolled back"),
        lambda store: store.save(state(3), 30, model().digest()),
        lambda store: store.add(model(4), "candidate"),
        lambda store: store.refit(model(5)),
        lambda store: store.save(state(4), 40, model(5).digest()),
    ]


Kept = tuple[str, str, int]  # state and digest of a model, and samples of its newest snapshot


def kept(store: Store) -> list[Kept]:
    """What a store holds, as far as it can be read."""
    found = []
    for one in store.models:
        newest = store.load(one.digest) if one.state != "refused" else None
        found.append((one.state, one.digest, newest[0].samples if newest else 0))
    return found


def after_a_kill(folder: Path, copy: Path) -> list[Kept]:
    """What a process finds that starts on a folder now."""
    shutil.copytree(folder, copy)
    notes: list[str] = []
    store = Store(copy, 3, notes.append)
    assert not notes
    found = kept(store)
    assert all(store.load_model(one) is not None for one in store.models if one.state != "refused")
    store.close()
    shutil.rmtree(copy)
    return found


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with a served model."""
    folder = tmp_path_factory.mktemp("begun")
    store = Store(folder, 3, lambda text: None)
    store.add(model(), "served")
    store.close()
    return folder


def changed(begun: Path, folder: Path, fails: Callable[[int], bool]) -> tuple[Disk, list[list[Kept]]]:
    """Take all steps, each once more if it failed; return the disk and what a store holds after each."""
    shutil.copytree(begun, folder)
    disk, history = Disk(folder), []
    with disk.failing(fails):
        store = Store(folder, 3, lambda text: None)
        for step in steps():
            failures = len(disk.failed)
            try:
                step(store)
            except OSError:
                assert len(disk.failed) > failures
                before = history[-1] if history else [("served", model().digest(), 0)]
                assert kept(store) == before
                assert after_a_kill(folder, folder.with_name("copy")) == before, disk.failed
                step(store)
            history.append(kept(store))
            if len(disk.failed) > failures or len(history) == len(steps()):
                assert after_a_kill(folder, folder.with_name("copy")) == history[-1], disk.failed  # what is said is so
        store.close()
    return disk, history


def test_the_agents_store_loses_nothing_at_any_failing_operation(begun: Path, tmp_path: Path) -> None:
    undisturbed, expected = changed(begun, tmp_path / "s", lambda number: False)
    assert {name for name, _ in undisturbed.seen} == {"open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir"}
    for number in numbers(undisturbed.seen):
        shutil.rmtree(tmp_path / "s")
        disk, history = changed(begun, tmp_path / "s", once(number))
        assert len(disk.failed) == 1
        assert history == expected, disk.failed
        assert not list((tmp_path / "s").rglob("*.tmp"))


def test_a_disk_that_stays_full_changes_nothing(begun: Path, tmp_path: Path) -> None:
    undisturbed, history = changed(begun, tmp_path / "s", lambda number: False)
    for number in numbers(undisturbed.seen):
        shutil.rmtree(tmp_path / "s")
        shutil.copytree(begun, tmp_path / "s")
        before, done = [("served", model().digest(), 0)], 0
        with Disk(tmp_path / "s").failing(from_on(number)) as disk:
            store = Store(tmp_path / "s", 3, lambda text: None)
            for step in steps():
                try:
                    step(store)
                except OSError:
                    break
                before, done = kept(store), done + 1
            assert kept(store) == before
            store.close()
        found = after_a_kill(tmp_path / "s", tmp_path / "copy")
        # where only the last flush failed, the change is there although it was not said
        assert found == before or found == history[done], disk.failed


# -- the agent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluate]:
    """A folder whose agent has a model, and the evaluation that brought it."""
    folder = tmp_path_factory.mktemp("trained")
    agent = Agent(config(folder))
    request, _ = train(agent.perform)
    agent.close()
    return folder, request


@contextmanager
def process(path: Path, **keys: str) -> Iterator[subprocess.Popen[str]]:
    """An agent as a process, with a model file and its state in a folder; killed in the end."""
    model_file(path / "m.safetensors")
    given = {"name": "0", "state-dir": "state", "device": "cpu", **keys}
    (path / "device.toml").write_text("".join(f'{key} = "{value}"\n' for key, value in given.items()))
    with subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
        try:
            yield agent
        finally:
            agent.kill()


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> tuple[int, Disk]:
    """Predict 20 samples, then SIGTERM with a disk that fails; return the exit status of the agent."""
    with fake.folder() as short, monkeypatch.context() as patched:
        keys = config(folder, listen=f"unix:{short}/a", relay=f"unix:{short}/r")
        disk, made = Disk(folder / "state"), Agent(keys)
        made.predict(sample_images(0, 20))
        asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        patched.setattr("fedtta.client.agent.core.Agent", lambda _: made)
        asked.put(signal.SIGTERM)
        with disk.failing(fails):
            return run_agent(keys, asked), disk


def test_sigterm_on_a_full_disk_says_that_nothing_is_saved(
    trained: tuple[Path, Evaluate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(trained[0], tmp_path / "a")
    status, disk = ended(tmp_path / "a", monkeypatch, from_on(0))
    assert disk.failed
    assert status == LOST != 0
    (last,) = [one for one in caplog.records if one.message.startswith("stopped")]
    assert "is not saved: [Errno 28]" in last.message
    assert "20 samples is lost" in last.message
    assert last.levelname == "ERROR"


def test_sigterm_with_any_failing_operation_tells_the_truth(
    trained: tuple[Path, Evaluate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained[0], tmp_path / "whole")
    status, disk = ended(tmp_path / "whole", monkeypatch, lambda number: False)
    assert status == 0
    for number in numbers(disk.seen):
        for fails in (once(number), from_on(number)):
            shutil.copytree(trained[0], tmp_path / "a")
            status, disk = ended(tmp_path / "a", monkeypatch, fails)
            agent = Agent(config(tmp_path / "a"))  # which has a model, whatever happened
            assert agent.status().version
            assert status in (0, LOST)
            assert agent.status().samples == 20 or (status, agent.status().samples) == (LOST, 0), disk.failed
            assert fails(number + 10**6) or status == 0, disk.failed  # what fails once is tried again
            agent.close()
            shutil.rmtree(tmp_path / "a")


@pytest.mark.slow
@pytest.mark.timeout(6 * START)
def test_a_process_that_may_not_write_ends_with_a_status_that_says_so() -> None:
    with fake.folder() as path, process(path, adapter="t3a", model="m.safetensors") as agent:
        with fake.channel(f"unix:{path}/state/agent.sock") as line:
            images = protobuf.to_files([encoded("PNG")])
            fake.predictor(line).Predict(pb.PredictRequest(images=images), timeout=START, wait_for_ready=True)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (0, 0))  # every write to a file fails from now on
        agent.send_signal(signal.SIGTERM)
        _, told = agent.communicate(timeout=START)
    assert agent.returncode == LOST, told
    assert "the adapter's state is not saved: [Errno 27]" in told
    assert "state is saved" not in told
    assert "Traceback" not in told


def test_an_agent_starts_and_predicts_on_a_full_disk(trained: tuple[Path, Evaluate], tmp_path: Path) -> None:
    for manifest in (True, False):  # or it has to be rebuilt
        shutil.copytree(trained[0], tmp_path / "a")
        if not manifest:
            (tmp_path / "a" / "state" / "manifest.json").unlink()
        with Disk(tmp_path / "a" / "state").failing(from_on(0)):
            agent = Agent(config(tmp_path / "a"))
            assert agent.predict(sample_images(0, 5)).version == agent.status().version != ""
            assert "is not saved" in agent.close()
        shutil.rmtree(tmp_path / "a")


def offered(start: tuple[Path, Evaluate], folder: Path, fails: Callable[[int], bool]) -> Disk:
    """Offer a model while a disk fails, kill the agent, start it again, and offer the model once more."""
    shutil.copytree(start[0], folder)
    disk, agent = Disk(folder / "state"), Agent(config(folder))
    old = agent.status().version
    agent.predict(sample_images(0, 20))
    with disk.failing(fails):
        try:
            told = offer(agent, moved(start[1]))
        except OSError:  # a reply that the audit log cannot record does not leave
            assert disk.failed[0][1].startswith("audit"), disk.failed
            told = f"promoted {agent.status().version}"
    now = agent.status().version
    assert agent.predict(sample_images(20, 5)).version == now
    assert (told == f"promoted {now}") == (now != old), disk.failed
    assert told.startswith("promoted") or "cannot be stored: [Errno" in told
    kill(agent)
    again = Agent(config(folder))
    assert again.status().version == now, disk.failed
    assert not [note for note in again.status().notes if "cannot be read" in note or "refused" in note]
    last = offer(again, moved(start[1]))
    assert last == f"promoted {again.status().version}"
    assert [model.state for model, _ in again.models()] == ["kept", "served"]
    again.close()
    shutil.rmtree(folder)
    return disk


def test_a_model_that_cannot_be_stored_is_refused_and_the_served_one_goes_on(
    trained: tuple[Path, Evaluate], tmp_path: Path
) -> None:
    seen = offered(trained, tmp_path / "a", lambda number: False).seen
    for number in numbers(seen):
        failed = offered(trained, tmp_path / "a", once(number)).failed
        assert len(failed) == 1, (number, seen[number], failed)


def test_two_models_and_two_snapshots_are_kept_whatever_the_owner_says(
    trained: tuple[Path, Evaluate], tmp_path: Path
) -> None:
    shutil.copytree(trained[0], tmp_path / "a")
    agent = Agent(config(tmp_path / "a", models_kept=1, snapshots_kept=1))
    old = agent.status().version
    new = offer(agent, moved(trained[1])).removeprefix("promoted ")
    agent.predict(sample_images(0, 20))
    agent.snapshot()
    assert len(agent.status().snapshots) == 2
    agent.close()
    newest = max((tmp_path / "a" / "state" / "models").iterdir(), key=lambda path: int(path.name))
    (newest / "network.safetensors").write_bytes(b"half")
    agent = Agent(config(tmp_path / "a", models_kept=1, snapshots_kept=1))
    assert new != agent.status().version == old
    agent.close()


def test_a_damaged_model_is_taken_from_its_file_again(tmp_path: Path) -> None:
    model_file(tmp_path / "m.safetensors")
    keys = {"adapter": "t3a", "model": str(tmp_path / "m.safetensors")}
    agent = Agent(config(tmp_path, **keys))
    version = agent.status().version
    agent.close()
    for path in (tmp_path / "state" / "models").rglob("network.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    agent = Agent(config(tmp_path, **keys))
    assert agent.status().version == version
    assert agent.predict(sample_images(0, 3)).version == version
    agent.close()


def test_an_agent_that_cannot_save_says_so_and_saves_later(
    trained: tuple[Path, Evaluate], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(trained[0], tmp_path / "a")
    agent = Agent(config(tmp_path / "a"))
    agent.predict(sample_images(0, 20))
    with Disk(tmp_path / "a" / "state").failing(from_on(0)):
        agent._save()
        assert agent.trouble
        assert any("not saved: [Errno 28]" in note for note in agent.status().notes)
        assert agent.status().unsaved_samples == 20
    assert any("not saved: [Errno 28]" in one.message for one in caplog.records)
    agent._save()
    assert (agent.trouble, agent.status().unsaved_samples) == ("", 0)
    events = [json.loads(line) for line in (tmp_path / "a" / "state" / "agent.log").read_text().splitlines()]
    lost = next(event for event in events if event["event"] == "not written")
    assert lost["count"] > 0
    agent.close()


# -- private state


def entry(value: float) -> Arrays:
    return {"head": np.full(100, value)}


def rounds(folder: Path, fails: Callable[[int], bool]) -> Disk:
    """Save five rounds and networks, each once more if it failed; what was saved last is there at any time."""
    disk, saved = Disk(folder), 0
    with disk.failing(fails):
        for round in range(1, 6):
            own, networks = DirectoryState(folder, "run1", "0"), NetworkStore(folder / "networks")
            saves: list[Callable[[], None]] = [
                partial(own.save, "t", round, entry(round), keep=[1]),
                partial(networks.keep, f"{round:08x}", entry(round)),
            ]
            for save in saves:
                try:
                    save()
                except OSError:
                    found = DirectoryState(folder, "run1", "0").load("t", 99)
                    assert found is not None or not saved
                    assert found is None or found["head"][0] in (saved, round)
                    save()
            saved = round
            again = DirectoryState(folder, "run1", "0").load("t", round)
            assert again is not None
            assert again["head"][0] == round
            assert networks.load(f"{round:08x}")["head"][0] == round
    return disk


def test_private_state_loses_nothing_at_any_failing_operation(tmp_path: Path) -> None:
    seen = rounds(tmp_path / "s", lambda number: False).seen
    assert len(seen) > 60
    for number in numbers(seen):
        shutil.rmtree(tmp_path / "s")
        assert len(rounds(tmp_path / "s", once(number)).failed) == 1
        assert DirectoryState(tmp_path / "s", "run1", "0").tags()["t"][-2:] == [4, 5]


# -- the server


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    known = described()
    for module in ("fedtta.server.app", "fedtta.server.run"):
        monkeypatch.setattr(f"{module}.describe", lambda settings, bundle: {**known, "settings": settings.flat()})
    monkeypatch.setattr("fedtta.server.report.page.build_page", lambda *_: "<html>")  # which takes most of the time
    monkeypatch.setattr("fedtta.server.live.LiveState.write", lambda self: None)  # of a thread, so at no certain moment


SETTINGS = SMALL.replace(rounds=1, methods="fedthe", checkpoints_kept=1)


def a_run(folder: Path, resume: bool = False) -> Path:
    settings = SETTINGS.replace(state_dir=str(folder / "state"), resume=str(folder / "r") if resume else "")
    serve(devices(settings, 200 if resume else 100), settings, folder / "r")
    return folder / "r"


@pytest.fixture
def whole(tmp_path: Path, quiet: None) -> Iterator[tuple[Path, list[Any]]]:
    """The folder of an undisturbed run, and the operations on it."""
    disk = Disk(tmp_path / "whole" / "r")
    with disk.failing(lambda number: False):
        yield a_run(tmp_path / "whole"), list(disk.seen)


def test_a_run_is_resumed_after_any_failing_operation(whole: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, seen = whole
    assert len(seen) > 60
    for number in numbers(seen):
        for fails in (once(number), from_on(number)) if FULL else (once(number) if number % 2 else from_on(number),):
            disk = Disk(tmp_path / "cut" / "r")
            told: BaseException | None = None
            with disk.failing(fails):
                try:
                    a_run(tmp_path / "cut")
                except (OSError, RunError) as error:
                    told = error
            assert disk.failed
            if told is None:  # an old checkpoint that could not be removed
                assert {name for name, _ in disk.failed} == {"unlink"}
            else:
                assert "Errno" in str(told)
                goes_on(tmp_path / "cut", disk)
            assert_same(folder, tmp_path / "cut" / "r")
            shutil.rmtree(tmp_path / "cut")


def goes_on(folder: Path, disk: Disk) -> None:
    """Let a run that failed end: resumed, begun again where there is no checkpoint, reported where it was complete."""
    run = folder / "r"
    lines = read_lines((run / "metrics.jsonl").read_bytes()) if (run / "metrics.jsonl").exists() else []
    assert not [line.fault for line in lines if line.fault], disk.failed
    if lines and lines[-1].event.get("status") == "completed":
        fedtta.server.app._write_results(run)
    elif checkpoint_files(run):
        a_run(folder, resume=True)
    else:
        shutil.rmtree(folder)
        a_run(folder)


@pytest.mark.usefixtures("quiet")
def test_a_report_that_cannot_be_written_is_told_and_written_again(tmp_path: Path) -> None:
    disk, told = Disk(tmp_path / "r"), r"the report of .* could not be written: .* writes it again"
    fails = disk.failing(lambda number: disk.seen[number][1].startswith(".report.html"))
    with fails, pytest.raises(RunError, match=told):
        a_run(tmp_path)
    assert read_results(tmp_path / "r" / "metrics.jsonl").end.status == "completed"  # type: ignore[union-attr]
    fedtta.server.app._write_results(tmp_path / "r")
    assert (tmp_path / "r" / "report.html").exists()
