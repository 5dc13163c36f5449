"""A process that works for simulated clients, one after another; Ray starts it, Flower is not imported in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from client.phases import Node, perform
from client.state import MemoryState
from client.work import Arrays, Done, Work

log = logging.getLogger(__name__)


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
        self, phase: str, config: Mapping[str, Any], partition: int, names: Sequence[str], *records: Arrays
    ) -> Done | str:
        """Do what a message asks of a client; records are read-only and may be shared with other processes."""
        work = Work(phase, config, dict(zip(names, records, strict=True)))
        return performed(work, Node(partition, self.clients, MemoryState()))


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
