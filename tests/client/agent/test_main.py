"""`python -m fedtta.client.agent` as a process: it starts, says what is wrong with its config, stops on a signal."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from fedtta.client.agent import control
from fedtta.client.agent.__main__ import next_signal, run
from fedtta.client.relay import relay
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from tests.client.agent.fake import (
    TIMEOUT,
    TRAIN,
    FakeAgent,
    channel,
    config,
    folder,
    predictor,
    refused,
    request,
    running,
)
from tests.client.agent.test_encoded import encoded, model_file

ROOT = Path(__file__).parents[3]
START = 300.0  # seconds: torch's import on a busy machine


def command(path: Path) -> list[str]:
    return [sys.executable, "-m", "fedtta.client.agent", "--config", str(path / "device.toml")]


@contextmanager
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent without torch, whose state is in `path`; killed if the test does not stop it."""
    (path / "device.toml").write_text('name = "0"\nstate-dir = "state"\nruntime = "onnx"\n')
    with subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
        try:
            yield agent
        finally:
            agent.kill()


def stops(agent: subprocess.Popen[str], path: Path, number: signal.Signals) -> str:
    """Stop an agent with a signal; return what it has told."""
    agent.send_signal(number)
    _, told = agent.communicate(timeout=START)
    assert agent.returncode == 0, told
    assert f"stopping on {number.name}" in told
    assert not list(path.rglob("*.sock"))
    return told


def wait_for(path: Path) -> None:
    with channel(f"unix:{path}/state/agent.sock") as line:
        predictor(line).Status(pb.StatusRequest(), timeout=START, wait_for_ready=True)


@pytest.mark.slow
@pytest.mark.timeout(6 * START)
def test_it_starts_on_what_a_killed_one_has_left_and_stops_with_success() -> None:
    with folder() as path:
        with process(path) as agent:
            wait_for(path)
            second = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=START, check=False)
            assert second.returncode == 1
            assert re.search(rf"{path}/state.*\b{agent.pid}\b", second.stderr)
        assert (path / "state" / "agent.sock").exists()  # a killed process removes nothing
        with process(path) as agent:
            wait_for(path)
            with channel(f"unix:{path}/state/agent.sock") as line:
                refused(lambda: predictor(line).Predict(request(), timeout=START), grpc.StatusCode.FAILED_PRECONDITION)
            stops(agent, path, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(6 * START)
def test_an_interrupt_stops_it_with_success() -> None:
    with folder() as path, process(path) as agent:
        wait_for(path)
        stops(agent, path, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.timeout(6 * START)
def test_a_model_file_is_served_by_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with folder() as path:
        model_file(path / "m.safetensors")
        text = 'name = "a"\nstate-dir = "state"\ndevice = "cpu"\nadapter = "t3a"\nmodel = "m.safetensors"\n'
        (path / "device.toml").write_text(text + 'log-format = "json"\n')
        with subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
            try:
                wait_for(path)
                asked = pb.PredictRequest(images=protobuf.to_files([encoded("PNG")]))
                with channel(f"unix:{path}/state/agent.sock") as line:
                    reply = predictor(line).Predict(asked, timeout=START)
                assert reply.model_version.startswith("file/m/0/")
                assert control.main(["--socket", f"unix:{path}/state/agent.sock", "models"]) == 0
                assert f"served    {time.strftime('%Y-', time.gmtime())}" in capsys.readouterr().out
                told = stops(agent, path, signal.SIGTERM)
            finally:
                agent.kill()
        lines = [json.loads(line) for line in told.splitlines()]
        assert [line["message"] for line in lines if line["level"] == "info"][
            -1
        ] == "stopped; the adapter's state is saved"
        assert {line["device"] for line in lines} == {"a"}
        assert lines[-1]["version"] == reply.model_version
        events = [json.loads(line)["event"] for line in (path / "state" / "agent.log").read_text().splitlines()]
        assert [event for event in events if event in ("offered", "promoted", "start", "stop")] == [
            "offered", "promoted", "start", "stop",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(6 * START)
def test_a_config_that_cannot_be_used_is_told() -> None:
    with folder() as path:
        (path / "device.toml").write_text('name = "0"\nstate-dir = "s"\nadaptor = "x"\n')
        done = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=START, check=False)
        assert done.returncode == 2
        assert "device.toml: unknown key 'adaptor' (did you mean adapter?)" in done.stderr
        (path / "device.toml").write_text('name = "0"\nstate-dir = "s"\nruntime = "onnx"\n')
        (path / "s").mkdir()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path / "s" / "relay.sock"))
            other.listen()
            done = subprocess.run(command(path), cwd=ROOT, capture_output=True, text=True, timeout=START, check=False)
        assert done.returncode == 1
        assert "relay.sock: another process listens there" in done.stderr


def test_a_phase_that_does_not_end_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    begun, end = threading.Event(), threading.Event()

    def train(_: Any) -> Any:
        begun.set()
        end.wait(TIMEOUT)
        raise AssertionError("cut off")

    with folder() as path, ThreadPoolExecutor(2) as pool:
        keys = config(path, deadline=0.1)
        fake = FakeAgent(keys)
        fake.answer = train
        monkeypatch.setattr("fedtta.client.agent.core.Agent", lambda _: fake)
        main = pool.submit(run, keys, asked)
        reply = pool.submit(relay, TRAIN, {"agent": keys.relay_address}, TIMEOUT)
        assert begun.wait(TIMEOUT)
        asked.put(signal.SIGTERM)
        assert main.result(TIMEOUT) == 0
        assert (exits, fake.closed) == ([0], True)
        assert isinstance(reply.exception(TIMEOUT), ConnectionError | RuntimeError)
        end.set()


def test_the_example_program_streams_a_folder_and_needs_no_torch(tmp_path: Path) -> None:
    for name, value in (("b.png", 51), ("a.png", 204), ("c.jpg", 0)):
        Image.new("RGB", (9, 5), (value, value, value)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    run = "runpy.run_module('examples.stream_images', run_name='__main__')"
    code = f"import runpy, sys; {run}; print('torch' in sys.modules)"
    with running() as (fake, sockets):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), sockets.listen],
            cwd=ROOT, capture_output=True, text=True, timeout=START, check=False,
        )  # fmt: skip
    assert fake.seen == [204, 51, 0]  # in the order of the names; the fake takes the first pixel for a probability
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[:3] == [
        ["a.png", "a", "204.000", "e=204.00"], ["b.png", "a", "51.000", "e=51.00"], ["c.jpg", "b", "1.000", "e=0.00"],
    ], done.stderr  # fmt: skip
    assert lines[3:] == [["False"]]


@pytest.mark.timeout(30)
def test_a_signal_that_another_thread_gets_stops_it_too() -> None:
    """As the system may choose, also for a signal that arrives just before the wait: nothing interrupts it then."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = signal.signal(signal.SIGUSR1, lambda number, _: asked.put(number))
    waits = threading.Event()

    def send() -> None:
        waits.wait()
        time.sleep(0.2)  # until the main thread waits, too
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    try:
        thread = threading.Thread(target=send)
        thread.start()
        waits.set()
        assert next_signal(asked) == signal.SIGUSR1
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
