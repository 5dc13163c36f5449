"""Federated requests through a device's agent, which the contract of transports leaves open; no torch on the way."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedtta.client.agent import federated
from fedtta.client.app import app
from fedtta.client.relay import RelayTransport, relay, socket_path
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.messages.flower import from_content, to_content
from fedtta.messages.replies import RefinedRates
from fedtta.messages.requests import RefineRates
from fedtta.messages.transport import Addressed
from fedtta.settings import SettingsError
from tests.client.agent.fake import TIMEOUT, TRAIN, channel, folder, predictor, request, running, trained

ROOT = Path(__file__).parents[3]


def ask(address: str, **node_config: Any) -> Any:
    return relay(TRAIN, {"agent": address, **node_config}, TIMEOUT)


def test_a_request_reaches_the_agent_and_its_reply_comes_back() -> None:
    with running() as (agent, sockets):
        reply = ask(sockets.relay, name="site-a")
    (received,) = agent.requests
    assert received.to_record().values == TRAIN.to_record().values
    np.testing.assert_array_equal(received.arrays["w"], TRAIN.arrays["w"])
    assert reply.to_record().values == trained(TRAIN).to_record().values
    np.testing.assert_array_equal(reply.arrays["w"], TRAIN.arrays["w"])


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        (ValueError("no such thing"), ValueError, "^no such thing$"),
        (SettingsError("clients = 3: no"), ValueError, "^clients = 3: no$"),
        (FloatingPointError("loss is inf"), FloatingPointError, "^loss is inf$"),
        (KeyError("run"), RuntimeError, "^KeyError: 'run'$"),
        (ValueError("é" * 9000), ValueError, "^é{500,}…$"),
    ],
)
def test_the_agents_reason_is_the_exceptions(raised: Exception, kind: type[Exception], told: str) -> None:
    def fail(request: Any) -> Any:
        raise raised

    with running() as (agent, sockets):
        agent.answer = fail
        with pytest.raises(kind, match=told):
            ask(sockets.relay)
        (answer,) = RelayTransport({1: sockets.relay}).exchange([Addressed(1, TRAIN)], TIMEOUT)
    assert (answer.kind, answer.reason) == ("failed", f"{kind.__name__}: {told.strip('^$')}") or "é" in answer.reason


def test_a_reply_that_is_not_one_is_refused() -> None:
    with running() as (agent, sockets):
        agent.answer = lambda request: RefinedRates(rates={}, loss=0.1, correct=1, seconds=0.0)
        (answer,) = RelayTransport({1: sockets.relay}).exchange([Addressed(1, TRAIN)], TIMEOUT)
        assert answer.kind == "refused"
        assert "correct" in answer.reason or "arrays" in answer.reason
        with pytest.raises(ValueError, match=r"correct|arrays"):
            ask(sockets.relay)


def test_an_agent_that_cannot_be_reached_or_takes_too_long_is_named() -> None:
    with folder() as path:
        address = f"unix:{path}/r.sock"
        with pytest.raises(ConnectionError, match=r"no agent answers at unix:.*r\.sock within 0\.2 s"):
            relay(TRAIN, {"agent": address}, TIMEOUT, ready=0.2)
        (answer,) = RelayTransport({1: address}, ready=0.2).exchange([Addressed(1, TRAIN)], TIMEOUT)
        assert (answer.kind, "no agent answers" in answer.reason) == ("failed", True)
        with socket.socket(socket.AF_UNIX) as stuck, socket.socket(socket.AF_UNIX) as first:
            stuck.bind(str(path / "r.sock"))
            stuck.listen(0)
            first.connect(str(path / "r.sock"))  # the only one that may wait
            with pytest.raises(ConnectionError, match="no agent answers"):
                relay(TRAIN, {"agent": address}, TIMEOUT, ready=0.2)
    with running() as (agent, sockets):
        end = threading.Event()

        def slow(request: Any) -> Any:
            end.wait(TIMEOUT)
            return trained(request)

        agent.answer = slow
        with pytest.raises(TimeoutError, match=r"has not answered train within 1 s"):
            relay(TRAIN, {"agent": sockets.relay}, 1.0)
        end.set()


def test_an_agent_that_starts_late_is_waited_for() -> None:
    with running() as (_, sockets):
        path = socket_path(sockets.relay)
        hidden = path.with_name("hidden")
        path.rename(hidden)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(ask, sockets.relay)
            time.sleep(0.3)
            hidden.rename(path)
            assert reply.result(TIMEOUT).num_examples == 3


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("localhost:5000", "allowed is unix:/path"),
        ("unix:agent.sock", "allowed is unix:/path"),
        ("/agent.sock", "allowed is unix:/path"),
        ("", "allowed is unix:/path"),
        ("unix:/" + "x" * 107, "108 bytes; the path of a socket has at most 107"),
        ("unix:/" + "ü" * 60, "121 bytes"),
    ],
)
def test_requests_are_relayed_to_unix_sockets_only(address: str, told: str) -> None:
    assert socket_path("unix:/run/a.sock") == Path("/run/a.sock")
    with pytest.raises(ValueError, match=told):
        ask(address)


def test_one_request_at_a_time_and_a_withdrawn_one_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, run = threading.Event(), federated.OneThread.run

    async def noted(self: federated.OneThread, *arguments: Any) -> Any:
        try:
            return await run(self, *arguments)
        except asyncio.CancelledError:
            heard.set()
            raise

    monkeypatch.setattr(federated.OneThread, "run", noted)
    with running() as (agent, sockets):
        begun, end = threading.Semaphore(0), threading.Event()
        together: list[int] = []

        def count(request: Any) -> Any:
            together.append(1)
            begun.release()
            end.wait(TIMEOUT)
            assert len(together) == 1
            together.pop()
            return trained(request)

        agent.answer = count
        with ThreadPoolExecutor(3) as pool, channel(sockets.relay) as line:
            first = pool.submit(ask, sockets.relay)
            assert begun.acquire(timeout=TIMEOUT)
            work = protobuf.to_work(TRAIN.to_record())
            withdrawn = agent_pb2_grpc.RelayStub(line).Perform.future(work, timeout=0.3)
            assert withdrawn.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert heard.wait(TIMEOUT)  # the service hears of it a moment after we do
            others = [pool.submit(ask, sockets.relay) for _ in range(2)]
            end.set()
            assert [one.result(TIMEOUT).num_examples for one in (first, *others)] == [3] * 3
        assert len(agent.requests) == 3


def test_predictions_go_on_beside_requests() -> None:
    with running() as (agent, sockets), channel(sockets.listen) as line, ThreadPoolExecutor(1) as pool:
        begun, end = threading.Event(), threading.Event()

        def train(request: Any) -> Any:
            begun.set()
            end.wait(TIMEOUT)
            return trained(request)

        agent.answer = train
        reply = pool.submit(ask, sockets.relay)
        assert begun.wait(TIMEOUT)
        predictor(line).Predict(request(), timeout=TIMEOUT)
        assert not reply.done()
        end.set()
        reply.result(TIMEOUT)


def through_app(node_config: dict[str, Any], asked: Any = TRAIN) -> Any:
    """The reply of the ClientApp to a request."""
    context = Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})
    record = asked.to_record()
    message = Message(to_content(record), dst_node_id=1, message_type=record.kind)
    message.metadata.__dict__["_message_id"] = "1"
    return asked.reply.from_record(from_content(asked.reply.kind, app(message, context).content))


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, attribute, 1)


@pytest.mark.usefixtures("identity")
def test_the_app_relays_and_counts_its_own_context() -> None:
    rates = RefineRates(settings="{}", run="r", round=1, variant="all", network="n", rates={"w": np.zeros(())})
    with running() as (agent, sockets):
        for given in ({}, {"name": "site-a"}):
            reply = through_app({"agent": sockets.relay, **given})
            np.testing.assert_array_equal(reply.arrays["w"], TRAIN.arrays["w"])
        agent.answer = lambda request: RefinedRates(
            rates=request.rates, loss=0.1, correct=1, seconds=0.0, context_bytes=99
        )
        assert through_app({"agent": sockets.relay}, rates).context_bytes == 0
    assert [one.kind for one in agent.requests] == ["train", "train", "train.rates"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "site-b"}, "the node config says name = 'site-b', the agent's own file 'site-a'"),
        ({"data": "folder:/d"}, "node config: data beside agent"),
        ({"role": "source", "state-dir": "x"}, "node config: role, state-dir beside agent"),
        ({"max-skipped": 0.5}, "node config: max-skipped beside agent"),
        ({"nmae": "site-a"}, "the node config has nmae; allowed are agent, name, partition-id, num-partitions"),
    ],
)
def test_a_node_config_that_contradicts_the_agents_file_is_refused(given: dict[str, Any], told: str) -> None:
    with running() as (agent, sockets), pytest.raises(ValueError, match=told):
        ask(sockets.relay, **given)
    assert agent.requests == []


def test_an_unknown_kind_of_request_is_refused_by_name() -> None:
    with running() as (agent, sockets), channel(sockets.relay) as line:
        with pytest.raises(grpc.RpcError, match=r"request 'dance': allowed are query.identify, train"):
            agent_pb2_grpc.RelayStub(line).Perform(pb.Work(phase="dance"), timeout=TIMEOUT)
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            agent_pb2_grpc.RelayStub(line).Perform(pb.Work(phase="train", config_json="{}"), timeout=TIMEOUT)
    assert agent.requests == []


CODE = """
import sys
import numpy as np
from flwr.app import Context, Message, RecordDict
from fedtta.messages.flower import allow_messages, from_content, to_content
from fedtta.messages.requests import Train, TrainingTask
allow_messages()
from fedtta.client.app import app
context = Context(run_id=1, node_id=1, node_config={"agent": sys.argv[1]}, state=RecordDict(), run_config={})
arrays = {"w": np.ones(3, np.float32)}
asked = Train(settings="{}", run="r", round=1, task=TrainingTask("ce"), arrays=arrays).to_record()
message = Message(to_content(asked), dst_node_id=1, message_type="train")
message.metadata.__dict__["_message_id"] = "1"
print(from_content("trained", app(message, context).content).arrays["arrays"]["w"].tolist())
heavy = ("torch", "torchvision", "fedtta.models", "fedtta.data", "fedtta.client.device")
print([name for name in heavy if name in sys.modules])
"""


def printed(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_a_process_that_relays_imports_no_torch_and_the_relay_no_flower() -> None:
    with running() as (_, sockets):
        assert printed(CODE, sockets.relay) == ["[1.0, 1.0, 1.0]", "[]"]
    heavy = ("torch", "flwr", "fedtta.models", "fedtta.data")
    imported = f"import sys, fedtta.client.relay; print([n for n in {heavy} if n in sys.modules])"
    assert printed(imported) == ["[]"]
