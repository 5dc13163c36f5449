"""A grid whose nodes are this process's own clients, many of which train at once (`client.together`).

No array is copied on the way, no process is started and nothing is sent: what remains of a round is its computation.
Everything but the local training of FedAvg and FedProx runs one client after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Message

from client.phases import Node, device_of, round_of, task_of
from client.state import MemoryState
from client.together import Result, fits, train_together
from client.work import Done, Work
from server.app import serve
from server.events import Listener
from settings import Settings
from simulation.blocking import BlockingGrid, about, allow_messages, phase_of, reply
from simulation.worker import performed, reason


class InProcessGrid(BlockingGrid):
    """A grid of this process's clients.

    Parameters
    ----------
    clients : int
    together : int
        Clients that train at once, at most.
    on_disk : bool
        Keep private state in the run's `state-dir`.
    """

    def __init__(self, clients: int, together: int, on_disk: bool = False) -> None:
        super().__init__(clients)
        self._nodes = {
            place + 1: Node(place, clients, MemoryState(), memory=None if on_disk else MemoryState())
            for place in range(clients)
        }
        self._together = together

    def _advance(self) -> list[Message]:
        return self._answer(self._next())

    def _next(self) -> list[Message]:
        """Take the oldest message, and with it those of the same round that can be answered at the same time."""
        first = next(iter(self._waiting.values()))
        chosen = [first]
        if first.metadata.message_type == "train":
            same = about(first)
            others = (m for m in self._waiting.values() if m is not first and m.metadata.message_type == "train")
            alike = (message for message in others if about(message) == same)  # looks no further than it has to
            chosen += itertools.islice(alike, self._together - 1)
        for message in chosen:
            del self._waiting[message.metadata.message_id]
        return chosen

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        """Answer messages that are about the same."""
        works = [self._work(message) for message in messages]
        nodes = [self._nodes[message.metadata.dst_node_id] for message in messages]
        if len(works) > 1:
            return [reply(one, m) for one, m in zip(_trained(works, nodes), messages, strict=True)]
        return [reply(performed(works[0], nodes[0]), messages[0])]

    def _work(self, message: Message) -> Work:
        """Return what a message asks for."""
        records = {name: self._arrays(record) for name, record in message.content.array_records.items()}
        return Work(phase_of(message), about(message), records)


def _trained(works: Sequence[Work], nodes: Sequence[Node]) -> list[Done | str]:
    """Do a training round of several clients, at once where that is possible."""
    try:
        devices = [device_of(work, node) for work, node in zip(works, nodes, strict=True)]
        round, task = round_of(works[0]), task_of(works[0])
        possible = fits(devices[0], task)
    except Exception:  # of whom it is shows one after another
        possible = False
    if not possible:
        return [performed(work, node) for work, node in zip(works, nodes, strict=True)]
    try:
        results: list[Result] = train_together(devices, round, task, [work.records["arrays"] for work in works])
    except Exception as error:  # such as too little memory: these clients fail, and the server goes on
        results = [RuntimeError(f"{error} (in one of {len(works)} clients that train at once: stacked-clients)")]
        results *= len(works)
    return [reason(one) if isinstance(one, Exception) else Done({"arrays": one[0]}, one[1]) for one in results]


def run_in_process(
    settings: Settings, folder: Path, listeners: Sequence[Listener], class_counts: list[list[int]], on_disk: bool
) -> None:
    """Run server and clients in this process; see `simulation.engine.simulate` and `InProcessGrid`."""
    allow_messages()
    grid = InProcessGrid(settings.clients, settings.stacked_clients, on_disk)
    serve(grid, settings, folder, listeners, class_counts)
