"""Models of a device: offered, refused, tried, approved, kept and restored; and what a killed process leaves."""

from __future__ import annotations

import errno
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedtta.client.agent import lifecycle
from fedtta.client.agent.candidate import Samples, check
from fedtta.client.agent.core import Agent
from fedtta.client.agent.lifecycle import REJECTED, ROLLED_BACK
from fedtta.client.agent.server import serve
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.replies import Evaluated
from fedtta.messages.requests import Evaluate
from tests.client.agent import fake
from tests.client.agent.world import config, evaluation, fork, killed, said, sample_images, served, train


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluate]:
    """A folder whose agent has a model, and the evaluation that brought it."""
    folder = tmp_path_factory.mktemp("trained")
    agent = Agent(config(folder))
    request, reply = train(agent.perform)
    assert reply.served == f"promoted {agent.status().version}"
    agent.close()
    return folder, request


@pytest.fixture
def folder(start: tuple[Path, Evaluate], tmp_path: Path) -> Path:
    shutil.copytree(start[0] / "state", tmp_path / "state")
    return tmp_path


@pytest.fixture
def agents(folder: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(**changes: Any) -> Agent:
        made.append(Agent(config(folder, **changes)))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def moved(request: Evaluate, factor: float = 1.01) -> Evaluate:
    """The evaluation of a model that predicts nearly the same."""
    arrays = {name: value * np.float32(factor) for name, value in request.arrays.items()}
    return evaluation(arrays, request.statistics)


def one_class(request: Evaluate) -> Evaluate:
    bias = request.arrays["head.bias"] + np.float32(1000) * (np.arange(10) == 3)
    return evaluation({**request.arrays, "head.bias": bias.astype(np.float32)}, request.statistics)


def offer(agent: Agent, request: Evaluate) -> str:
    reply = agent.perform(request)
    assert isinstance(reply, Evaluated)
    return reply.served


def predicted(agent: Agent, start: int, stop: int) -> np.ndarray:
    return np.concatenate([agent.predict(sample_images(i, 10)).probabilities for i in range(start, stop, 10)])


def states(agent: Agent) -> list[str]:
    return [model.state for model, _ in agent.models()]


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "state" / "agent.log").read_text().splitlines()]


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def kill(agent: Agent) -> None:
    """Leave the state directory as a killed process does."""
    agent._closed = True
    agent._due.set()
    agent._saver.join()
    agent._store.close()


def test_many_small_losses_of_accuracy_are_one_large_one(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent, request = agents(accept_margin=0.1), start[1]

    def worse(part: float) -> Evaluate:
        """Each class is taken for its neighbour, to a part."""
        head = {name: value for name, value in request.arrays.items() if name.startswith("head.")}
        mixed = {n: ((1 - part) * v + part * np.roll(v, 1, 0)).astype(np.float32) for n, v in head.items()}
        return evaluation({**request.arrays, **mixed}, request.statistics)

    told = [offer(agent, worse(0.04))]
    first = agent.models()[-1][0].check["served_accuracy"]
    told += [offer(agent, worse(0.04 * step)) for step in range(2, 16)]
    refused = [one for one in told if one.startswith("refused: ")]
    assert len([one for one in told if one.startswith("promoted")]) > 1
    assert any(one.endswith(" were lost before") for one in refused)
    (served,) = [model for model, _ in agent.models() if model.state == "served"]
    assert 0 < served.check["lost"] <= 0.1
    assert served.check["accuracy"] >= first - 0.1 - 1e-9
    assert agent.status().version == served.version
    agent.restore_model()  # the owner's decision
    assert [model.check["lost"] for model, _ in agent.models() if model.state == "served"] == [0.0]


def test_a_model_of_one_class_is_not_served_and_the_device_says_why(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    agent, request = agents(), start[1]
    before = agent.status().version
    told = offer(agent, one_class(request))
    assert told.startswith("refused: it predicts '3' for 100% of ")
    status = agent.status()
    assert status.version == before
    assert status.refused.endswith(told.removeprefix("refused: "))
    assert status.refused.startswith("run1/cross_entropy/2/")
    assert agent.predict(sample_images(0, 5)).version == before
    model, snapshots = agent.models()[-1]
    assert (model.state, model.check["one_class"], snapshots) == ("refused", 1.0, [])
    assert len(list((folder / "state" / "models").iterdir())) == 1  # its files are not kept
    lines = [json.loads(line) for line in (folder / "state" / "agent.log").read_text().splitlines()]
    refusal = next(line for line in lines if line["event"] == "refused")
    assert (refusal["version"], refusal["check"]["one_class"]) == (model.version, 1.0)
    request_line = next(line for line in lines[lines.index(refusal) :] if line["event"] == "request")
    assert (request_line["kind"], request_line["run"], request_line["round"]) == ("evaluate", "run1", 2)


def test_a_shadow_predicts_beside_the_served_model_which_answers(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    shutil.copytree(folder / "state", folder / "copy" / "state")
    undisturbed = Agent(config(folder / "copy"))
    expected = predicted(undisturbed, 0, 30)
    undisturbed.close()
    agent = agents(shadow_samples=30)
    before, told = agent.status().version, offer(agent, moved(start[1]))
    version = told.removeprefix("shadow ")
    assert told.startswith("shadow run1/")
    assert agent.status().candidate == told
    np.testing.assert_array_equal(predicted(agent, 0, 20), expected[:20])
    assert agent.status().version == before
    assert offer(agent, moved(start[1])) == told  # the same once more: the trial goes on
    np.testing.assert_array_equal(agent.predict(sample_images(20, 10)).probabilities, expected[20:])
    until(lambda: agent.status().version == version)
    assert agent.status().candidate == ""
    assert states(agent) == ["kept", "served"]
    assert agent.models()[-1][0].check["shadow_agreement"] > 0.5
    assert agent.predict(sample_images(30, 1)).position == 30  # it has adapted to the trial's samples
    said = events(folder)
    order = [said.index(event) for event in ("offered", "accepted", "shadow begun", "shadow ended")]
    assert order == sorted(order)
    assert "promoted" in said[order[-1] :]


def test_a_shadow_that_fails_fails_no_request(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(shadow_samples=30)
    before = agent.status().version
    offer(agent, moved(start[1]))

    def broken(pixels: Any) -> Any:
        raise RuntimeError("out of memory")

    agent._models._shadow.live.predict = broken
    assert agent.predict(sample_images(0, 10)).version == before
    until(lambda: agent.status().candidate == "")
    assert states(agent) == ["served", "refused"]
    assert agent.status().refused.endswith("failed in shadow: out of memory")


def test_what_the_guard_of_a_shadow_does_is_not_said_of_the_served_model(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    agent = agents(shadow_samples=30, adapter="fedthe")
    version = offer(agent, moved(start[1])).removeprefix("shadow ")

    def fails(*_: Any) -> Any:
        raise ValueError("it diverged")

    agent._models._shadow.live.adapter.interpolate = fails
    assert agent.predict(sample_images(0, 10)).adapted
    acted = "guard: non-finite after 0 samples: roll back"
    failed, did = (f"model {version} in shadow: {text}" for text in ("adapter failed: it diverged", acted))
    assert agent.status().notes[-2:] == [failed, did]
    told = [json.loads(line) for line in (folder / "state" / "agent.log").read_text().splitlines()]
    assert [one["version"] for one in told if one["event"] == "guard" and one["what"] == acted] == [version]
    assert agent.status().guard_events["non-finite"] == 0


def test_the_operator_approves(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(approval=True)
    before, told = agent.status().version, offer(agent, moved(start[1]))
    version = told.removeprefix("waiting for approval ")
    assert agent.status().candidate == told
    assert agent.predict(sample_images(0, 10)).version == before
    with pytest.raises(ValueError, match=f"no model x waits to be served; there is {version}"):
        agent.approve("x")
    changed = agent.approve(version.rpartition("/")[2])
    assert (changed.version, changed.state) == (version, "served")
    assert agent.predict(sample_images(0, 10)).version == version
    with pytest.raises(ValueError, match="no model waits to be served"):
        agent.approve()


def test_approval_after_a_shadow_and_during_it(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(approval=True, shadow_samples=10)
    assert offer(agent, moved(start[1])).startswith("shadow")
    predicted(agent, 0, 10)
    until(lambda: agent.status().candidate.startswith("waiting for approval"))
    agent.approve()
    told = offer(agent, moved(start[1], 1.02))
    assert agent.approve().version == told.removeprefix("shadow ")
    assert agent.status().version == told.removeprefix("shadow ")


def test_a_rejected_model_stays_rejected(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(approval=True)
    before = agent.status().version
    offer(agent, moved(start[1]))
    assert agent.reject().state == "refused"
    assert agent.status().candidate == ""
    assert offer(agent, moved(start[1])) == f"refused: {REJECTED}"
    assert states(agent) == ["served", "refused"]
    assert agent.status().version == before
    agent.close()
    other = agents(approval=True, adapter="fedthe[beta=0.3]")  # with other options it is another version
    assert offer(other, moved(start[1])).startswith("waiting for approval ")


def test_a_newer_candidate_takes_the_place_of_the_older(start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(approval=True)
    offer(agent, moved(start[1]))
    told = offer(agent, moved(start[1], 1.02))
    assert agent.status().candidate == told
    assert states(agent) == ["served", "candidate"]


def test_a_model_served_before_that_is_offered_again_and_not_served_is_still_there(
    start: tuple[Path, Evaluate], agents: Any
) -> None:
    """As the one to go back to, with what its adapter had learned."""
    agent = agents()
    predicted(agent, 0, 10)
    agent.snapshot()
    offer(agent, moved(start[1]))
    agent.close()
    agent = agents(approval=True)
    assert offer(agent, start[1]).startswith("waiting for approval ")
    assert states(agent) == ["served", "candidate"]
    offer(agent, moved(start[1], 1.02))
    assert sorted(states(agent)) == ["candidate", "kept", "served"]
    assert agent.restore_model().samples == 10


def test_a_restored_model_goes_on_where_its_adapter_was(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    shutil.copytree(folder / "state", folder / "copy" / "state")
    undisturbed = Agent(config(folder / "copy"))
    expected = predicted(undisturbed, 0, 40)
    undisturbed.close()
    agent = agents()
    first = agent.status().version
    np.testing.assert_array_equal(predicted(agent, 0, 20), expected[:20])
    with pytest.raises(ValueError, match="no older model that was served before; there are: none"):
        agent.restore_model()
    second = offer(agent, moved(start[1])).removeprefix("promoted ")
    predicted(agent, 0, 30)
    changed = agent.restore_model()
    assert (changed.version, changed.samples) == (first, 20)
    np.testing.assert_array_equal(predicted(agent, 20, 40), expected[20:])
    assert agent.models()[-1][0].reason == ROLLED_BACK
    assert offer(agent, moved(start[1])) == f"refused: {ROLLED_BACK}"  # a run does not undo it
    with pytest.raises(ValueError, match="no older model that was served before"):
        agent.restore_model()  # not back to the one that has just been withdrawn
    forth = agent.restore_model(second)  # unless it is named
    assert (forth.version, forth.samples) == (second, 30)
    assert "rolled back" in events(folder)


def test_a_clock_that_is_set_back_changes_no_order_of_models(
    start: tuple[Path, Evaluate], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents()
    offer(agent, moved(start[1], 1.01))
    monkeypatch.setattr(time, "time", lambda: 86400.0)  # a device whose battery is empty
    second, third = (offer(agent, moved(start[1], factor)).removeprefix("promoted ") for factor in (1.02, 1.03))
    assert agent.restore_model().version == second  # not the one that was served before by the clock
    agent.restore_model(third)
    offer(agent, moved(start[1], 1.04))
    assert third in [model.version for model, _ in agent.models()]  # nor is the wrong one removed


def test_a_model_whose_images_are_prepared_otherwise_waits_for_approval(agents: Any) -> None:
    """Its samples are prepared for it: the served model would be judged on images that it never gets."""
    agent, model = agents(), served("fedthe")
    prepared = replace(model.preprocessing, resize="crop", crop_fraction=0.1)
    other = replace(model, spec={**model.spec, "preprocessing": prepared.to_dict()})
    before = agent.status().version
    assert agent._models.offer(other, Samples(sample_images())).startswith("waiting for approval ")
    assert agent.status().version == before


@pytest.mark.parametrize("alike", [True, False])
def test_after_a_rollback_a_trial_begins_again_and_a_candidate_unlike_the_restored_model_waits(
    agents: Any, alike: bool
) -> None:
    agent, model, samples = agents(shadow_samples=30), served("fedthe"), Samples(sample_images())
    first, names = agent.status().version, model.classes if alike else tuple("abcdefghij")
    agent._models.offer(replace(model, classes=names, origin="r/t/1"), samples)
    agent.approve()
    version = agent._models.offer(replace(model, classes=names, origin="r/t/2"), samples).removeprefix("shadow ")
    predicted(agent, 0, 20)
    agent.restore_model()
    predicted(agent, 20, 40)
    agent._models.conclude()
    assert agent.status().version == first
    assert agent.status().candidate == f"{'shadow' if alike else 'waiting for approval'} {version}"
    predicted(agent, 40, 60)
    agent._models.conclude()
    assert agent.status().version == (version if alike else first)


def test_a_model_is_compared_with_the_one_that_it_replaces(
    start: tuple[Path, Evaluate], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the operator rolls back during its check, not with the model that was withdrawn."""
    agent = agents()
    offer(agent, moved(start[1]))
    first, withdrawn = (model.digest for model, _ in agent.models())
    compared: list[str] = []

    def checked(candidate: Any, before: Any, *rest: Any) -> Any:
        compared.append(before.digest())
        result = check(candidate, before, *rest)
        if len(compared) == 1:
            agent.restore_model()
        return result

    monkeypatch.setattr(lifecycle, "check", checked)
    assert offer(agent, moved(start[1], 1.02)).startswith("promoted ")
    assert compared == [withdrawn, first]


def test_an_estimate_that_another_adapter_was_calibrated_for_is_dropped(agents: Any) -> None:
    before = agents(adapter="fedthe")
    predicted(before, 0, 100)
    assert before.status().estimated_accuracy
    before.close()
    after = agents(adapter="t3a")
    predicted(after, 0, 100)
    assert after.status().estimated_accuracy == ()
    assert after.telemetry().estimated_accuracy is not None  # that of the network
    after.snapshot()
    (model, _), *_ = after.models()
    assert after.status().estimated_accuracy == ()
    assert {"accuracy", "confidence"} <= model.check.keys()
    assert not [name for name in model.check if name.startswith("adapted_")]
    after.close()
    again = agents(adapter="t3a")
    predicted(again, 0, 100)
    assert again.status().estimated_accuracy == ()


def test_the_last_models_are_kept(folder: Path, start: tuple[Path, Evaluate], agents: Any) -> None:
    agent = agents(models_kept=2)
    versions = [agent.status().version]
    for factor in (1.01, 1.02, 1.03):
        predicted(agent, 0, 10)
        versions.append(offer(agent, moved(start[1], factor)).removeprefix("promoted "))
    assert [model.version for model, _ in agent.models()] == versions[-2:]
    assert all(snapshots for _, snapshots in agent.models())
    assert len(list((folder / "state" / "models").iterdir())) == 2
    with pytest.raises(ValueError, match="no older model"):
        agent.restore_model(versions[0])
    assert agent.restore_model().version == versions[-2]


def test_after_its_manifest_is_lost_a_rollback_takes_the_model_before(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    one = agents(models_kept=3)
    versions = [offer(one, moved(start[1], factor)).removeprefix("promoted ") for factor in (1.01, 1.02)]
    one.close()
    (folder / "state" / "manifest.json").unlink()
    two = agents(models_kept=3)
    assert [model.state for model, _ in two.models()] == ["kept", "kept", "served"]
    assert two.status().version == versions[-1]
    assert two.restore_model().version == versions[-2]


@pytest.mark.parametrize("approval", [True, False])
def test_a_candidate_outlives_the_process(start: tuple[Path, Evaluate], agents: Any, approval: bool) -> None:
    one = agents(approval=approval, shadow_samples=0 if approval else 20)
    before, told = one.status().version, offer(one, moved(start[1]))
    predicted(one, 0, 10)
    kill(one)
    two = agents(approval=approval, shadow_samples=0 if approval else 20)
    assert (two.status().version, two.status().candidate) == (before, told)
    if approval:
        two.approve()
    else:
        predicted(two, 0, 20)  # the trial begins again
    until(lambda: two.status().version == told.rpartition(" ")[2])


def test_without_approval_any_more_a_candidate_is_promoted_at_the_start(
    start: tuple[Path, Evaluate], agents: Any
) -> None:
    one = agents(approval=True)
    version = offer(one, moved(start[1])).rpartition(" ")[2]
    one.close()
    assert agents().status().version == version


@pytest.mark.parametrize("readable", [True, False])  # the served model
def test_a_candidate_waits_for_approval_after_its_manifest_is_lost(
    start: tuple[Path, Evaluate], folder: Path, agents: Any, readable: bool
) -> None:
    one = agents(approval=True)
    before, told = one.status().version, offer(one, moved(start[1]))
    one.close()
    (folder / "state" / "manifest.json").unlink()
    if not readable:
        (folder / "state" / "models" / "1" / "network.safetensors").write_bytes(b"")
    two = agents(approval=True)
    assert (two.status().version, two.status().candidate) == (before if readable else "", told)
    two.approve()
    assert two.status().version == told.rpartition(" ")[2]


def test_a_folder_of_the_format_with_one_model_is_read(folder: Path, agents: Any) -> None:
    one = agents()
    predicted(one, 0, 20)
    one.close()
    path = folder / "state" / "manifest.json"
    new = json.loads(path.read_text())
    (model,) = new["models"]
    old = {"schema": 1, "model": model["name"], "digest": model["digest"], "snapshots": new["snapshots"]}
    path.write_text(json.dumps(old))
    two = agents()
    assert [(one.version, one.state) for one, _ in two.models()] == [(two.status().version, "served")]
    assert two.status().version.startswith("run1/cross_entropy/2/")
    assert two.status().samples == 20
    assert two.status().notes == []
    two.snapshot()
    assert json.loads(path.read_text())["schema"] == 2


def test_where_the_served_model_is_damaged_the_one_before_is_served(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    one = agents()
    first = one.status().version
    second = offer(one, moved(start[1])).removeprefix("promoted ")
    one.close()
    newest = max((folder / "state" / "models").iterdir(), key=lambda path: int(path.name))
    (newest / "network.safetensors").write_bytes(b"half")
    two = agents()
    assert two.status().version == first
    assert f"model {second} cannot be read: {first} is served" in two.status().notes
    with pytest.raises(ValueError, match="cannot be read"):
        two.restore_model(second)
    assert two.predict(sample_images(0, 5)).version == first


def test_where_a_full_disk_keeps_that_from_being_written_it_is_written_later(
    folder: Path, agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = agents()
    first, (model, _) = one.status().version, one.models()[0]
    new = replace(one._live.served, origin="run2/cross_entropy/5")
    second = one._models.offer(new, Samples.none(new.shape)).removeprefix("promoted ")
    one.close()
    (folder / "state" / "models" / "2" / "network.safetensors").write_bytes(b"half")

    def full(path: Path, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("fedtta.client.agent.store.write_atomically", full)
        two = agents()
    assert two.status().version == first
    two.rollback()
    assert f"rolled back to snapshot {two._store.snapshots(model.digest)[-1]}" in two.status().notes
    predicted(two, 0, 20)
    two.snapshot()
    assert [(one.version, one.state, one.reason, one.time, one.check) for one, _ in two.models()] == [
        (second, "kept", "its files cannot be read", two.models()[0][0].time, two.models()[0][0].check),
        (first, "served", "", model.time, model.check),
    ]
    two.close()
    three = agents()
    assert (three.status().version, three.status().samples, three.status().notes) == (first, 20, [])


def test_a_served_model_that_cannot_be_read_is_taken_when_it_is_offered_again(
    folder: Path, start: tuple[Path, Evaluate], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = agents()
    first, second = one.status().version, offer(one, moved(start[1])).removeprefix("promoted ")
    one.close()
    newest = max((folder / "state" / "models").iterdir(), key=lambda path: int(path.name))
    (newest / "network.safetensors").write_bytes(b"half")

    def full(path: Path, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("fedtta.client.agent.store.write_atomically", full)
        two = agents()
        assert two.status().version == first
        assert offer(two, moved(start[1])).startswith("refused: cannot be stored: [Errno 28]")
    assert offer(two, moved(start[1])) == f"promoted {second}"
    assert two.status().version == second


def test_a_candidate_that_cannot_be_read_is_taken_when_it_is_offered_again(
    folder: Path, start: tuple[Path, Evaluate], agents: Any
) -> None:
    agent = agents(approval=True)
    told = offer(agent, moved(start[1]))
    newest = max((folder / "state" / "models").iterdir(), key=lambda path: int(path.name))
    (newest / "network.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read"):
        agent.approve()
    assert offer(agent, moved(start[1])) == told
    assert agent.approve().version == told.rpartition(" ")[2]


def test_a_full_disk_refuses_a_model_and_the_served_one_goes_on(
    start: tuple[Path, Evaluate], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents()
    before = agent.status().version

    def full(path: Path, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("fedtta.client.agent.store.write_atomically", full)
        assert offer(agent, moved(start[1])).startswith("refused: cannot be stored: [Errno 28]")
        assert agent.predict(sample_images(0, 10)).version == before
    assert offer(agent, moved(start[1])).startswith("promoted")


def test_no_request_fails_while_models_change(start: tuple[Path, Evaluate], folder: Path) -> None:
    with fake.folder() as short:
        agent = Agent(config(folder, approval=True, listen=f"unix:{short}/a", relay=f"unix:{short}/r", guard=False))
        sockets = serve(agent, agent.config)
        ended, failed, answers = threading.Event(), [], []

        def ask() -> None:
            with fake.channel(sockets.listen) as line:
                stub = fake.predictor(line)
                while not ended.is_set():
                    images = protobuf.to_images(sample_images(0, 2))
                    try:
                        reply = stub.Predict(pb.PredictRequest(images=images), timeout=fake.TIMEOUT)
                        answers.append(reply.model_version)
                    except grpc.RpcError as error:
                        failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with fake.channel(sockets.listen) as line:
                stub = fake.predictor(line)
                seen = set()
                for step in range(4):
                    offer(agent, moved(start[1], 1.01 + step / 100))
                    seen.add(stub.Approve(pb.ModelRequest(), timeout=fake.TIMEOUT).version)
                    count = len(answers)
                    until(lambda count=count: len(answers) > count + 3)
                    seen.add(stub.RestoreModel(pb.ModelRequest(), timeout=fake.TIMEOUT).version)
                    count = len(answers)
                    until(lambda count=count: len(answers) > count + 3)
                listed = stub.Models(pb.ModelsRequest(), timeout=fake.TIMEOUT).models
        finally:
            ended.set()
            for thread in threads:
                thread.join(fake.TIMEOUT)
            sockets.stop(fake.TIMEOUT)
            agent.close()
    assert failed == []
    assert seen <= set(answers)
    assert len(seen) == 5
    assert [model.state for model in listed].count("served") == 1
    assert {model.reason for model in listed if model.state == "kept"} == {ROLLED_BACK}


def change_for_ever(pipe: Connection, folder: Path, request: Evaluate, turn: int) -> None:
    """Offer a model, try it in shadow until it is promoted, and go back; say what is served."""
    agent = Agent(config(folder, shadow_samples=10, models_kept=2))
    step = 0
    while True:
        step += 1
        told = offer(agent, moved(request, 1.01 + turn / 100 + step / 10000))
        assert told.startswith("shadow"), told
        pipe.send((agent.status().version, told.rpartition(" ")[2]))
        agent.predict(sample_images(0, 10))
        while agent.status().candidate:
            time.sleep(0.001)
        pipe.send((agent.status().version, ""))
        if step % 2:
            agent.restore_model()


def test_kill_between_candidate_and_promotion_leaves_one_or_the_other(
    folder: Path, start: tuple[Path, Evaluate]
) -> None:
    agent = Agent(config(folder))
    agent.perform(start[1])  # what the copies of this process share is loaded here
    agent.close()
    draw = random.Random(3)
    for turn in range(6):
        process, pipe = fork(change_for_ever, folder, start[1], turn)
        said(pipe, draw.randrange(1, 4))
        time.sleep(draw.random() / 10)
        killed(process, pipe)
        agent = Agent(config(folder, shadow_samples=10, models_kept=2))
        assert not [note for note in agent.status().notes if "cannot be read" in note or "refused" in note]
        found = states(agent)
        assert found.count("served") == 1
        assert found.count("shadow") + found.count("candidate") <= 1
        served = next(model for model, _ in agent.models() if model.state == "served")
        assert agent.predict(sample_images(0, 10)).version == served.version
        until(lambda agent=agent: not agent.status().candidate)  # a trial begins again and ends
        kill(agent)


def test_a_trial_that_cannot_be_stored_as_ended_goes_on_later(
    folder: Path, start: tuple[Path, Evaluate], agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents(shadow_samples=10, save_every_samples=30)
    before, told = agent.status().version, offer(agent, moved(start[1]))

    def full(path: Path, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("fedtta.client.agent.store.write_atomically", full)
        predicted(agent, 0, 10)
        until(lambda: any("waits: [Errno 28]" in note for note in agent.status().notes))
        with pytest.raises(OSError, match="No space"):
            agent.approve()
        assert agent.predict(sample_images(0, 10)).version == before
        assert not agent._models.due  # tried again with the next save, not after each request
        assert agent.status().candidate == told
    predicted(agent, 0, 30)
    until(lambda: agent.status().version == told.removeprefix("shadow "))
    assert events(folder).count("shadow ended") == 1
