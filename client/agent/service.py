"""The agent's predictor service: predictions, status and models for the device's owner.

All handlers run on one event loop, predictions on the thread of the queue, scans on another, everything else on the
loop's default threads. A waiting request is a future, and cancelling it removes it from the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from fedtta.client.agent.core import Agent
from fedtta.client.agent.encoded import Encoded
from fedtta.client.agent.lifecycle import Changed
from fedtta.client.agent.log import EventLog
from fedtta.client.agent.manifest import Model
from fedtta.client.agent.predictions import Busy, NoModel, Prediction, PredictQueue
from fedtta.client.agent.status import Saved
from fedtta.client.policy import PolicyError
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf

LOG = logging.getLogger("fedtta.agent")
DETAILS = 4000  # bytes of an error's text, as gRPC encodes it in a header of at most 8 KiB
LOOK = 0.02  # seconds between two looks at a full queue
STREAMS_SHARE = 75  # per cent of the queue that streams may fill; the rest is for single requests
AHEAD = 4  # replies of a stream that may wait for sending; with the one being sent and the one being read: six requests


class Stopping(RuntimeError):
    """The agent is stopping and takes no more requests."""


#: Status of a call by the exception that it raises; any other exception is INTERNAL.
STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoModel, grpc.StatusCode.FAILED_PRECONDITION),
    (Stopping, grpc.StatusCode.UNAVAILABLE),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (FloatingPointError, grpc.StatusCode.OUT_OF_RANGE),
    (PolicyError, grpc.StatusCode.PERMISSION_DENIED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
)


class Calls:
    """The calls in progress, each counted until it has been answered.

    Parameters
    ----------
    log : EventLog
        Gets the refused ones.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count a call; raise Stopping if no more are taken."""
        if self.stopping.is_set():
            raise Stopping("the agent is stopping")
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def finish(self, grace: float) -> int:
        """Take no more calls, wait at most `grace` seconds for those in progress, and return how many are left."""
        self.stopping.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        return self._count

    @contextlib.asynccontextmanager
    async def answered(self, context: Any) -> AsyncIterator[None]:
        """Count a call, and end it with the status of the exception that it raises."""
        try:
            with self.one():
                yield
        except Exception as error:
            code, text = self.refused(error)
            await context.abort(code, text)

    def refused(self, error: Exception) -> tuple[grpc.StatusCode, str]:
        """Log a refused request; return its status and text."""
        code, text = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            where = traceback.extract_tb(error.__traceback__)[-1:]
            LOG.error("a call failed: %s%s", text, "".join(f" at {one.filename}:{one.lineno}" for one in where))
            LOG.debug("its traceback", exc_info=error)
        self._log.write("request refused", code=code.name, reason=text)
        return code, text


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the status and text for an exception."""
    for kind, code in STATUS:
        if isinstance(error, kind):
            return code, _shortened(str(error))
    return grpc.StatusCode.INTERNAL, _shortened(f"{type(error).__name__}: {error}")


class Predictor(agent_pb2_grpc.PredictorServicer):
    """Predictions, status and snapshots for the device's owner; see agent.proto.

    Parameters
    ----------
    agent : Agent
    predictions : PredictQueue
        The queue of that agent.
    calls : Calls
    """

    def __init__(self, agent: Agent, predictions: PredictQueue, calls: Calls) -> None:
        self.agent, self.predictions, self.calls, self.config = agent, predictions, calls, agent.config
        self._streams = 0
        self._entrance = asyncio.Lock()  # streams enter the queue one by one
        self._accepted: set[Future[Prediction]] = set()  # and not answered
        self._moved = asyncio.Event()  # one of them has been answered or withdrawn
        self._share = max(1, self.config.queue_limit * STREAMS_SHARE // 100)
        self._scanner = ThreadPoolExecutor(1, "rescan")  # of the loop's few threads, slow scans would leave none

    async def Predict(self, request: pb.PredictRequest, context: Any) -> pb.PredictReply:
        """Predict one request; busy if the queue is full."""
        arrived = _now()
        async with self.calls.answered(context):
            with self._counted():
                return await self._reply(request.id, self._enter(request, arrived), self._due())
        raise AssertionError("unreachable: the call has been aborted")

    async def PredictStream(self, _: Any, context: Any) -> None:
        """Predict the requests of a stream in order, reading no faster than replies are sent."""
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
        """Return the state of the agent."""
        async with self.calls.answered(context):
            values = dataclasses.asdict(await asyncio.to_thread(self.agent.status))
            renamed = {"model_version": values.pop("version"), "uptime_seconds": values.pop("uptime")}
            return pb.StatusReply(**values, **renamed, waiting=self._waiting())
        raise AssertionError("unreachable: the call has been aborted")

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply:
        """Save the adapter's state."""
        return await self._saved(context, self.agent.snapshot)

    async def Rollback(self, request: pb.RollbackRequest, context: Any) -> pb.SnapshotReply:
        """Restore a snapshot."""
        return await self._saved(context, self.agent.rollback, request.snapshot)

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.SnapshotReply:
        """Reset the adapter."""
        return await self._saved(context, self.agent.reset)

    async def _saved(self, context: Any, function: Callable[..., Saved], *arguments: str) -> pb.SnapshotReply:
        async with self.calls.answered(context):
            saved = await asyncio.to_thread(function, *arguments)
            return pb.SnapshotReply(snapshot=saved.snapshot, model_version=saved.version, samples=saved.samples)
        raise AssertionError("unreachable: the call has been aborted")

    async def Models(self, request: pb.ModelsRequest, context: Any) -> pb.ModelsReply:
        """List the device's models."""
        async with self.calls.answered(context):
            listed = await asyncio.to_thread(self.agent.models)
            return pb.ModelsReply(models=[_model(model, snapshots) for model, snapshots in listed])
        raise AssertionError("unreachable: the call has been aborted")

    async def Approve(self, request: pb.ModelRequest, context: Any) -> pb.ModelReply:
        """Serve the candidate."""
        return await self._changed(context, self.agent.approve, request.version)

    async def Reject(self, request: pb.ModelRequest, context: Any) -> pb.ModelReply:
        """Drop the candidate."""
        return await self._changed(context, self.agent.reject, request.version)

    async def RestoreModel(self, request: pb.ModelRequest, context: Any) -> pb.ModelReply:
        """Serve an older model again."""
        return await self._changed(context, self.agent.restore_model, request.version)

    async def _changed(self, context: Any, function: Callable[[str], Changed], version: str) -> pb.ModelReply:
        async with self.calls.answered(context):
            return pb.ModelReply(**dataclasses.asdict(await asyncio.to_thread(function, version)))
        raise AssertionError("unreachable: the call has been aborted")

    async def Rescan(self, request: pb.RescanRequest, context: Any) -> pb.RescanReply:
        """Look at the device's own data again."""
        async with self.calls.answered(context):
            scan = await asyncio.get_running_loop().run_in_executor(self._scanner, self.agent.rescan)
            return pb.RescanReply(**dataclasses.asdict(scan))
        raise AssertionError("unreachable: the call has been aborted")

    def _due(self) -> float:
        """Return the deadline of a request that arrives now, in the loop's time."""
        return _now() + self.config.deadline

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a prediction request that is refused; one whose caller disappears is not."""
        try:
            yield
        except Exception:
            self.agent.observation.refused()
            raise

    def _enter(self, request: pb.PredictRequest, arrived: float) -> _Asked:
        """Put a request into the queue; raises ValueError or Busy."""
        images = request.images
        files = Encoded(protobuf.from_files(images)) if images.kind == pb.Images.ENCODED else None
        accepted = self.predictions.submit(protobuf.from_images(images) if files is None else files)
        self._accepted.add(accepted)
        future = asyncio.wrap_future(accepted)
        future.add_done_callback(lambda _: self._left(accepted))
        return _Asked(future, arrived)

    def _left(self, accepted: Future[Prediction]) -> None:
        self._accepted.discard(accepted)
        self._moved.set()

    def _waiting(self) -> int:
        """Return the number of requests that have not begun."""
        return sum(not (one.running() or one.done()) for one in self._accepted)

    async def _enter_in_turn(self, request: pb.PredictRequest, arrived: float) -> _Asked:
        """Put a stream's request into the queue when streams have room: they wait instead of being refused as busy."""
        async with self._entrance:
            while self._waiting() >= self._share:
                self._moved.clear()
                with contextlib.suppress(TimeoutError):  # a request that begins sets no event
                    async with asyncio.timeout(LOOK):  # unlike wait_for, it never swallows a cancellation
                        await self._moved.wait()
            return self._enter(request, arrived)

    async def _reply(self, name: str, asked: _Asked, due: float) -> pb.PredictReply:
        """Wait for a prediction until its deadline; a request that has not begun by then leaves the queue."""
        try:
            async with asyncio.timeout_at(due):
                reply = _predict_reply(name, await asked.future)
        except TimeoutError as error:
            raise TimeoutError(f"not answered within {self.config.deadline:g} s") from error
        self.agent.observation.answered(asked.predicted - asked.arrived)
        return reply

    async def _read(self, context: Any, answers: asyncio.Queue[_Entry]) -> None:
        """Put a stream's requests into the queue in order, until the stream ends or the agent stops."""
        stop = asyncio.create_task(self.calls.stopping.wait())
        end: Exception | bool = True
        try:
            while (request := await _next(context, stop)) is not None:
                try:
                    answer: _Asked | Exception = await self._enter_in_turn(request, _now())
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
        """Return the reply to one request of a stream; for a refused request it holds the error."""
        try:
            with self._counted():
                if isinstance(entry.answer, Exception):
                    raise entry.answer
                assert entry.answer is not None
                return await self._reply(entry.name, entry.answer, entry.due)
        except Exception as error:
            _, text = self.calls.refused(error)
            return pb.PredictReply(id=entry.name, error=text)
        finally:
            entry.forget()


class _Asked:
    """A request in the queue.

    Parameters
    ----------
    future : asyncio.Future
        Its prediction.
    arrived : float
        When it came, in the loop's time.

    Attributes
    ----------
    predicted : float
        When the future was done: a stream whose caller reads slowly is answered later.
    """

    def __init__(self, future: asyncio.Future[Prediction], arrived: float) -> None:
        self.future, self.arrived, self.predicted = future, arrived, arrived
        future.add_done_callback(self._done)

    def _done(self, _: asyncio.Future[Prediction]) -> None:
        self.predicted = _now()


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A request of a stream with its future prediction or the reason for its refusal; or the end of the stream."""

    name: str = ""
    answer: _Asked | Exception | None = None
    due: float = 0.0
    end: Exception | bool | None = None  # True: the caller ended it

    def forget(self) -> None:
        """Cancel the prediction."""
        if isinstance(self.answer, _Asked):
            future = self.answer.future
            if not future.cancel() and not future.cancelled():
                future.exception()  # retrieved, or asyncio logs that it never was


def _now() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


async def _next(context: Any, stop: asyncio.Task[Any]) -> pb.PredictRequest | None:
    """Return a stream's next request, or None at its end; raise Stopping if the agent stops first."""
    read = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait({read, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            raise Stopping("the agent is stopping")
        request = read.result()
        return None if request is grpc.aio.EOF else request
    finally:
        read.cancel()


def _shortened(text: str) -> str:
    """Return a text cut to `DETAILS` bytes."""
    kept = text[:DETAILS]
    while len(quote(kept)) > DETAILS:
        kept = kept[: len(kept) * 3 // 4]
    return text if kept == text else f"{kept}…"


def _model(model: Model, snapshots: Sequence[str]) -> pb.Model:
    """Return a model as a message."""
    return pb.Model(
        version=model.version,
        state=model.state,
        origin=model.origin,
        time=model.time,
        reason=model.reason,
        check=model.check,
        snapshots=snapshots,
    )


def _predict_reply(name: str, prediction: Prediction) -> pb.PredictReply:
    """Return a prediction as the reply to the request `name`."""
    weights = prediction.weights
    samples, classes = prediction.probabilities.shape
    return pb.PredictReply(
        id=name,
        samples=samples,
        classes=classes,
        probabilities=protobuf.to_bytes(np.asarray(prediction.probabilities, np.float32)),
        weights=b"" if weights is None else protobuf.to_bytes(np.asarray(weights, np.float32)),
        model_version=prediction.version,
        adapted=prediction.adapted,
        position=prediction.position,
    )
