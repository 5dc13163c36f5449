"""The agent's relay service: federated requests one at a time, and telemetry beside them."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fedtta.client.agent.core import Agent
from fedtta.client.agent.service import Calls
from fedtta.client.config import AgentConfig
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.messages.requests import REQUESTS, Observe
from fedtta.models.deadline import Deadline

KIND = 80  # characters of a message's kind that the audit log keeps
_Result = TypeVar("_Result")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class OneThread:
    """One daemon thread that runs functions one after the other; it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function in its turn; cancelled before that, it does not run."""
        future: Future[_Result] = Future()
        self._tasks.put((future, function, arguments))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End after the waiting functions."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # raised where the result is awaited
                future.set_exception(error)


class Relay(agent_pb2_grpc.RelayServicer):
    """Federated requests, one at a time on one thread, and `Observe` on another; see agent.proto.

    Parameters
    ----------
    agent : Agent
    calls : Calls
    """

    def __init__(self, agent: Agent, calls: Calls) -> None:
        self.agent, self.calls, self.config = agent, calls, agent.config
        self._thread, self._beside = OneThread("federated requests"), OneThread("telemetry")

    async def Perform(self, request: pb.Work, context: Any) -> pb.Done:
        """Answer a request; refuse requests to another client."""
        async with self.calls.answered(context):
            deadline = Deadline(context.time_remaining() or math.inf)
            thread = self._beside if request.phase == Observe.kind else self._thread
            try:
                return await thread.run(self._perform, request, deadline)
            except asyncio.CancelledError:
                deadline.cancel("its caller is gone")
                raise
        raise AssertionError("unreachable: the call has been aborted")

    def close(self) -> None:
        """End the threads after their current requests."""
        self._thread.close()
        self._beside.close()

    def _perform(self, message: pb.Work, deadline: Deadline) -> pb.Done:
        try:
            check_client(message, self.config)
            self.config.policy.check_kind(message.phase, message.ByteSize())
            record = protobuf.from_work(message)
            request = REQUESTS[record.kind].from_record(record)
        except Exception as error:  # the others are recorded by the agent
            self.agent.audit.failed(message.phase[:KIND], error, received=message.ByteSize())
            raise
        return protobuf.to_done(self.agent.perform(request, deadline).to_record())


def check_client(request: pb.Work, config: AgentConfig) -> None:
    """Raise ValueError for an unknown kind of request, or a request to another client."""
    if request.phase not in REQUESTS:
        raise ValueError(f"request {request.phase!r}: allowed are {', '.join(REQUESTS)}")
    if request.HasField("name") and request.name != config.name:
        raise ValueError(f"the node config says name = {request.name!r}, the agent's own file {config.name!r}")
