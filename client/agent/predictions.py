"""Predictions: requests in order of arrival, one thread, and as many requests per batch as the adapter allows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedtta.client.agent.encoded import Encoded
from fedtta.client.agent.live import as_floats

#: Bytes of images, as float32, that are predicted at once by an adapter that takes them one by one: the network's
#: activations are many times as large.
PART_BYTES = 4 << 20

#: What a served model answers: probabilities [B, K], weights [B] or None, and whether they are adapted.
Answer = tuple[NDArray[np.float32], NDArray[np.float32] | None, bool]


class NoModel(RuntimeError):
    """No training has sent a model yet."""


class Busy(RuntimeError):
    """Too many requests wait, or the queue is closed."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one request.

    Parameters
    ----------
    probabilities : float32 [B, K]
        Class probabilities; rows sum to one.
    weights : float32 [B] or None
        e in [0, 1], the weight of the global head; None for adapters that do not mix the heads.
    version : str
        "<run>/<training>/<round>/<digest>" of the model.
    adapted : bool
        False: the guard holds the adapter, and these are the unadapted model's probabilities; of a request in parts,
        those of at least one part.
    position : int
        Samples predicted before these, since the model was installed or the adapter was reset.
    """

    probabilities: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    version: str
    adapted: bool
    position: int

    def split(self, sizes: Sequence[int]) -> list[Prediction]:
        """Return the predictions for the requests of `sizes` samples that were joined into one batch."""
        ends = np.cumsum(sizes)
        parts = []
        for begin, end in zip(ends - np.asarray(sizes), ends, strict=True):
            weights = None if self.weights is None else self.weights[begin:end]
            rows = self.probabilities[begin:end]
            parts.append(replace(self, probabilities=rows, weights=weights, position=self.position + int(begin)))
        return parts


def parts_of(pixels: NDArray[Any], per: str, limit: int) -> list[NDArray[Any]]:
    """Divide images into nearly equal parts that are predicted one after the other.

    Parameters
    ----------
    pixels : [B, C, H, W]
        B at least 1.
    per : "sample" or "batch"
        A part has at most `limit` samples, and for adapters per sample at most `PART_BYTES` as float32. A request of at
        most `limit` samples stays one batch for adapters whose results depend on it.
    limit : int
    """
    most = limit if per == "batch" else min(limit, max(1, PART_BYTES // (4 * pixels[0].size)))
    return np.array_split(pixels, -(-len(pixels) // most))


def joined(answers: Sequence[Answer], version: str, position: int) -> Prediction:
    """Return the answers to the parts of a request as one prediction."""
    if len(answers) == 1:
        return Prediction(*answers[0][:2], version, answers[0][2], position)
    weights = [one if one is not None else np.ones(len(rows), np.float32) for rows, one, _ in answers]
    mixed = any(one is not None for _, one, _ in answers)
    return Prediction(
        np.concatenate([rows for rows, _, _ in answers]),
        np.concatenate(weights) if mixed else None,
        version,
        all(adapted for _, _, adapted in answers),
        position,
    )


@dataclass
class _Request:
    pixels: NDArray[Any] | Encoded
    future: Future[Prediction] = field(default_factory=Future)


class Predicts(Protocol):
    """What predicts the requests of a queue: the agent (`fedtta.client.agent.core.Agent`)."""

    @property
    def per(self) -> Literal["sample", "batch"]:
        """Return "sample" if requests may be joined into one batch, otherwise "batch"."""

    @property
    def version(self) -> str:
        """Return the version of the model in service; empty if there is none."""

    @property
    def serving(self) -> AbstractContextManager[object]:
        """Return a context in which the model in service is not replaced."""

    def check(self, pixels: NDArray[Any] | Encoded) -> NDArray[Any]:
        """Return images that the network can take."""

    def predict(self, pixels: NDArray[Any]) -> Prediction:
        """Adapt to images in order of arrival and predict them."""


class PredictQueue:
    """A queue of requests and the thread that predicts them.

    Waiting requests are joined into one batch if the adapter's result for a sample does not depend on the batch; for
    other adapters each request is one batch.

    Parameters
    ----------
    agent : Predicts
    limit : int
        Waiting requests, at most; at least 1.
    batch_limit : int
        Samples of a joined batch, at most; a larger request is a batch by itself.
    """

    def __init__(self, agent: Predicts, limit: int, batch_limit: int) -> None:
        self._agent, self._limit, self._batch_limit = agent, limit, batch_limit
        self._requests: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="predict", daemon=True)
        self._worker.start()

    @property
    def waiting(self) -> int:
        """Return how many requests have not begun."""
        return len(self._requests)

    def submit(self, pixels: NDArray[Any] | Encoded) -> Future[Prediction]:
        """Return the future prediction; its exceptions are those of `Agent.predict`.

        A future can be cancelled until its request begins; the adapter then never sees the request.

        Raises
        ------
        Busy
            Too many requests wait, or the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise Busy("busy: closing")
            if len(self._requests) >= self._limit:  # drop cancelled requests first
                self._requests = deque(request for request in self._requests if not request.future.cancelled())
            if len(self._requests) >= self._limit:
                raise Busy(f"busy: {len(self._requests)} requests wait")
            request = _Request(pixels)
            self._requests.append(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Predict the accepted requests, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while batch := self._next():
            self._predict(batch)

    def _next(self) -> list[_Request]:
        """Wait for requests and return the next batch; an empty one when the queue is closed and empty."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._requests or self._closed)
                batch: list[_Request] = []
                samples = 0
                while self._requests and (not batch or self._joins(samples, self._requests[0])):
                    request = self._requests.popleft()
                    if request.future.set_running_or_notify_cancel():
                        batch.append(request)
                        samples += _length(request)
                if batch or (self._closed and not self._requests):
                    return batch

    def _joins(self, samples: int, request: _Request) -> bool:
        return self._agent.per == "sample" and samples + _length(request) <= self._batch_limit

    def _predict(self, batch: list[_Request]) -> None:
        """Predict a batch; a bad request fails alone."""
        version, checked = self._agent.version, self._checked(batch)
        with self._agent.serving:
            if self._agent.version != version:  # files are prepared for the model that predicts them
                checked = self._checked([request for request, _ in checked])
            self._answer(checked)

    def _checked(self, batch: list[_Request]) -> list[tuple[_Request, NDArray[Any]]]:
        """Return the good requests of a batch with their images."""
        checked = []
        for request in batch:
            try:
                checked.append((request, self._agent.check(request.pixels)))
            except Exception as error:
                request.future.set_exception(error)
        return checked

    def _answer(self, checked: list[tuple[_Request, NDArray[Any]]]) -> None:
        """Predict the requests of a batch; one that causes an error fails alone."""
        if not checked:
            return
        try:
            prediction = self._agent.predict(_one_batch([pixels for _, pixels in checked]))
        except Exception as error:
            if len(checked) == 1:
                checked[0][0].future.set_exception(error)
            else:
                half = len(checked) // 2
                self._answer(checked[:half])
                self._answer(checked[half:])
            return
        parts = prediction.split([len(pixels) for _, pixels in checked])
        for (request, _), part in zip(checked, parts, strict=True):
            request.future.set_result(part)


def _one_batch(images: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the images of requests as one array; of different types, as float32 in [0, 1]."""
    if len(images) == 1:
        return images[0]
    return np.concatenate(images if len({one.dtype for one in images}) == 1 else [as_floats(one) for one in images])


def _length(request: _Request) -> int:
    """Return the number of samples in a request; 1 for a malformed one."""
    if isinstance(request.pixels, Encoded):
        return len(request.pixels)
    return int(np.shape(request.pixels)[0]) if np.ndim(request.pixels) else 1
