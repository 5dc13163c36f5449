"""Identification of new nodes during a run: a node that stays silent must not hold up the rounds of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

from fedtta.messages.requests import Identify
from fedtta.messages.transport import Addressed, Answer, Transport

#: Seconds that a round waits for new nodes. One that takes longer takes part from a later round on.
PATIENCE = 5.0
POLL = 0.1  # seconds between two looks


@dataclass
class Identification:
    """Asks nodes who they are, beside the rounds if the transport can have two exchanges at once.

    Parameters
    ----------
    transport : Transport
    sleep : callable
        Waits for some seconds.
    """

    transport: Transport
    sleep: Callable[[float], None] = time.sleep
    _asked: set[int] = field(default_factory=set)
    _arrived: SimpleQueue[Answer | BaseException] = field(default_factory=SimpleQueue)

    def ask(self, nodes: Collection[int], request: Identify, timeout: float) -> None:
        """Ask nodes, apart from those whose answer is still awaited, and wait at most `PATIENCE` seconds for all."""
        fresh = [Addressed(node, request) for node in nodes if node not in self._asked]
        if not fresh:
            return
        self._asked.update(one.node for one in fresh)
        if not getattr(self.transport, "concurrent", False):
            self._exchange(fresh, timeout)
            return
        thread = Thread(target=self._exchange, args=(fresh, timeout), name="identification", daemon=True)
        thread.start()
        for _ in range(round(min(PATIENCE, timeout) / POLL)):
            if not thread.is_alive():
                break
            self.sleep(POLL)

    def answers(self) -> list[Answer]:
        """Return the answers that have come since the last time, by node.

        Raises
        ------
        BaseException
            Whatever ended the exchange.
        """
        found: list[Answer] = []
        while True:
            try:
                one = self._arrived.get_nowait()
            except Empty:
                return sorted(found, key=lambda answer: answer.node)
            if isinstance(one, BaseException):
                raise one
            self._asked.discard(one.node)
            found.append(one)

    def _exchange(self, requests: Sequence[Addressed], timeout: float) -> None:
        try:
            for answer in self.transport.exchange(requests, timeout):
                self._arrived.put(answer)
        except BaseException as error:  # the main thread raises it
            self._arrived.put(error)
