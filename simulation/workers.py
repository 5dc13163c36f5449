"""A grid whose clients work in Ray processes; arrays go through memory that all processes of the machine share.

The model of a round is put there once, however many clients it is for, and read in place; so are the replies. Flower's
own simulation (`simulation.flower_ray`) copies it there for each message.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from flwr.app import Message

from client.work import Arrays
from messages.layout import packed
from server.app import serve
from server.events import Listener
from settings import Settings
from simulation.blocking import PULL_SECONDS, BlockingGrid, about, allow_messages, phase_of, reply
from simulation.ray_options import REVIVE, share_gpu
from simulation.worker import Worker, reason, taken

AHEAD = 2  # messages that a worker has: the one it works on, and the next


class WorkersGrid(BlockingGrid):
    """A grid in front of Ray workers.

    Parameters
    ----------
    clients : int
    workers : sequence
        Handles of `Worker`.
    """

    def __init__(self, clients: int, workers: Sequence[Any]) -> None:
        super().__init__(clients)
        self._workers = list(workers)
        self._busy = [0] * len(workers)  # messages that each has
        self._begun: dict[Any, tuple[Message, int, int]] = {}  # Ray's reference → message, worker, room it takes there
        self._suspects: set[str] = set()  # under way when a worker died for good: begun once more, with nothing else
        self._wanted: set[str] = set()

    def _open(self) -> bool:
        return bool(self._waiting) or any(m.metadata.message_id in self._wanted for m, _, _ in self._begun.values())

    def _forget_all_but(self, wanted: set[str]) -> None:
        """Forget the other messages; who works on one goes on, and nobody hears of it."""
        super()._forget_all_but(wanted)
        self._wanted = wanted

    def _advance(self) -> list[Message]:
        """Keep the workers busy, and wait a little for the first that is done."""
        self._fill()
        done, _ = ray.wait(list(self._begun), timeout=PULL_SECONDS)
        replies = []
        for reference in done:
            message, worker, room = self._begun.pop(reference)
            self._busy[worker] -= room
            ticket = message.metadata.message_id
            if ticket not in self._wanted:
                continue
            try:
                answer = taken(ray.get(reference))
            except ray.exceptions.RayError as error:
                if ticket not in self._suspects:  # it may have been another one's fault
                    self._suspects.add(ticket)
                    self._waiting = {ticket: message, **self._waiting}
                    continue
                answer = reason(error)
            replies.append(reply(answer, message))
        return replies

    def _fill(self) -> None:
        """Hand on messages while a worker has room, to whom has least to do."""
        while self._waiting and min(self._busy) < AHEAD:
            worker, ticket = self._busy.index(min(self._busy)), next(iter(self._waiting))
            room = AHEAD if ticket in self._suspects else 1
            if self._busy[worker] + room > AHEAD:
                break
            message = self._waiting.pop(ticket)
            records = message.content.array_records
            reference = self._workers[worker].perform.remote(
                phase_of(message),
                about(message),
                message.metadata.dst_node_id - 1,
                list(records),
                *(self._arrays(record) for record in records.values()),
            )
            self._begun[reference] = message, worker, room
            self._busy[worker] += room

    def _shared(self, arrays: Arrays) -> Any:
        return ray.put(packed(arrays))


def run_on_workers(
    settings: Settings, folder: Path, listeners: Sequence[Listener], class_counts: list[list[int]]
) -> None:
    """Run the server in this process and the clients on Ray workers; see `simulation.engine.simulate`."""
    allow_messages()
    settings, gpus = share_gpu(settings)
    with _ray(settings.workers):
        kind: Any = ray.remote(Worker)
        options = {"num_cpus": 1, "num_gpus": gpus, **REVIVE}
        workers = [kind.options(**options).remote(settings.clients) for _ in range(settings.workers)]
        serve(WorkersGrid(settings.clients, workers), settings, folder, listeners, class_counts)


@contextmanager
def _ray(workers: int) -> Iterator[None]:
    """Start Ray on this machine and stop it at the end; its processes find our modules where this one does.

    A Ray that this process has started before is used as it is, and goes on.
    """
    if ray.is_initialized():
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, before]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what later versions of Ray will do
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
