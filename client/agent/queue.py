"""Requests in order of arrival, one worker, and as many at once as the adapter allows."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.agent.answers import Busy, Prediction
from client.agent.core import Agent

__all__ = ["Busy", "PredictQueue"]


@dataclass
class _Request:
    pixels: NDArray[Any]
    future: Future[Prediction] = field(default_factory=Future)

    def answer(self, prediction: Prediction) -> None:
        self.future.set_result(prediction)

    def refuse(self, error: Exception) -> None:
        self.future.set_exception(error)


class PredictQueue:
    """One thread that predicts what waits.

    Requests that wait are joined into one batch if the adapter's result for a sample does not depend on the batch; for
    other adapters one request is one batch.

    Parameters
    ----------
    agent : Agent
    limit : int
        Requests that may wait, at least 1.
    batch_limit : int
        Samples that are joined; a larger request is a batch of its own.
    """

    def __init__(self, agent: Agent, limit: int, batch_limit: int) -> None:
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

    def submit(self, pixels: NDArray[Any]) -> Future[Prediction]:
        """Return the answer to be; its exceptions are those of `Agent.predict`.

        A future can be cancelled as long as its request has not begun; the adapter never sees it then.

        Raises
        ------
        Busy
            Too many requests wait, or the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise Busy("busy: closing")
            if len(self._requests) >= self._limit:  # those that nobody waits for any more leave first
                self._requests = deque(request for request in self._requests if not request.future.cancelled())
            if len(self._requests) >= self._limit:
                raise Busy(f"busy: {len(self._requests)} requests wait")
            request = _Request(pixels)
            self._requests.append(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Answer what was accepted, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while batch := self._next():
            self._predict(batch)

    def _next(self) -> list[_Request]:
        """Wait for requests and return those to be predicted together; none once the queue is closed and empty."""
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
        """Answer requests that have begun; a bad one fails alone."""
        good = []
        for request in batch:
            try:
                request.pixels = self._agent.check(request.pixels)
                good.append(request)
            except Exception as error:
                request.refuse(error)
        if not good:
            return
        try:
            joined = good[0].pixels if len(good) == 1 else np.concatenate([request.pixels for request in good])
            prediction = self._agent.predict(joined)
        except Exception as error:
            if len(good) == 1:
                good[0].refuse(error)
            else:  # whoever is to blame fails alone
                half = len(good) // 2
                self._predict(good[:half])
                self._predict(good[half:])
            return
        for request, part in zip(good, prediction.split([len(r.pixels) for r in good]), strict=True):
            request.answer(part)


def _length(request: _Request) -> int:
    """Return how many samples a request has, as far as it is one."""
    return int(np.shape(request.pixels)[0]) if np.ndim(request.pixels) else 1
