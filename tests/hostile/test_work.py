"""A hostile server that asks for time, memory and the served model; and what the audit log says of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedtta.client.agent import audit
from fedtta.client.agent.core import Agent
from fedtta.client.agent.work import coarse
from fedtta.client.policy import Policy, PolicyError
from fedtta.messages import protobuf
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Evaluated, EvaluationResult, Telemetry
from fedtta.messages.requests import (
    AdapterRow,
    Identify,
)
from fedtta.models import build
from fedtta.models.deadline import Deadline, Stopped
from fedtta.settings import to_json
from tests.client.agent import fake, world
from tests.hostile.device import (
    GRACE,
    OPEN,
    common,
    evaluation,
    last,
    training,
)

# Time


def endless(run: str = "run1") -> Any:
    return protobuf.to_work(training(run=run, local_epochs=10**9, batch_size=32).to_record())


def idle(agent: Agent) -> bool:
    return agent.status().training == ""


def waited(true: Callable[[], bool]) -> float:
    """Wait until it is true, and return the seconds for which this process has computed meanwhile."""
    start = time.process_time()
    fake.until(true)
    return time.process_time() - start


def test_work_ends_with_its_deadline_and_the_next_work_begins(socket: Any) -> None:
    agent, stub = socket
    with pytest.raises(grpc.RpcError) as caught:
        stub.Perform(endless(), timeout=1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert waited(lambda: idle(agent)) < GRACE
    stub.Perform(protobuf.to_work(Identify(**common()).to_record()), timeout=30)
    assert [line["result"] for line in audit.lines(agent.config.state_folder)] == ["ok", "Stopped", "ok"]


def test_work_ends_when_its_caller_disappears(socket: Any) -> None:
    agent, stub = socket
    call = stub.Perform.future(endless(), timeout=600)
    waited(lambda: agent.status().training == "train")
    call.cancel()
    assert waited(lambda: idle(agent)) < GRACE
    line = last(agent)
    assert (line["result"], line["reason"]) == ("Stopped", "stopped: its caller is gone")


def test_work_ends_after_the_seconds_of_the_owner(agents: Any) -> None:
    agent = agents(dataclasses.replace(OPEN, most_seconds=1.0))
    with pytest.raises(PolicyError, match=r"^policy most-seconds: stopped: not done within 1 s; allowed is 1$"):
        agent.perform(training(local_epochs=10**9, batch_size=32))
    assert not list((agent.config.state_folder / "private").rglob("*@*"))  # it leaves no trace


@pytest.mark.parametrize("row", [AdapterRow("r", "memo"), AdapterRow("r", "surgical", {"block": 0, "steps": 200})])
def test_an_evaluation_stops_too(agents: Any, row: AdapterRow) -> None:
    agent, deadline = agents(OPEN), Deadline(600)
    agent.perform(evaluation())
    request = evaluation(*[row] * 2000)
    threading.Timer(0.3, lambda: deadline.cancel("its caller is gone")).start()
    start = time.thread_time()
    with pytest.raises(Stopped, match="its caller is gone"):
        agent.perform(request, deadline)
    assert time.thread_time() - start < 0.3 + GRACE


# State and models


def test_throw_away_runs_do_not_remove_the_state_of_a_run(agents: Any) -> None:
    agent = agents(Policy(most_runs=5), runs_kept=2)
    agent.perform(training(run="honest"))
    for i in range(4):
        agent.perform(training(run=f"throw-away-{i}"))
    with pytest.raises(PolicyError, match=r"^policy most-runs: private state of 5 runs is kept; allowed is 5$"):
        agent.perform(training(run="throw-away-6"))
    assert agent.perform(Identify(**common("honest"))).saved == {"t": [1]}
    week = time.time() - 8 * 86400
    os.utime(agent.config.state_folder / "private" / "throw-away-1" / "0", (week, week))
    agent.perform(Identify(**common("honest")))
    agent.perform(training(run="throw-away-6"))  # the old one has made room


def test_state_beyond_its_size_is_refused(agents: Any) -> None:
    agent = agents(Policy(most_state_mb=1))
    agent.perform(training())
    (agent.config.state_folder / "private" / "run1" / "0" / "t@0.safetensors").write_bytes(bytes(2 << 20))
    with pytest.raises(PolicyError, match=r"^policy most-state-mb: 2 MiB; allowed is 1$"):
        agent.perform(training())


def untrained(image_size: int = 16, sharp: float = 50.0, seed: int = 9) -> Arrays:
    network = build("cnn", 10, image_size=image_size, norm="batch", seed=seed)
    arrays = {name: value.numpy().copy() for name, value in network.global_state().items()}
    return {**arrays, "head.weight": arrays["head.weight"] * np.float32(sharp)}  # as sure of itself as a trained one


def test_an_untrained_run_does_not_replace_a_good_model(agents: Any) -> None:
    agent = agents(adapter="none")
    trained, _ = world.train(agent.perform)
    before, shots = agent.status().version, agent.status().snapshots
    assert before.startswith("run1/")
    reply = agent.perform(world.evaluation(untrained(), None, run="hostile"))
    assert reply.served.startswith("refused: accuracy ")
    for i in range(4):  # nor do several, one after the other
        hostile = {**trained.arrays, "head.bias": trained.arrays["head.bias"] + np.float32(1e-3 * (i + 1))}
        agent.perform(world.evaluation({**untrained(seed=i), "head.bias": hostile["head.bias"]}, None, run=f"h{i}"))
    assert (agent.status().version, agent.status().snapshots) == (before, shots)


def test_a_model_that_cannot_be_compared_waits_for_the_operator(agents: Any) -> None:
    agent = agents(adapter="none")
    world.train(agent.perform)
    before = agent.status().version
    request = world.evaluation(untrained(24), None, run="hostile")
    larger = to_json(world.SETTINGS.replace(image_size=24))
    reply = agent.perform(dataclasses.replace(request, settings=larger))
    assert reply.served.startswith(("waiting for approval hostile/", "refused: "))
    assert agent.status().version == before
    agent.close()
    again = Agent(agent.config)
    assert again.status().version == before  # a restart promotes nothing
    again.close()


def test_no_new_model_is_served_where_the_owner_says_never(agents: Any) -> None:
    agent = agents(Policy(serve="never"), adapter="none")
    _, reply = world.train(agent.perform)
    assert reply.served == "refused: policy serve: no new model is served here"
    assert agent.status().version == ""


@pytest.mark.parametrize("name", ["class 3", "Crohn's disease", "3' or 3\"", '3" \\'])
def test_the_reason_of_a_refused_model_leaves_without_figures_and_class_names(name: str) -> None:
    reason = f"it predicts {name!r} for 98% of 61 samples, usual is 7%"
    told = coarse(Evaluated(checked=1, leaked=0, results=[], served=f"refused: {reason}"), Policy())
    assert told.served == "refused: it predicts … for … of … samples, usual is …"
    assert coarse(Telemetry(name="a", refused=f"run/ce/1/0a: {reason}"), Policy()).refused == (
        "run/ce/1/0a: it predicts … for … of … samples, usual is …"
    )
    assert coarse(Telemetry(name="a", refused=f"x: {reason}"), Policy(count_step=1)).refused == f"x: {reason}"
    promoted = Evaluated(checked=1, leaked=0, results=[], served="promoted run/ce/3/12ab")
    assert coarse(promoted, Policy()).served == "promoted run/ce/3/12ab"


def test_estimates_of_accuracy_stay_where_counts_are_rounded() -> None:
    """Of a network that is equally sure of everything an estimate is its exact accuracy."""
    one = EvaluationResult(
        label="a", shift="original", correct=13, total=40, seconds=0.5, estimates={"doc": [0.31, 0.2, 0.4]}
    )
    reply = Evaluated(checked=1, leaked=0, results=[one])
    assert coarse(reply, Policy(count_step=5)).results == [dataclasses.replace(one, correct=15, estimates={})]
    assert coarse(reply, Policy(count_step=1)).results == [one]


# The audit log


def test_of_an_update_the_log_has_what_left_and_counts_leave_rounded(agents: Any) -> None:
    agent = agents(dataclasses.replace(OPEN, count_step=7))
    reply = agent.perform(dataclasses.replace(training(), update_format="int8"))
    (done,) = audit.lines(agent.config.state_folder)
    values, *arrays = done["sent"]
    assert {"scales", "trained-correct", "decoded-correct"} <= set(values["name"].split(","))
    assert {one["name"]: (one["dtype"], one["bytes"], one["sha256"]) for one in arrays} == {
        f"arrays.{name}": (str(one.dtype), one.nbytes, hashlib.sha256(protobuf.to_bytes(one)).hexdigest())
        for name, one in reply.arrays.items()
    }
    assert {one["dtype"] for one in arrays} == {"int8", "float32"}
    for count in (reply.validation_correct, reply.trained_correct, reply.decoded_correct):
        assert count % 7 == 0 or count == reply.validation_total


def test_the_audit_log_has_what_left_and_no_values(agents: Any, capsys: pytest.CaptureFixture[str]) -> None:
    agent = agents()
    reply = agent.perform(training(run="one"))
    with pytest.raises(PolicyError):
        agent.perform(training(run="two", batch_size=1))
    done, refused = audit.lines(agent.config.state_folder)
    assert (done["phase"], done["run"], done["round"], done["training"], done["result"]) == (
        "train",
        "one",
        1,
        "t",
        "ok",
    )
    values, *arrays = done["sent"]
    assert "train-loss" in values["name"].split(",")
    assert {one["name"]: one["shape"] for one in arrays} == {
        f"arrays.{name}": list(value.shape) for name, value in reply.arrays.items()
    }
    assert all(len(one["sha256"]) == 64 for one in done["sent"])
    assert (refused["run"], refused["result"]) == ("two", "policy least-batch-size")
    folder = str(agent.config.state_folder)
    assert audit.main(["--state-dir", folder, "--run", "tw"]) == 0
    assert "policy least-batch-size" in (text := capsys.readouterr().out)
    assert "run one" not in text
    assert audit.main(["--state-dir", folder, "--json"]) == 0
    told = capsys.readouterr()
    assert [json.loads(line)["run"] for line in told.out.splitlines()] == ["one", "two"]
    assert told.err == ""
    assert audit.main(["--state-dir", folder, "--run", "three\x1b"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err.splitlines()) == (
        "", [f"{folder}: no message of a run three\\x1b...; without --run, lines show the runs that there are"]
    )  # fmt: skip
    assert audit.main(["--state-dir", f"{folder}/nowhere"]) == 2
    device = Path(folder, "device.toml")
    device.write_text('state-dir = "~no-user-of-this-name/state"\n')
    assert audit.main(["--config", str(device)]) == 2
    assert "state-dir = '~no-user-of-this-name/state'" in capsys.readouterr().err


def test_damaged_lines_of_the_audit_log_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = audit.Audit(tmp_path, limit=10**6)
    log.write("train", "ok", run="one")
    with (tmp_path / "audit.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": "2026-11-2\n[]\n')
        file.write('{"time": null, "phase": null, "result": "ok"}\n')
        file.write('{"time": "2026-11-23T12:00:00Z", "phase": "train", "result": "ok", "sent": 5}\n')
        file.write("[" * 100_000 + "]" * 100_000 + "\n")
    log.write("train", "ok", run="two")
    assert audit.main(["--state-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line.split("run ")[1].split()[0] for line in out.splitlines()] == ["one", "two"]
    named = [f"audit.jsonl, line {number}: damaged, cannot be read" for number in range(2, 7)]
    assert err.splitlines() == named


def test_what_the_audit_log_cannot_record_does_not_leave(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agents()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        agent.perform(Identify(**common()))
    monkeypatch.undo()
    assert agent.perform(Identify(**common())).name == "0"


def test_a_flood_of_refused_messages_displaces_nothing_that_left(tmp_path: Path) -> None:
    log = audit.Audit(tmp_path, limit=1000)
    log.write("train", "ok", run="r")
    for number in range(200):
        log.write("train", "policy phases", run=f"{number}", reason="x" * 80)
    found = list(audit.lines(tmp_path))
    assert [line["run"] for line in found] == ["r", *(str(number) for number in range(200 - len(found) + 1, 200))]
    assert len(found) > 20
    assert len(list(tmp_path.iterdir())) == 1 + audit.FILES
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())


def test_a_clock_that_is_set_back_refuses_no_messages_for_years(tmp_path: Path) -> None:
    now = [2e9]
    log = audit.Audit(tmp_path, limit=10**6, clock=lambda: now[0])
    log.write("evaluate", "ok")
    now[0] = 1e9
    assert log.count(audit.DAY) == 1  # it has just been
    log.write("evaluate", "ok")
    now[0] += audit.DAY + 1
    assert log.count(audit.DAY) == 0
    log.write("evaluate", "ok")
    assert audit.Audit(tmp_path, limit=10**6, clock=lambda: now[0]).count(audit.DAY) == 1


def test_a_message_that_cannot_be_read_is_in_the_audit_log(socket: Any) -> None:
    agent, stub = socket
    message = protobuf.to_work(Identify(**common()).to_record())
    message.config_json = "[" * 100_000
    with pytest.raises(grpc.RpcError):
        stub.Perform(message, timeout=30)
    message.phase = "train\x1b[2J" + "x" * 1000
    with pytest.raises(grpc.RpcError):
        stub.Perform(message, timeout=30)
    unknown, malformed = last(agent), list(audit.lines(agent.config.state_folder))[-2]
    assert (malformed["phase"], malformed["result"]) == ("identify", "ValueError")
    assert unknown["result"] == "ValueError"
    assert "\x1b" not in audit._printable(audit.text_of(unknown))
