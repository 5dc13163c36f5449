"""A run in this process whose replies are kept as they arrive at the server."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedtta.client.sites import simulated_nodes
from fedtta.messages.flower import allow_messages
from fedtta.messages.replies import Reply, Summarized, Trained
from fedtta.messages.transport import Addressed, Answer, Transport
from fedtta.server.app import serve
from fedtta.server.events import Event
from fedtta.settings import Settings
from fedtta.simulation.vectorized import VectorizedTransport, at_once


@dataclass
class Spy:
    """A transport that keeps what clients answer, as it arrives at the server."""

    inner: Transport
    seen: list[tuple[Addressed, Reply]] = field(default_factory=list)

    def nodes(self) -> list[int]:
        """Return the nodes of the transport below."""
        return self.inner.nodes()

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`."""
        by_node = {one.node: one for one in requests}
        for answer in self.inner.exchange(requests, timeout):
            if isinstance(answer.reply, Trained | Summarized):
                self.seen.append((by_node[answer.node], answer.reply))
            yield answer


def watched(settings: Settings) -> tuple[Spy, list[Event]]:
    """Run once and return what arrived at the server, and the run's events."""
    allow_messages()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    events: list[Event] = []
    spy = Spy(VectorizedTransport(simulated_nodes(settings), at_once(settings)))
    with tempfile.TemporaryDirectory() as folder:
        serve(spy, settings, Path(folder) / "run", [events.append])
    return spy, events


def accuracy(events: Sequence[Event], method: str) -> float:
    """Return the mean accuracy over clients and test distributions, %."""
    return 100 * float(np.mean([e["accuracy"] for e in events if e["event"] == "evaluation" and e["method"] == method]))


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 3) if known else None
