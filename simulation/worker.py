"""A process that works for simulated clients, one after another; Ray starts it, Flower is not imported in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from client.phases import Node, perform
from client.state import MemoryState
from client.work import Done, Work
from messages.layout import Contiguous, packed, unpacked

log = logging.getLogger(__name__)

#: Records, metrics and identity of an answer, or the reason why there is none.
Sent = tuple[dict[str, dict[str, Contiguous]], dict[str, Any], dict[str, Any]] | str


class Worker:
    """What does the work: data and network stay in it from message to message, clients' private state on disk.

    Parameters
    ----------
    clients : int
        How many there are in the federation.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def perform(
        self,
        phase: str,
        config: Mapping[str, Any],
        partition: int,
        names: Sequence[str],
        *records: dict[str, Contiguous],
    ) -> Sent:
        """Do what a message asks of a client; records are read-only and may be shared with other processes.

        The answer is read before the next call: Ray copies it into shared memory.
        """
        work = Work(phase, config, {name: unpacked(record) for name, record in zip(names, records, strict=True)})
        return sent(performed(work, Node(partition, self.clients, MemoryState(), lends=True)))


def sent(done: Done | str) -> Sent:
    """Return an answer as it travels between processes; `taken` gives it back."""
    if isinstance(done, str):
        return done
    return {name: packed(arrays) for name, arrays in done.records.items()}, done.metrics, done.identity


def taken(answer: Sent) -> Done | str:
    """Return the answer that was `sent`."""
    if isinstance(answer, str):
        return answer
    records, metrics, identity = answer
    return Done({name: unpacked(arrays) for name, arrays in records.items()}, metrics, identity)


def performed(work: Work, node: Node) -> Done | str:
    """Do what a message asks for; what goes wrong is the client's answer, as in Flower."""
    try:
        return perform(work, node)
    except Exception as error:
        log.debug("a client failed", exc_info=error)
        return reason(error)


def reason(error: Exception) -> str:
    """Return what went wrong in words that can travel."""
    return f"{type(error).__name__}: {error}"
