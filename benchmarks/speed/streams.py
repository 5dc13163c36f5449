"""Requests to a running agent: one after another, in one stream, and in many simultaneous streams, all checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.server.events import RunError

PATIENCE = 600.0  # seconds that an answer, or a whole stream, may take


@dataclass(frozen=True)
class Load:
    """Outcome of simultaneous streams of requests with one sample each.

    Parameters
    ----------
    lost : int
        Requests without a reply.
    reordered : int
        Replies that came after the reply to a later request of their stream, or that were predicted after one.
    refused : int
        Replies that say an error instead of a prediction.
    per_second : float
        Predictions of all streams together.
    """

    streams: int
    requests: int
    lost: int
    reordered: int
    refused: int
    per_second: float

    @property
    def trouble(self) -> str:
        """Return what went wrong, empty for nothing."""
        kinds = {"lost": self.lost, "reordered": self.reordered, "refused": self.refused}
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def batches(pixels: NDArray[np.uint8], size: int) -> list[NDArray[np.uint8]]:
    """Cut a stream [n, C, H, W] into batches of one size; what is left over is left out."""
    return [pixels[begin : begin + size] for begin in range(0, len(pixels) - size + 1, size)]


def requests(parts: Sequence[NDArray[np.uint8]]) -> list[pb.PredictRequest]:
    """Return one request a batch; the id is its number."""
    return [pb.PredictRequest(id=str(i), images=protobuf.to_images(part)) for i, part in enumerate(parts)]


def unary(stub: agent_pb2_grpc.PredictorStub, asked: Sequence[pb.PredictRequest]) -> list[float]:
    """Ask one after another and return the seconds of each answer; RunError for one that is not the adapter's."""
    seconds = []
    for request in asked:
        start = time.perf_counter()
        reply = stub.Predict(request, timeout=PATIENCE)
        seconds.append(time.perf_counter() - start)
        _check_adapted(reply)
    return seconds


def one_stream(stub: agent_pb2_grpc.PredictorStub, asked: Sequence[pb.PredictRequest]) -> float:
    """Ask in one stream and return the seconds until the last answer.

    Raises
    ------
    RunError
        A reply is missing, refused, out of order or not the adapter's.
    """
    start = time.perf_counter()
    replies = list(stub.PredictStream(iter(asked), timeout=PATIENCE))
    seconds = time.perf_counter() - start
    load = judged([replies], [len(asked)], seconds)
    if load.trouble:
        raise RunError(f"one stream of {len(asked)} requests: {load.trouble}")
    return seconds


def many_streams(address: str, pixels: NDArray[np.uint8], streams: int) -> Load:
    """Send each sample [n, C, H, W] once, distributed over simultaneous streams, and check the replies."""
    return asyncio.run(_many_streams(address, pixels, streams))


async def _many_streams(address: str, pixels: NDArray[np.uint8], streams: int) -> Load:
    shares = [requests(batches(pixels[number::streams], 1)) for number in range(streams)]
    start = time.perf_counter()
    replies = await asyncio.gather(*(_stream(address, asked) for asked in shares))
    return judged(replies, [len(asked) for asked in shares], time.perf_counter() - start)


async def _stream(address: str, asked: Sequence[pb.PredictRequest]) -> list[pb.PredictReply]:
    """Send a stream over a connection of its own, as if it came from a program of its own."""

    async def sent() -> AsyncIterator[pb.PredictRequest]:
        for request in asked:
            yield request

    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = agent_pb2_grpc.PredictorStub(channel)
        return [reply async for reply in stub.PredictStream(sent(), timeout=PATIENCE, wait_for_ready=True)]


def judged(replies: Sequence[Sequence[pb.PredictReply]], lengths: Sequence[int], seconds: float) -> Load:
    """Return the outcome of streams.

    Parameters
    ----------
    replies : sequence
        Each stream's, as they came.
    lengths : sequence of int
        Requests of each stream, with ids 0, 1, ...
    seconds : float
        That all of them took.

    Raises
    ------
    RunError
        A prediction is not the adapter's.
    """
    lost = reordered = refused = samples = 0
    for got, count in zip(replies, lengths, strict=True):
        lost += len({str(i) for i in range(count)} - {reply.id for reply in got})
        reordered += sum(_backwards(got))
        for reply in got:
            refused += bool(reply.error)
            samples += reply.samples
            _check_adapted(reply)
    return Load(len(replies), sum(lengths), lost, reordered, refused, samples / seconds)


def _backwards(got: Sequence[pb.PredictReply]) -> Iterator[bool]:
    """Tell of each reply whether it comes after, or was predicted after, one to a later or to the same request."""
    last, position = -1, -1
    for reply in got:
        number = int(reply.id)
        yield number <= last or (not reply.error and reply.position <= position)
        last = max(last, number)
        position = position if reply.error else max(position, reply.position)


def _check_adapted(reply: pb.PredictReply) -> None:
    if not (reply.adapted or reply.error):
        raise RunError(f"the guard held back the adapter at sample {reply.position}: this would not time the adapter")
