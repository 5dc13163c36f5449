"""An agent without a network, for tests of what lies around it, and ways to reach one."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from fedtta.client.agent.lifecycle import Changed
from fedtta.client.agent.manifest import Model
from fedtta.client.agent.observation import Observation
from fedtta.client.agent.predictions import NoModel, Prediction
from fedtta.client.agent.scans import Scan
from fedtta.client.agent.server import Running, serve
from fedtta.client.agent.status import Saved, Status
from fedtta.client.config import AgentConfig
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.messages.replies import Reply, Telemetry, Trained
from fedtta.messages.requests import Request, Train, TrainingTask
from fedtta.models.preprocessing import Preprocessing

CLASSES = 3
TRAIN = Train(
    settings="{}", run="r", round=1, task=TrainingTask("ce"), arrays={"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
)
TIMEOUT = 120.0  # seconds: far more than anything here takes, on a busy machine, too


def trained(request: Train) -> Trained:
    """Return the arrays of a request as if they had been trained."""
    return Trained(
        num_examples=3,
        arrays=dict(request.arrays),
        train_loss=0.1,
        validation_total=2,
        validation_correct=1,
        seconds=0.5,
    )


class FakeLog:
    """The events that have been written."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def fields(self) -> dict[str, str]:
        return {"device": "0", "version": ""}

    def write(self, event: str, **values: Any) -> None:
        self.events.append((event, values))


class FakeAudit:
    """The messages that were refused before the agent saw them."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []

    def failed(self, kind: str, error: BaseException, **values: Any) -> None:
        self.failures.append((kind, str(error)))


class FakeAgent:
    """Answers a sample with its first pixel: probabilities (p, 1 - p, 0), e = p. `seen` has the pixels in order."""

    per = "batch"  # one request a batch, so that a test knows how many have begun
    version, serving = "v", nullcontext()  # there is one model only

    def __init__(self, config: AgentConfig) -> None:
        self.config, self.log, self.audit = config, FakeLog(), FakeAudit()
        self.observation = Observation(config)
        self.seen: list[float] = []
        self.model = True
        self.gate = threading.Event()  # closed: a prediction that has begun does not end
        self.gate.set()
        self.begun = threading.Semaphore(0)  # released for each prediction that begins
        self.requests: list[Request] = []
        self.answer: Callable[[Any], Reply] = trained
        self.closed = False
        self.trouble = ""

    def check(self, pixels: NDArray[Any]) -> NDArray[Any]:
        if not self.model:
            raise NoModel("no model has come yet")
        if hasattr(pixels, "prepared"):  # encoded files
            pixels = pixels.prepared(Preprocessing(2, 1), 1.0)
        if pixels.shape[1:] != (1, 2, 2):
            raise ValueError(f"images of shape {list(pixels.shape)}: allowed are [B, 1, 2, 2]")
        if not np.isfinite(pixels).all():
            raise ValueError("images hold NaN")
        return pixels

    def predict(self, pixels: NDArray[Any]) -> Prediction:
        pixels = self.check(pixels)
        self.begun.release()
        assert self.gate.wait(TIMEOUT)
        first = pixels[:, 0, 0, 0].astype(np.float32)
        position = len(self.seen)
        self.seen += first.tolist()
        return Prediction(np.stack([first, 1 - first, 0 * first], 1), first, "run/ce/3/abcd", True, position)

    def status(self) -> Status:
        return Status(
            "run/ce/3/abcd", "fedthe", ("a", "b", "c"), len(self.seen), 2, True, {"one-class": 4}, ["1", "2"], ["n"],
            1.5, "train", (1, 2, 2), "shadow run/ce/4/bbbbbbbb", "run/ce/2/cccccccc: not finite", 61, 1, ["1 damaged"],
            (0.75, 0.5, 1.0), "btfl", "since sample 7 (the samples after drift)",
        )  # fmt: skip

    def telemetry(self) -> Telemetry:
        return self.observation.telemetry(self.status(), None, None, {}, bool(self.trouble))

    def snapshot(self) -> Saved:
        raise OSError(28, "No space left on device")

    def rollback(self, name: str = "") -> Saved:
        if name == "9":
            raise ValueError("no snapshot '9'; there are: 1, 2")
        return Saved(name or "2", "run/ce/3/abcd", 5)

    def reset(self) -> Saved:
        return Saved("3", "run/ce/3/abcd", 0)

    def models(self) -> list[tuple[Model, list[str]]]:
        old = Model(
            "1", "aa" * 32, "run/ce/3", "kept", 60.0, 60.0, "rolled back", {"accuracy": 0.5, "adapted_offset": 0.0}
        )
        return [(old, ["1", "2"]), (Model("2", "bb" * 32, "run/ce/4", "candidate", 120.0), [])]

    def approve(self, version: str = "") -> Changed:
        if version == "x":
            raise ValueError("no model x waits to be served")
        return Changed("run/ce/4/bbbbbbbb", "served", 7)

    def reject(self, version: str = "") -> Changed:
        return Changed(version or "run/ce/4/bbbbbbbb", "refused")

    def restore_model(self, version: str = "") -> Changed:
        return Changed(version or "run/ce/3/aaaaaaaa", "served", 9)

    def rescan(self) -> Scan:
        return Scan(61, 60, 1, ("'bad.png': damaged",))

    def perform(self, request: Request, deadline: Any = None) -> Reply:
        self.requests.append(request)
        return self.answer(request)

    def close(self) -> None:
        self.closed = True


@contextmanager
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="agent-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def config(path: Path, **keys: Any) -> AgentConfig:
    given = {"name": "site-a", "state_dir": str(path), **keys}
    return AgentConfig.from_mapping({name.replace("_", "-"): value for name, value in given.items()})


@contextmanager
def running(**keys: Any) -> Iterator[tuple[FakeAgent, Running]]:
    """A fake agent behind real sockets."""
    with folder() as path:
        agent = FakeAgent(config(path, **keys))
        server = serve(agent, agent.config)  # type: ignore[arg-type]
        try:
            yield agent, server
        finally:
            agent.gate.set()
            server.stop(TIMEOUT)


def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address)


def predictor(channel: grpc.Channel) -> agent_pb2_grpc.PredictorStub:
    return agent_pb2_grpc.PredictorStub(channel)


def request(value: float = 0.5, name: str = "", shape: tuple[int, ...] = (1, 1, 2, 2)) -> pb.PredictRequest:
    return pb.PredictRequest(id=name, images=protobuf.to_images(np.full(shape, value, np.float32)))


def first(reply: pb.PredictReply) -> float:
    """The first sample's first probability: its pixel."""
    return float(np.frombuffer(reply.probabilities, "<f4")[0])


def refused(call: Callable[[], Any], code: grpc.StatusCode) -> str:
    """The text of a refusal with this status."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value
    return caught.value.details()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)
