"""The agent's two services: predictions for the device's owner, federated work for the ClientApp.

Everything here runs on one event loop, and what takes time elsewhere: predictions on the thread of the queue, work on
one of its own, the rest on the loop's. A request that waits is a future; cancelling it takes it out of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from client.agent import agent_pb2 as pb
from client.agent import agent_pb2_grpc, wire
from client.agent.answers import Busy, NoModel, Prediction, Saved
from client.agent.calls import LOG, Calls, Stopping, Worker, told
from client.agent.config import AgentConfig
from client.agent.core import Agent
from client.agent.queue import PredictQueue
from client.phases import PHASES

LOOK = 0.02  # seconds between two looks at a full queue
STREAMS_SHARE = 75  # per cent of the queue that streams may fill: single requests find room beside them
AHEAD = 4  # answers of a stream that may wait to be sent; with the one being sent and the one being read: six requests


class Predictor(agent_pb2_grpc.PredictorServicer):
    """Predictions and what else the device's owner may ask for; see agent.proto.

    Parameters
    ----------
    agent : Agent
    queue : PredictQueue
        Of that agent.
    calls : Calls
    """

    def __init__(self, agent: Agent, queue: PredictQueue, calls: Calls) -> None:
        self.agent, self.queue, self.calls, self.config = agent, queue, calls, agent.config
        self._streams = 0
        self._door = asyncio.Lock()  # streams enter the queue one by one
        self._accepted: set[Future[Prediction]] = set()  # and not answered
        self._moved = asyncio.Event()  # one of those has been answered or withdrawn since somebody looked
        self._share = max(1, self.config.queue_limit * STREAMS_SHARE // 100)

    async def Predict(self, request: pb.PredictRequest, context: Any) -> pb.PredictReply:
        """Predict one request; busy when as many wait as may."""
        async with self.calls.answered(context):
            return await self._reply(request.id, self._enter(request), self._due())
        raise AssertionError("unreachable: the call has been aborted")

    async def PredictStream(self, _: Any, context: Any) -> None:
        """Predict the requests of a stream in order; it is read no faster than it is answered."""
        async with self.calls.answered(context):
            if self._streams >= self.config.max_streams:
                raise Busy(f"busy: {self._streams} streams are open")
            self._streams += 1
            answers: asyncio.Queue[_Entry] = asyncio.Queue(AHEAD)
            reader = asyncio.create_task(self._read(context, answers))
            try:
                while (entry := await answers.get()).end is None:
                    await context.write(await self._stream_reply(entry))
                if isinstance(entry.end, Exception):
                    raise entry.end
            finally:
                self._streams -= 1
                reader.cancel()
                while not answers.empty():
                    answers.get_nowait().forget()

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        """Say how the agent is."""
        async with self.calls.answered(context):
            values = dataclasses.asdict(await asyncio.to_thread(self.agent.status))
            renamed = {"model_version": values.pop("version"), "uptime_seconds": values.pop("uptime")}
            return pb.StatusReply(**values, **renamed, waiting=self._waiting())
        raise AssertionError("unreachable: the call has been aborted")

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply:
        """Save what the adapter has learned."""
        return await self._saved(context, self.agent.snapshot)

    async def Rollback(self, request: pb.RollbackRequest, context: Any) -> pb.SnapshotReply:
        """Go back to a snapshot."""
        return await self._saved(context, self.agent.rollback, request.snapshot)

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.SnapshotReply:
        """Forget what the adapter has learned."""
        return await self._saved(context, self.agent.reset)

    async def _saved(self, context: Any, function: Callable[..., Saved], *arguments: str) -> pb.SnapshotReply:
        async with self.calls.answered(context):
            saved = await asyncio.to_thread(function, *arguments)
            return pb.SnapshotReply(snapshot=saved.snapshot, model_version=saved.version, samples=saved.samples)
        raise AssertionError("unreachable: the call has been aborted")

    def _due(self) -> float:
        """Return the loop's time at which a request that comes now must be answered."""
        return asyncio.get_running_loop().time() + self.config.deadline

    def _enter(self, request: pb.PredictRequest) -> asyncio.Future[Prediction]:
        """Hand a request to the queue; ValueError, Busy or NoModel when it is not taken."""
        accepted = self.queue.submit(wire.images_from(request.images))
        self._accepted.add(accepted)
        future = asyncio.wrap_future(accepted)
        future.add_done_callback(lambda _: self._left(accepted))
        return future

    def _left(self, accepted: Future[Prediction]) -> None:
        self._accepted.discard(accepted)
        self._moved.set()

    def _waiting(self) -> int:
        """Return how many requests have not begun."""
        return sum(not (one.running() or one.done()) for one in self._accepted)

    async def _enter_in_turn(self, request: pb.PredictRequest) -> asyncio.Future[Prediction]:
        """Hand a stream's request to the queue as soon as streams may: they wait instead of being told "busy"."""
        async with self._door:
            while self._waiting() >= self._share:
                self._moved.clear()
                with contextlib.suppress(TimeoutError):  # a request that begins does not say so
                    async with asyncio.timeout(LOOK):  # unlike wait_for, it never swallows a cancellation
                        await self._moved.wait()
            return self._enter(request)

    async def _reply(self, name: str, future: asyncio.Future[Prediction], due: float) -> pb.PredictReply:
        """Wait for a prediction until it is due; what has not begun by then is taken out of the queue."""
        try:
            async with asyncio.timeout_at(due):
                return wire.reply_to(name, await future)
        except TimeoutError as error:
            raise TimeoutError(f"not answered within {self.config.deadline:g} s") from error

    async def _read(self, context: Any, answers: asyncio.Queue[_Entry]) -> None:
        """Hand a stream's requests to the queue in order, until it ends or the agent stops."""
        stop = asyncio.create_task(self.calls.stopping.wait())
        end: Exception | bool = True
        try:
            while (request := await _next(context, stop)) is not None:
                try:
                    answer: asyncio.Future[Prediction] | Exception = await self._enter_in_turn(request)
                except (ValueError, Busy, NoModel) as error:
                    answer = error
                entry = _Entry(request.id, answer, self._due())
                try:
                    await answers.put(entry)
                except asyncio.CancelledError:
                    entry.forget()
                    raise
        except Exception as error:
            end = error
        finally:
            stop.cancel()
        await answers.put(_Entry(end=end))

    async def _stream_reply(self, entry: _Entry) -> pb.PredictReply:
        """Return the reply to one request of a stream; it names the error of a refused one."""
        try:
            if isinstance(entry.answer, Exception):
                raise entry.answer
            assert entry.answer is not None
            return await self._reply(entry.name, entry.answer, entry.due)
        except Exception as error:
            code, text = told(error)
            if code is grpc.StatusCode.INTERNAL:
                LOG.exception("a request of a stream failed")
            return pb.PredictReply(id=entry.name, error=text)
        finally:
            entry.forget()


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A request of a stream that was taken: its answer to come, or why it was refused; or the stream's end."""

    name: str = ""
    answer: asyncio.Future[Prediction] | Exception | None = None
    due: float = 0.0
    end: Exception | bool | None = None  # True: the caller has ended it

    def forget(self) -> None:
        """Nobody waits for the answer any more."""
        if isinstance(self.answer, asyncio.Future) and not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()  # asked for, so that asyncio does not complain that nobody did


class Relay(agent_pb2_grpc.RelayServicer):
    """Federated work, one phase at a time; see agent.proto."""

    def __init__(self, agent: Agent, calls: Calls) -> None:
        self.agent, self.calls, self.config = agent, calls, agent.config
        self._worker = Worker("federated work")

    async def Perform(self, request: pb.Work, context: Any) -> pb.Done:
        """Do a phase; work for another client is refused."""
        async with self.calls.answered(context):
            check_client(request, self.config)
            return await self._worker.do(self._perform, request)
        raise AssertionError("unreachable: the call has been aborted")

    def close(self) -> None:
        """End the thread after what it does now."""
        self._worker.close()

    def _perform(self, request: pb.Work) -> pb.Done:
        return wire.done_to(self.agent.perform(wire.work_from(request)))


def check_client(request: pb.Work, config: AgentConfig) -> None:
    """Refuse unknown phases, and work that a SuperNode takes for another client's; ValueError says which."""
    if request.phase not in PHASES:
        raise ValueError(f"phase = {request.phase!r}: allowed are {', '.join(PHASES)}")
    for name in ("partition_id", "num_partitions"):
        if request.HasField(name) and getattr(request, name) != getattr(config, name):
            key = name.replace("_", "-")
            told = f"the node config says {key} = {getattr(request, name)}"
            raise ValueError(f"{told}: the agent at this socket has {getattr(config, name)}")


async def _next(context: Any, stop: asyncio.Task[Any]) -> pb.PredictRequest | None:
    """Return a stream's next request, or None at its end; Stopping when the agent stops first."""
    read = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait({read, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            raise Stopping("the agent is stopping")
        request = read.result()
        return None if request is grpc.aio.EOF else request
    finally:
        read.cancel()
