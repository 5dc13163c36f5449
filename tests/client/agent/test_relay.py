"""Federated work through a device's agent: the same bits as in the ClientApp's own process, which imports no torch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from client import relay
from client.agent import agent_pb2_grpc, wire
from client.agent.config import AgentConfig
from client.agent.core import Agent
from client.agent.server import Running, serve
from client.app import app
from client.work import Done, Work
from settings import SettingsError
from tests.client.agent.fake import TIMEOUT, channel, folder, predictor, request, running
from tests.flower import record
from tests.flower import request as message
from tests.server.test_run import SMALL, assert_same_results, nodes
from tests.server.test_run import events as events_of

ROOT = Path(__file__).parents[3]
WORK = Work("train", {"a": 1, "b": 1.0, "c": [1, 2]}, {"arrays": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}})


def test_work_reaches_the_agent_and_its_answer_comes_back() -> None:
    with running() as (agent, sockets):
        agent.do = lambda work: Done({"x": {"y": np.array(3)}}, {"loss": 0.1, "n": [1]}, {"classes": ["a"]})
        done = relay.perform(sockets.relay, WORK, TIMEOUT, 1, 3)
    (work,) = agent.work
    assert (work.phase, repr(work.config)) == (WORK.phase, repr(WORK.config))
    np.testing.assert_array_equal(work.records["arrays"]["w"], WORK.records["arrays"]["w"])
    assert done.records["x"]["y"].shape == ()
    assert (done.metrics, done.identity) == ({"loss": 0.1, "n": [1]}, {"classes": ["a"]})


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
def test_what_the_agent_says_is_what_is_raised(raised: Exception, kind: type[Exception], told: str) -> None:
    def fail(work: Work) -> Done:
        raise raised

    with running() as (agent, sockets):
        agent.do = fail
        with pytest.raises(kind, match=told):
            relay.perform(sockets.relay, WORK, TIMEOUT)


def test_an_answer_that_cannot_be_said_is_the_agents_error() -> None:
    with running() as (agent, sockets):
        agent.do = lambda work: Done({}, {"train-loss": float("inf")})
        with pytest.raises(ValueError, match="metrics: train-loss = inf: allowed are finite numbers"):
            relay.perform(sockets.relay, WORK, TIMEOUT)


def test_an_agent_that_is_not_there_or_takes_too_long_is_named() -> None:
    with folder() as path, pytest.raises(ConnectionError, match=r"no agent answers at unix:.*r\.sock within 0\.2 s"):
        relay.perform(f"unix:{path}/r.sock", WORK, TIMEOUT, ready=0.2)
    with running() as (agent, sockets):
        end = threading.Event()

        def slow(work: Work) -> Done:
            end.wait(TIMEOUT)
            return Done()

        agent.do = slow
        with pytest.raises(TimeoutError, match=r"has not finished phase train within 1 s"):
            relay.perform(sockets.relay, WORK, 1.0)
        end.set()


def test_work_is_not_relayed_to_other_machines() -> None:
    with pytest.raises(ValueError, match="address 'localhost:5000': allowed is unix:/path"):
        relay.perform("localhost:5000", WORK, TIMEOUT)


def test_one_phase_at_a_time_and_what_nobody_waits_for_is_not_begun() -> None:
    with running() as (agent, sockets):
        begun, end = threading.Semaphore(0), threading.Event()
        together: list[int] = []

        def count(work: Work) -> Done:
            together.append(1)
            begun.release()
            end.wait(TIMEOUT)
            assert len(together) == 1
            together.pop()
            return Done()

        agent.do = count
        with ThreadPoolExecutor(3) as pool, channel(sockets.relay) as line:
            first = pool.submit(relay.perform, sockets.relay, WORK, TIMEOUT)
            assert begun.acquire(timeout=TIMEOUT)
            withdrawn = agent_pb2_grpc.RelayStub(line).Perform.future(wire.work_to(WORK), timeout=0.3)
            assert withdrawn.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            time.sleep(1.0)  # the service hears of it a moment after we do
            others = [pool.submit(relay.perform, sockets.relay, WORK, TIMEOUT) for _ in range(2)]
            end.set()
            assert [one.result(TIMEOUT) for one in (first, *others)] == [Done()] * 3
        assert len(agent.work) == 3


def test_predictions_go_on_beside_work() -> None:
    with running() as (agent, sockets), channel(sockets.listen) as line, ThreadPoolExecutor(1) as pool:
        begun, end = threading.Event(), threading.Event()

        def train(work: Work) -> Done:
            begun.set()
            end.wait(TIMEOUT)
            return Done()

        agent.do = train
        work = pool.submit(relay.perform, sockets.relay, WORK, TIMEOUT)
        assert begun.wait(TIMEOUT)
        predictor(line).Predict(request(), timeout=TIMEOUT)
        assert not work.done()
        end.set()
        work.result(TIMEOUT)


def ask(node_config: dict[str, Any], kind: str = "train.rates") -> RecordDict:
    """Send a message through the ClientApp."""
    context = Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})
    content = RecordDict({"config": ConfigRecord({"server-round": 1}), "arrays": record(w=np.ones(2, np.float32))})
    return app(message(kind=kind, content=content), context).content


def test_the_app_hands_messages_on_and_counts_its_context_itself() -> None:
    with running() as (agent, sockets):
        for given in ({}, {"partition-id": 1, "num-partitions": 3}):
            content = ask({"agent": sockets.relay, **given})
            assert content.array_records["arrays"]["w"].numpy().tolist() == [1, 1]
            assert dict(content.metric_records["metrics"]) == {"num-examples": 1, "context-bytes": 0}
        assert "context-bytes" not in ask({"agent": sockets.relay}, "train").metric_records["metrics"]
    assert [work.phase for work in agent.work] == ["rates", "rates", "train"]
    assert agent.work[0].config == {"server-round": 1}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"partition-id": 2}, "the node config says partition-id = 2: the agent at this socket has 1"),
        ({"num-partitions": 5}, "the node config says num-partitions = 5: the agent at this socket has 3"),
        ({"role": "source", "state-dir": "x"}, "node config: role, state-dir beside agent"),
        ({"agent": ""}, "address '': allowed is unix:/path"),
    ],
)
def test_a_node_config_that_is_the_agents_to_say_is_refused(given: dict[str, Any], told: str) -> None:
    with running() as (agent, sockets), pytest.raises(ValueError, match=told):
        ask({"agent": sockets.relay, **given})
    assert agent.work == []


def test_an_unknown_phase_is_refused_by_name() -> None:
    with running() as (agent, sockets), pytest.raises(ValueError, match="phase = 'dance': allowed are identify, train"):
        relay.perform(sockets.relay, Work("dance", {}), TIMEOUT)
    assert agent.work == []


CODE = """
import sys
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
from client.app import app
context = Context(run_id=1, node_id=1, node_config={"agent": sys.argv[1]}, state=RecordDict(), run_config={})
arrays = ArrayRecord({"w": Array(np.ones(3, np.float32))})
content = RecordDict({"config": ConfigRecord({"server-round": 1}), "arrays": arrays})
message = Message(content, dst_node_id=1, message_type="train")
message.metadata.__dict__["_message_id"] = "1"
reply = app(message, context).content
print(reply.array_records["arrays"]["w"].numpy().tolist())
print([name for name in ("torch", "torchvision", "models", "data", "client.device") if name in sys.modules])
"""


def test_a_process_that_relays_never_imports_torch() -> None:
    with running() as (_, sockets):
        done = subprocess.run(
            [sys.executable, "-c", CODE, sockets.relay],
            capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        )  # fmt: skip
    assert done.stdout.splitlines() == ["[1.0, 1.0, 1.0]", "[]"], done.stderr


@pytest.fixture
def agents() -> Iterator[Callable[[int], list[tuple[Agent, Running]]]]:
    """Real agents on real sockets, as many as asked for."""
    with ExitStack() as stack:
        path = stack.enter_context(folder())

        def start(count: int) -> list[tuple[Agent, Running]]:
            made = []
            for i in range(count):
                keys: dict[str, Any] = {"partition-id": i, "num-partitions": count, "state-dir": str(path / str(i))}
                config = AgentConfig.from_mapping({**keys, "device": "cpu", "adapter": "btfl"})
                agent = Agent(config)
                stack.callback(agent.close)
                made.append((agent, serve(agent, config)))
                stack.callback(made[-1][1].stop, TIMEOUT)
            return made

        yield start


def test_a_federation_of_agents_gives_the_bits_of_one_without_and_then_answers(agents: Any, tmp_path: Path) -> None:
    from server.app import serve as serve_run

    settings = SMALL.replace(rounds=1, methods="fedavg,btfl", shifts="original")
    serve_run(nodes(settings), settings, tmp_path / "without")
    made = agents(settings.clients)
    addresses = [sockets.relay for _, sockets in made]
    for agent, sockets in made:
        assert agent.status().version == ""
        with channel(sockets.listen) as line, pytest.raises(grpc.RpcError, match="FAILED_PRECONDITION"):
            predictor(line).Predict(request(), timeout=TIMEOUT)
    serve_run(nodes(settings, own=lambda partition: {"agent": addresses[partition]}), settings, tmp_path / "with")
    assert_same_results(tmp_path / "without", tmp_path / "with")
    kinds = [event["event"] for event in events_of(tmp_path / "with")]
    assert not {"failed", "refused"} & set(kinds)
    for agent, sockets in made:
        assert agent.status().version
        with channel(sockets.listen) as line:
            asked = request(shape=(2, *agent.status().shape))
            replies = list(predictor(line).PredictStream(iter([asked, asked]), timeout=TIMEOUT))
        assert [(reply.samples, reply.classes, reply.error) for reply in replies] == [(2, 10, "")] * 2
        assert replies[0].model_version == agent.status().version
