"""Requests that wait: in order, joined where that changes nothing, refused where there are too many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtta.client.agent.live import Live, as_floats, checked
from fedtta.client.agent.predictions import PART_BYTES, Busy, Prediction, PredictQueue, parts_of
from tests.client.agent.world import sample_images, served


@dataclass
class Fake:
    """Answers with the first pixel of each image; waits until it may, and remembers the batches."""

    version, serving = "v", nullcontext()
    per: str = "sample"
    may: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)
    seen: int = 0

    def check(self, pixels: Any) -> NDArray[np.float32]:
        if np.ndim(pixels) != 1:
            raise ValueError("bad request")
        return np.asarray(pixels, np.float32)

    def predict(self, pixels: NDArray[np.float32]) -> Prediction:
        self.begun.set()
        assert self.may.wait(60)
        if (pixels == 13).any():
            raise RuntimeError("unlucky")
        self.batches.append(pixels.astype(int).tolist())
        self.seen += len(pixels)
        return Prediction(pixels[:, None], None, "v", True, self.seen - len(pixels))


@pytest.fixture
def fake() -> Iterator[Fake]:
    agent = Fake()
    yield agent
    agent.may.set()


def queue_of(agent: Any, limit: int = 8, batch_limit: int = 4) -> PredictQueue:
    return PredictQueue(agent, limit, batch_limit)


def request(*values: int) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def blocked(queue: PredictQueue, fake: Fake) -> Any:
    """Submit a request that has begun and does not end."""
    first = queue.submit(request(0))
    assert fake.begun.wait(60)
    return first


def test_what_waits_is_joined_up_to_the_limit_and_answered_apart(fake: Fake) -> None:
    queue = queue_of(fake)
    blocked(queue, fake)
    waiting = [queue.submit(request(*values)) for values in ((1, 2), (3,), (4, 5), (6, 7, 8, 9, 10), (11,))]
    assert queue.waiting == 5
    fake.may.set()
    answers = [future.result(60) for future in waiting]
    assert fake.batches == [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
    assert [answer.probabilities[:, 0].astype(int).tolist() for answer in answers][:3] == [[1, 2], [3], [4, 5]]
    assert [answer.position for answer in answers] == [1, 3, 4, 6, 11]
    queue.close()


def test_per_batch_a_request_is_a_batch(fake: Fake) -> None:
    fake.per = "batch"
    queue = queue_of(fake)
    blocked(queue, fake)
    waiting = [queue.submit(request(1, 2)), queue.submit(request(3))]
    fake.may.set()
    assert [future.result(60).position for future in waiting] == [1, 3]
    assert fake.batches == [[0], [1, 2], [3]]
    queue.close()


def test_too_many_are_told_busy(fake: Fake) -> None:
    queue = queue_of(fake, limit=2)
    blocked(queue, fake)
    queue.submit(request(1))
    second = queue.submit(request(2))
    with pytest.raises(Busy, match="busy: 2 requests wait"):
        queue.submit(request(3))
    assert second.cancel()  # its place in the queue is free
    third = queue.submit(request(4))
    fake.may.set()
    assert third.result(60).probabilities[0, 0] == 4
    queue.close()


def test_what_is_cancelled_before_it_begins_is_never_seen(fake: Fake) -> None:
    queue = queue_of(fake)
    first = blocked(queue, fake)
    second, third = queue.submit(request(1)), queue.submit(request(2))
    assert second.cancel()
    assert not first.cancel()  # it has begun
    fake.may.set()
    assert third.result(60).position == 1
    with pytest.raises(CancelledError):
        second.result(60)
    assert fake.batches == [[0], [2]]
    queue.close()


def test_a_bad_request_fails_alone(fake: Fake) -> None:
    queue = queue_of(fake)
    blocked(queue, fake)
    bad = queue.submit(np.zeros((1, 1)))
    waiting = [queue.submit(request(value)) for value in (1, 13, 2)]
    fake.may.set()
    with pytest.raises(ValueError, match="bad request"):
        bad.result(60)
    with pytest.raises(RuntimeError, match="unlucky"):
        waiting[1].result(60)
    assert [waiting[i].result(60).probabilities[0, 0] for i in (0, 2)] == [1, 2]
    queue.close()


def test_closing_answers_what_was_accepted(fake: Fake) -> None:
    queue = queue_of(fake)
    waiting = [blocked(queue, fake), *(queue.submit(request(value)) for value in range(1, 5))]
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue._closed:
        closing.join(0.01)
    with pytest.raises(Busy, match="closing"):
        queue.submit(request(9))
    fake.may.set()
    closing.join(60)
    assert [int(future.result(0).probabilities[0, 0]) for future in waiting] == [0, 1, 2, 3, 4]


def test_many_threads_lose_and_mix_up_nothing(fake: Fake) -> None:
    fake.may.set()
    queue, wrong = queue_of(fake, limit=1000, batch_limit=16), []

    def stream(own: int) -> None:
        futures = [(1000 * own + i, queue.submit(request(1000 * own + i))) for i in range(20)]
        answers = [(value, future.result(60)) for value, future in futures]
        positions = [answer.position for _, answer in answers]
        if positions != sorted(positions) or any(answer.probabilities[0, 0] != value for value, answer in answers):
            wrong.append(own)

    threads = [threading.Thread(target=stream, args=(own,)) for own in range(1, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert fake.seen == 600
    queue.close()


class Slow:
    """A real model that waits before its first batch, so that the others are joined."""

    version, serving = "v", nullcontext()

    def __init__(self, adapter: str) -> None:
        self.live = Live(served(adapter), None, lambda text: None)
        self.per, self.may, self.calls = self.live.adapter.per, threading.Event(), 0

    def check(self, pixels: NDArray[Any]) -> NDArray[Any]:
        return checked(pixels, self.live.served.shape)

    def predict(self, pixels: NDArray[Any]) -> Prediction:
        assert self.may.wait(60)
        self.calls += 1
        rows, weights, adapted = self.live.predict(as_floats(pixels))
        return Prediction(rows, weights, "v", adapted, self.live.samples - len(pixels))


@pytest.mark.parametrize("adapter", ["fedthe", "btfl", "t3a", "none"])
def test_joined_is_the_same_as_one_by_one(adapter: str) -> None:
    agent = Slow(adapter)
    queue = queue_of(agent, limit=64, batch_limit=256)
    sizes = [1, 3, 1, 2, 5, 1, 7, 1]
    begins = np.cumsum([0, *sizes[:-1]])
    waiting = [queue.submit(sample_images(int(begin), size)) for begin, size in zip(begins, sizes, strict=True)]
    agent.may.set()
    joined = [future.result(60) for future in waiting]
    assert agent.calls <= 2
    queue.close()
    alone = Slow(adapter)
    alone.may.set()
    for begin, size, answer in zip(begins, sizes, joined, strict=True):
        for i in range(size):
            single = alone.predict(alone.check(sample_images(int(begin) + i, 1)))
            np.testing.assert_allclose(answer.probabilities[i], single.probabilities[0], atol=1e-6)
            if answer.weights is not None:
                assert single.weights is not None
                np.testing.assert_allclose(answer.weights[i], single.weights[0], atol=1e-6)
        assert answer.position == begin


@given(st.integers(1, 3000), st.sampled_from([(3, 32, 32), (1, 8, 8), (3, 224, 224)]), st.integers(1, 300))
def test_parts_are_nearly_equal_and_bounded(samples: int, shape: tuple[int, int, int], limit: int) -> None:
    pixels = np.broadcast_to(np.uint8(0), (samples, *shape))  # takes no memory
    for per in ("sample", "batch"):
        sizes = [len(part) for part in parts_of(pixels, per, limit)]
        assert sum(sizes) == samples
        assert max(sizes) <= limit
        assert max(sizes) - min(sizes) <= 1
        if per == "batch":
            assert len(sizes) == -(-samples // limit)  # what fits stays one batch
        else:
            assert max(sizes) == 1 or max(sizes) * int(np.prod(shape)) * 4 <= PART_BYTES


def test_requests_of_different_types_are_joined_as_floats() -> None:
    bytes_, floats = sample_images(0, 2), sample_images(2, 3).astype(np.float32) / np.float32(255)
    agent = Slow("none")
    queue = queue_of(agent, limit=8, batch_limit=64)
    waiting = [queue.submit(pixels) for pixels in (sample_images(0, 1), bytes_, floats)]
    agent.may.set()
    joined = np.concatenate([future.result(60).probabilities for future in waiting[1:]])
    queue.close()
    alone = Slow("none")
    alone.may.set()
    np.testing.assert_allclose(joined, alone.predict(alone.check(sample_images(0, 5))).probabilities, atol=1e-6)
