"""Calls under way: counted, ended with a status that says what was wrong, and done one at a time where need be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote

import grpc

from client.agent.answers import Busy, NoModel

LOG = logging.getLogger("fedtta.agent")
DETAILS = 4000  # bytes of an error that travel, as gRPC encodes them: they do so in a header of at most 8 KiB
_Result = TypeVar("_Result")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Stopping(RuntimeError):
    """The agent is stopping and takes no more requests."""


#: What a caller is told for an error; everything else is INTERNAL.
STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoModel, grpc.StatusCode.FAILED_PRECONDITION),
    (Stopping, grpc.StatusCode.UNAVAILABLE),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (FloatingPointError, grpc.StatusCode.OUT_OF_RANGE),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)


class Calls:
    """The calls under way, each counted until it has been answered."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count a call; Stopping when no more are taken."""
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
        """Take no more calls, wait at most `grace` seconds for the others, and return how many are left."""
        self.stopping.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        return self._count

    @contextlib.asynccontextmanager
    async def answered(self, context: Any) -> AsyncIterator[None]:
        """Count a call, and end it with the status of the error that it raises."""
        try:
            with self.one():
                yield
        except Exception as error:
            code, text = told(error)
            if code is grpc.StatusCode.INTERNAL:
                LOG.exception("a call failed")
            await context.abort(code, text)


def told(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return what a caller is told."""
    for kind, code in STATUS:
        if isinstance(error, kind):
            return code, _short(str(error))
    return grpc.StatusCode.INTERNAL, _short(f"{type(error).__name__}: {error}")


class Worker:
    """One thread that does one thing at a time; it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def do(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Do something in its turn; cancelled before that, it is not done."""
        future: Future[_Result] = Future()
        self._tasks.put((future, function, arguments))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End after what is waiting."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # whoever waits is told
                future.set_exception(error)


def _short(text: str) -> str:
    """Return as much of a text as may travel."""
    kept = text[:DETAILS]
    while len(quote(kept)) > DETAILS:
        kept = kept[: len(kept) * 3 // 4]
    return text if kept == text else f"{kept}…"
