"""The transport to Ray workers; arrays go through memory that all processes of the machine share.

The model of a round is put there once, for however many clients, and read in place; so are the replies. (Flower's own
simulation copies it there for each message.) Workers do not import Flower.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from fedtta.client.node import Node, perform
from fedtta.client.resources import resolve_device
from fedtta.client.sites import simulated_nodes
from fedtta.messages.arrays import Contiguous, packed, unpacked
from fedtta.messages.record import Record
from fedtta.messages.requests import REQUESTS
from fedtta.messages.transport import Addressed, Answer, answer_of, late, reason_of, unknown_node
from fedtta.settings import Settings

LOG = logging.getLogger(__name__)
AHEAD = 2  # requests that a worker has: the current one, and the next
WAIT = 0.5  # seconds for the next reply, at most, so that the deadline is checked
#: Options of a worker: one that dies is started again and repeats what it was doing, with the same bits.
REVIVE = {"max_restarts": -1, "max_task_retries": 1}
#: Kind, values and arrays of a reply, or the reason why there is none.
Sent = tuple[str, dict[str, Any], dict[str, dict[str, Contiguous]]] | str


class Worker:
    """A process that answers requests for simulated clients, one after the other.

    Data and network stay in it from request to request; private state of the clients is on disk.

    Parameters
    ----------
    nodes : sequence of Node
        All clients of the federation.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = [replace(node, lends=True) for node in nodes]

    def perform(
        self,
        kind: str,
        values: Mapping[str, Any],
        number: int,
        names: Sequence[str],
        *arrays: Mapping[str, Contiguous],
    ) -> Sent:
        """Answer a request to a node, given in plain form; its arrays are read-only and shared with other processes."""
        record = Record(kind, dict(values), {name: unpacked(one) for name, one in zip(names, arrays, strict=True)})
        try:
            request = REQUESTS[kind].from_record(record)
            reply = perform(request, self.nodes[number]).to_record()
        except Exception as error:
            LOG.debug("a client failed", exc_info=error)
            return reason_of(error)
        return reply.kind, reply.values, {name: packed(one) for name, one in reply.arrays.items()}


class RayTransport:
    """A transport to clients that Ray workers simulate; client i is node i + 1.

    Parameters
    ----------
    clients : int
    workers : sequence
        Ray's handles of `Worker`.
    """

    def __init__(self, clients: int, workers: Sequence[Any]) -> None:
        self.clients, self._workers = clients, list(workers)
        self._busy = [0] * len(workers)  # of the `AHEAD` slots of each worker
        self._begun: dict[Any, tuple[int, int]] = {}  # Ray's reference → worker, slots that it takes

    def nodes(self) -> list[int]:
        """Return all nodes."""
        return list(range(1, self.clients + 1))

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`.

        A worker that dies for good may have been killed by the request before: the requests that it had are repeated
        once, each alone on a worker.
        """
        end = time.monotonic() + timeout
        nodes = set(self.nodes())
        addressed = [one for one in requests if one.node in nodes]
        yield from (unknown_node(one) for one in requests if one.node not in nodes)
        queued, waiting = deque(enumerate(addressed)), dict[Any, tuple[int, Addressed]]()
        stored: dict[int, Any] = {}  # by the identity of named arrays, which `requests` keeps alive
        suspects: set[int] = set()
        while (queued or waiting) and (left := end - time.monotonic()) > 0:
            self._fill(queued, waiting, suspects, stored)
            for reference in self._finished(min(WAIT, left)):
                if reference not in waiting:  # the result of an earlier exchange, which came too late
                    continue
                number, one = waiting.pop(reference)
                try:
                    sent = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if number not in suspects:
                        suspects.add(number)
                        queued.appendleft((number, one))
                        continue
                    sent = reason_of(error)
                yield _answer(one, sent)
        for _, one in (*waiting.values(), *queued):
            yield late(one, timeout)

    def _finished(self, timeout: float) -> list[Any]:
        """Wait for results, and free the slots of their workers."""
        done, _ = ray.wait(list(self._begun), timeout=timeout)
        for reference in done:
            worker, slots = self._begun.pop(reference)
            self._busy[worker] -= slots
        return list(done)

    def _fill(
        self,
        queued: deque[tuple[int, Addressed]],
        waiting: dict[Any, tuple[int, Addressed]],
        suspects: set[int],
        stored: dict[int, Any],
    ) -> None:
        """Hand requests to the least busy workers while they have free slots."""
        while queued and min(self._busy) < AHEAD:
            worker, (number, one) = self._busy.index(min(self._busy)), queued[0]
            slots = AHEAD if number in suspects else 1
            if self._busy[worker] + slots > AHEAD:
                break
            queued.popleft()
            record = one.request.to_record()
            for arrays in record.arrays.values():
                if id(arrays) not in stored:
                    stored[id(arrays)] = ray.put(packed(arrays))
            reference = self._workers[worker].perform.remote(
                record.kind,
                record.values,
                one.node - 1,
                list(record.arrays),
                *(stored[id(arrays)] for arrays in record.arrays.values()),
            )
            self._begun[reference], waiting[reference] = (worker, slots), (number, one)
            self._busy[worker] += slots


def _answer(one: Addressed, sent: Sent) -> Answer:
    if isinstance(sent, str):
        return Answer(one.node, None, "failed", sent)
    kind, values, arrays = sent
    return answer_of(one, Record(kind, values, {name: unpacked(value) for name, value in arrays.items()}))


@contextmanager
def ray_transport(settings: Settings) -> Iterator[tuple[Settings, RayTransport]]:
    """Start Ray and its workers for the clients of a run; yield the settings for the clients, and the transport."""
    settings, gpus = share_gpu(settings)
    with _ray(settings.workers):
        kind: Any = ray.remote(Worker)
        nodes = simulated_nodes(settings)
        options = {"num_cpus": 1, "num_gpus": gpus, **REVIVE}
        workers = [kind.options(**options).remote(nodes) for _ in range(settings.workers)]
        yield settings, RayTransport(settings.clients, workers)


def share_gpu(settings: Settings) -> tuple[Settings, float]:
    """Return the settings for the workers, and each worker's share of the GPU (0 on a CPU)."""
    device = resolve_device(settings.device)
    if device.type == "cpu":
        return settings, 0.0
    if device.index is not None:
        # Ray shows each worker its GPU as the only one
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device.index)
        settings = settings.replace(device="cuda")
    return settings, settings.num_gpus or 1 / settings.workers


@contextmanager
def _ray(workers: int) -> Iterator[None]:
    """Start Ray on this machine and stop it at the end; its processes find our modules where this one does.

    A Ray that this process has already started is used as it is, and stays.
    """
    if ray.is_initialized():
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, before]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about defaults of later versions of Ray
            ray.init(
                address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
