"""An agent that has a model, and a program's connection to it, which outlives the agent."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from fedtta.benchmarks.speed.served import PARTITION, fabricate
from fedtta.client.agent.store import Store
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.simulation import deployment
from tests.faults.stage import PATIENCE

#: After a lost connection, look for the agent again soon.
OPTIONS = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100)]


class Device:
    """An agent process, its state in `folder`; `channel` is how a program reaches it (None: by its socket)."""

    def __init__(self, folder: Path, channel: grpc.Channel | None = None, **keys: Any) -> None:
        self.state, self._home = folder / f"agent-{PARTITION}", folder / "home"
        self._config = deployment.agent_config(folder, folder, str(PARTITION), {"device": "cpu", **keys})
        store = Store(self.state, 1, print)
        store.add(fabricate(), "served")
        store.close()
        self.channel = channel or grpc.insecure_channel(f"unix:{folder}/a{PARTITION}", OPTIONS)
        self.stub = agent_pb2_grpc.PredictorStub(self.channel)
        self.start()

    def start(self) -> None:
        self.process = deployment.start_agent(self._home, self._config)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> pb.StatusReply:
        """Start it again after a kill and return what it has come back with."""
        self.start()
        return self.status()

    def status(self) -> pb.StatusReply:
        return self.stub.Status(pb.StatusRequest(), timeout=PATIENCE, wait_for_ready=True)

    def predict(self, request: pb.PredictRequest) -> pb.PredictReply:
        return self.stub.Predict(request, timeout=PATIENCE, wait_for_ready=True)

    def until_killed(
        self, stream: Iterable[pb.PredictRequest], replied: Callable[[int], None] = lambda count: None
    ) -> list[pb.PredictReply]:
        """Send a stream, call `replied` with the number of replies after each, and return all that came."""
        replies: list[pb.PredictReply] = []
        try:
            for reply in self.stub.PredictStream(iter(stream), timeout=PATIENCE, wait_for_ready=True):
                replies.append(reply)
                replied(len(replies))
        except grpc.RpcError:
            assert self.process.wait(PATIENCE) == -signal.SIGKILL
            return replies
        raise AssertionError("the stream ended before the agent was killed")


@contextmanager
def device(channel: grpc.Channel | None = None, **keys: Any) -> Iterator[Device]:
    """Start one; it is killed at the end."""
    with deployment.sockets_folder() as folder:
        made = Device(folder, channel, **keys)
        try:
            yield made
        finally:
            made.channel.close()
            made.kill()
