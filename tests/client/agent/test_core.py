"""The agent: predictions in order, models that come and go, and what outlives the process."""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.client.agent import core, local
from fedtta.client.agent.core import Agent
from fedtta.client.agent.predictions import NoModel
from fedtta.client.agent.store import StateInUse
from fedtta.client.node import Node
from fedtta.client.policy import PolicyError
from fedtta.client.state import DirectoryState
from fedtta.messages.replies import Evaluated, Reply
from fedtta.messages.requests import Evaluate, Identify, Request, TrainingTask
from fedtta.models.deadline import Deadline
from tests.client.agent.world import common, config, evaluation, fork, killed, labels, said, sample_images, train


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluate, Evaluated]:
    """A folder whose agent has a model, the evaluation that brought it, and its reply."""
    folder = tmp_path_factory.mktemp("trained")
    agent = Agent(config(folder))
    with pytest.raises(NoModel, match="no model yet"):
        agent.predict(sample_images(0, 1))
    with pytest.raises(NoModel, match="no model yet"):
        agent.snapshot()
    assert agent.status().version == ""
    request, reply = train(agent.perform)
    assert agent.status().notes == [f"model {agent.status().version} is served"]
    agent.close()
    return folder, request, reply


@pytest.fixture
def folder(start: tuple[Path, Evaluate, Evaluated], tmp_path: Path) -> Path:
    shutil.copytree(start[0] / "state", tmp_path / "state")
    return tmp_path


@pytest.fixture
def agents(folder: Path) -> Iterator[Callable[..., Agent]]:
    """Make agents on the folder; they are closed in the end."""
    made: list[Agent] = []

    def make(**changes: Any) -> Agent:
        made.append(Agent(config(folder, **changes)))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def predictions(agent: Agent, start: int, stop: int, size: int = 10) -> np.ndarray:
    return np.concatenate([agent.predict(sample_images(i, size)).probabilities for i in range(start, stop, size)])


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_it_answers_as_it_was_evaluated(folder: Path, start: tuple[Path, Evaluate, Evaluated], agents: Any) -> None:
    agent = agents(adapter="none")  # the row of the evaluation
    right = sum(
        int((agent.predict(sample_images(i, 1)).probabilities.argmax(1) == labels(i, 1)).sum())
        for i in range(start[2].results[0].total)
    )
    assert right == start[2].results[0].correct


def test_a_prediction_says_where_it_comes_from(agents: Any) -> None:
    agent = agents()
    first, second = agent.predict(sample_images(0, 3)), agent.predict(sample_images(3, 4))
    assert (first.position, second.position) == (0, 3)
    assert first.version == second.version == agent.status().version
    assert first.version.startswith("run1/cross_entropy/2/")
    assert second.probabilities.dtype == np.float32
    np.testing.assert_allclose(second.probabilities.sum(1), 1, atol=1e-6)
    assert second.weights is not None
    assert second.weights.shape == (4,)
    assert second.adapted
    status = agent.status()
    assert (status.samples, status.unsaved_samples, status.classes[3]) == (7, 7, "3")


def test_a_stream_without_end_leaves_no_report_behind(agents: Any) -> None:
    agent = agents()
    predictions(agent, 0, 30)
    assert agent._live.adapter.report() == {}


def test_bytes_and_floats_are_the_same_images(agents: Any) -> None:
    agent = agents()
    one = agent.predict(sample_images(0, 5)).probabilities
    agent.reset()
    two = agent.predict(sample_images(0, 5).astype(np.float32) / np.float32(255)).probabilities
    np.testing.assert_array_equal(one, two)


X = np.zeros((2, 3, 16, 16), np.float32)


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (X.astype(np.float64), "images are float64; allowed: uint8, float32"),
        (X[0], r"shape \[3, 16, 16\]; allowed is \[B, 3, 16, 16\]"),
        (X[:, :1], r"shape \[2, 1, 16, 16\]"),
        (X[:0], "B at least 1"),
        (X + np.float32(1.5), r"images \[0, 1\]"),
        (np.where(np.arange(2)[:, None, None, None] == 1, np.float32(np.nan), X), r"images \[1\] .* not finite"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(agents: Any, pixels: Any, said: str) -> None:
    agent = agents()
    agent.predict(sample_images(0, 10))
    before = agent._live.state()
    with pytest.raises(ValueError, match=said):
        agent.predict(pixels)
    after = agent._live.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert agent.status().samples == 10


@pytest.mark.parametrize("adapter", ["fedthe", "btfl", "tent", "t3a", "cotta"])
def test_the_rest_of_a_stream_is_that_of_an_undisturbed_agent(folder: Path, adapter: str) -> None:
    one = Agent(config(folder, adapter=adapter))
    predictions(one, 0, 30)
    one.snapshot()
    expected = predictions(one, 30, 60)
    saved = one.status().snapshots[-1]
    one._closed = True  # killed: what came after the snapshot is lost
    one._store.close()
    two = Agent(config(folder, adapter=adapter))
    assert (two.status().samples, two.status().snapshots[-1]) == (30, saved)
    # all weights move in CoTTA; a file does not keep their layout in memory, on which rounding depends
    np.testing.assert_allclose(predictions(two, 30, 60), expected, rtol=0, atol=1e-6 if adapter == "cotta" else 0)
    two.close()
    three = Agent(config(folder, adapter=adapter))  # closed in good order: nothing is lost
    assert three.status().samples == 60
    three.close()


def test_one_agent_a_state_directory(agents: Any) -> None:
    agents()
    with pytest.raises(StateInUse, match="process id"):
        agents()


def test_snapshot_rollback_and_reset(agents: Any) -> None:
    agent = agents()
    fresh = predictions(agent, 0, 20)
    first = agent.snapshot()
    expected = predictions(agent, 20, 40)
    second = agent.snapshot()
    assert (first.samples, second.samples) == (20, 40)
    predictions(agent, 40, 50)
    assert agent.rollback() == second
    assert agent.status().samples == 40
    assert agent.rollback(first.snapshot) == first
    assert second.snapshot not in agent.status().snapshots
    np.testing.assert_array_equal(predictions(agent, 20, 40), expected)
    with pytest.raises(ValueError, match="no snapshot"):
        agent.rollback(second.snapshot)
    assert agent.reset().samples == 0
    np.testing.assert_array_equal(predictions(agent, 0, 20), fresh)
    assert "reset" in agent.status().notes[-1]


def test_a_roll_back_that_fails_changes_nothing(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents()
    predictions(agent, 0, 20)
    live = agent._live
    bad = {**live.state(), "guard.numbers": np.array([0, 0, 99])}
    agent._store.save(bad, 10, live.digest)
    agent.snapshot()
    predictions(agent, 20, 40)
    before, status = live.state(), agent.status()
    with pytest.raises(ValueError, match="out of range"):
        agent.rollback(status.snapshots[-2])

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(agent._store, "forget_after", full)
    with pytest.raises(OSError, match="No space"):
        agent.rollback()
    assert replace(agent.status(), uptime=status.uptime) == status
    np.testing.assert_equal(live.state(), before)
    assert live.changed


def test_a_new_model_replaces_the_old_one(start: tuple[Path, Evaluate, Evaluated], agents: Any) -> None:
    agent, request = agents(), start[1]
    old = agent.predict(sample_images(0, 10)).version
    moved = {name: value * np.float32(1.01) for name, value in request.arrays.items()}
    agent.perform(evaluation(moved, request.statistics))
    new = agent.predict(sample_images(0, 10))
    assert new.version != old
    assert (new.position, agent.status().samples) == (0, 10)
    assert agent.status().notes[-1] == f"model {new.version} replaces {old}"
    agent.perform(evaluation(moved, request.statistics))  # the same once more, as after a resumed run
    assert agent.status().samples == 10
    agent.perform(evaluation(moved, None, task=TrainingTask("balanced_softmax")))  # another training of that run
    assert agent.predict(sample_images(0, 1)).version == new.version


def test_the_training_can_be_named(start: tuple[Path, Evaluate, Evaluated], agents: Any) -> None:
    agent, request = agents(training="other"), start[1]
    before = agent.status().version
    agent.perform(request)
    agent.perform(evaluation(request.arrays, None, run="run2"))
    assert agent.status().version == before


def test_a_model_that_the_adapter_cannot_use_is_not_served(
    start: tuple[Path, Evaluate, Evaluated], agents: Any
) -> None:
    agent, request = agents(), start[1]
    before = agent.status().version
    reply = agent.perform(evaluation(request.arrays, None, run="run2"))
    assert reply.results[0].total  # the evaluation counts
    assert agent.status().version == before
    assert "run2/cross_entropy is not served: fedthe needs" in agent.status().notes[-1]


@pytest.mark.parametrize("fails", ["local.make_device", "lifecycle.Lifecycle.offer"])
@pytest.mark.parametrize("error", [FloatingPointError("diverged"), OSError("no space")])
def test_an_evaluation_counts_although_its_model_fails(
    start: tuple[Path, Evaluate, Evaluated], agents: Any, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception
) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(f"fedtta.client.agent.{fails}", failing)
    reply = agents().perform(evaluation(start[1].arrays, start[1].statistics))
    assert reply.served == f"refused: {error}"


def test_a_deadline_during_the_making_of_a_model_is_no_reply(
    start: tuple[Path, Evaluate, Evaluated], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "make_device", lambda *_: Deadline(-1).check())
    with pytest.raises(PolicyError, match="most-seconds: stopped"):
        agents().perform(evaluation(start[1].arrays, start[1].statistics))


def test_predictions_go_on_beside_requests_which_run_one_at_a_time(agents: Any, monkeypatch: Any) -> None:
    agent, go_on = agents(), threading.Event()

    def slow(request: Request, node: Node, admit: object) -> Reply:
        assert go_on.wait(60)
        return Evaluated(num_examples=1, checked=0, leaked=0, results=[])

    monkeypatch.setattr(local, "perform", slow)
    replies: list[Reply] = []
    request = Identify(**common())
    threads = [threading.Thread(target=lambda: replies.append(agent.perform(request))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: agent.status().training == "identify")
    assert agent.predict(sample_images(0, 5)).position == 0
    assert not replies
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(replies) == 2
    assert agent.status().training == ""


def test_private_state_lives_in_the_state_directory(folder: Path) -> None:
    kept = [path.relative_to(folder / "state" / "private") for path in (folder / "state" / "private").rglob("*@*")]
    assert sorted(map(str, kept)) == [f"run1/0/cross_entropy@{round}.safetensors" for round in (1, 2)]


def test_old_runs_are_forgotten_and_that_is_noted(
    folder: Path, start: tuple[Path, Evaluate, Evaluated], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, request = agents(runs_kept=2), start[1]
    private = folder / "state" / "private"
    monkeypatch.setattr(agent, "_take_over", lambda request, offer: None)
    for run in ("run2", "run3"):
        again = DirectoryState(private, run, "0")
        for key, tags in (one := DirectoryState(private, "run1", "0")).tags().items():
            again.save(key, tags[-1], one.load(key, tags[-1]) or {})
        agent.perform(evaluation(request.arrays, None, run=run))
    assert sorted(path.name for path in private.iterdir() if path.name.startswith("run")) == ["run2", "run3"]
    assert "run run1 forgotten: it is not among the last 2" in agent.status().notes

    def denied(*_: Any) -> list[str]:
        raise PermissionError("not yours")

    monkeypatch.setattr(core, "forget_runs", denied)
    assert agent.perform(evaluation(request.arrays, None, run="run3")).results  # done all the same
    assert agent.status().notes[-1] == "old runs could not be removed: not yours"


def test_it_saves_by_itself_after_so_many_samples(agents: Any) -> None:
    agent = agents(save_every_samples=20)
    predictions(agent, 0, 10)
    assert agent.status().unsaved_samples == 10
    predictions(agent, 10, 20)
    until(lambda: agent.status().unsaved_samples == 0)


def test_it_saves_by_itself_after_a_while(agents: Any) -> None:
    agent = agents(save_every_seconds=0.05)
    predictions(agent, 0, 10)
    until(lambda: agent.status().unsaved_samples == 0)
    until(lambda: len(agent.status().snapshots) == 2)
    time.sleep(0.15)
    assert len(agent.status().snapshots) == 2  # nothing new, nothing saved


def test_it_returns_freed_memory_whenever_it_could_save(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[None] = []
    monkeypatch.setattr(core, "return_freed_memory", lambda: returned.append(None))
    agents(save_every_seconds=0.05)
    until(lambda: len(returned) >= 2)


def test_a_full_disk_is_noted_and_predictions_go_on(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents(save_every_samples=10)

    def full(path: Path, *content: bytes, **_: bool) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("fedtta.models.arrays.write_atomically", full)
        predictions(agent, 0, 20)
        until(lambda: any("not saved: [Errno 28]" in note for note in agent.status().notes))
        assert agent.predict(sample_images(20, 5)).adapted
        assert agent.status().unsaved_samples == 25
        with pytest.raises(OSError, match="No space"):
            agent.snapshot()
    predictions(agent, 30, 40)
    until(lambda: agent.status().unsaved_samples == 0)
    until(lambda: agent.status().notes[-1] == "saved again")
    predictions(agent, 40, 50)
    until(lambda: agent.status().unsaved_samples == 0)
    assert agent.status().notes.count("saved again") == 1


def test_another_adapter_keeps_the_model_and_drops_the_history(folder: Path) -> None:
    one = Agent(config(folder))
    predictions(one, 0, 10)
    one.close()
    two = Agent(config(folder, adapter="btfl"))
    status = two.status()
    assert (status.adapter, status.samples) == ("btfl", 0)
    assert "the adapter was fedthe: what that had learned from the stream is dropped" in status.notes
    predictions(two, 0, 10)
    two.close()
    three = Agent(config(folder, adapter="btfl"))
    assert (three.status().samples, three.status().notes) == (10, [])
    three.close()
    four = Agent(config(folder, base="personalised"))  # another network: it must come from training
    assert four.status().version == ""
    assert "its base is global" in four.status().notes[-1]
    four.close()


def test_an_adapter_that_fails_is_rolled_back(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents(adapter="t3a")
    predictions(agent, 0, 20)
    with monkeypatch.context() as patched:
        patched.setattr(agent._live.adapter, "_predict", lambda x: x.new_full((len(x), 10), float("nan")))
        answer = agent.predict(sample_images(20, 10))
    assert not answer.adapted
    assert np.isfinite(answer.probabilities).all()
    assert agent.status().guard_events["non-finite"] == 1
    assert "guard: non-finite after 20 samples: roll back" in agent.status().notes
    assert agent.predict(sample_images(30, 10)).adapted


def predict_for_ever(pipe: Connection, folder: Path) -> None:
    """Predict ten samples at a time and save after every answer; say how many are saved, and all predictions."""
    agent = Agent(config(folder, snapshots_kept=2))
    while True:
        rows = agent.predict(sample_images(agent.status().samples, 10)).probabilities
        pipe.send((agent.snapshot().samples, rows))


def test_kill_at_any_moment_loses_only_what_was_not_saved(folder: Path) -> None:
    shutil.copytree(folder / "state", folder / "copy" / "state")
    undisturbed = Agent(config(folder / "copy"))
    expected = predictions(undisturbed, 0, 400)
    undisturbed.close()
    draw = random.Random(2)
    for _ in range(5):
        process, pipe = fork(predict_for_ever, folder)
        samples, rows = said(pipe, draw.randrange(1, 6))
        np.testing.assert_array_equal(rows, expected[samples - 10 : samples])
        time.sleep(draw.random() / 50)
        samples = (killed(process, pipe) or (samples, rows))[0]
        agent = Agent(config(folder))
        assert agent.status().samples - samples in (0, 10)
        assert not [note for note in agent.status().notes if "refused" in note]
        agent._closed = True
        agent._store.close()


@pytest.mark.parametrize("adapter", ["fedthe", "btfl", "t3a"])
def test_a_large_request_is_predicted_in_parts_as_small_ones_are(folder: Path, adapter: str) -> None:
    agent = Agent(config(folder, adapter=adapter, batch_limit=16))
    whole = agent.predict(sample_images(0, 40))
    agent.reset()
    parts = np.concatenate(
        [agent.predict(sample_images(*part)).probabilities for part in ((0, 14), (14, 13), (27, 13))]
    )
    np.testing.assert_array_equal(whole.probabilities, parts)
    assert whole.position == 0
    assert agent.status().samples == 40
    assert agent.predict(sample_images(0, 1)).position == 40
    agent.close()


@pytest.mark.parametrize("adapter", ["fedthe", "tent", "cotta"])
def test_a_large_request_that_fails_half_way_changes_nothing(folder: Path, adapter: str) -> None:
    agent = Agent(config(folder, adapter=adapter, batch_limit=16))
    predictions(agent, 0, 20)
    before = agent._live.state()
    real, calls = agent._live._unadapted, []

    def fails(x: Any) -> Any:
        calls.append(len(x))
        if len(calls) == 3:
            raise ValueError("the network's output is not finite")
        return real(x)

    agent._live._unadapted = fails
    with pytest.raises(ValueError, match="not finite"):
        agent.predict(sample_images(20, 40))
    assert calls == [14, 13, 13]
    agent._live._unadapted = real
    after = agent._live.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert agent.status().samples == 20
    agent.close()
