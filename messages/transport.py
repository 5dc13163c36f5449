"""The interface of everything that runs clients: requests in, answers out.

Five transports implement it: one process that trains many clients at once (`fedtta.simulation.vectorized`), Ray workers
(`fedtta.simulation.workers`), Flower's simulation and SuperNodes over gRPC (both
`fedtta.messages.flower.GridTransport`), and the relay to resident agents (`fedtta.client.relay`). One contract test
runs against all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fedtta.messages.record import Record, read_only
from fedtta.messages.replies import Reply
from fedtta.messages.requests import Request


@dataclass(frozen=True)
class Addressed:
    """A request and the id of the node that it is for."""

    node: int
    request: Request


@dataclass(frozen=True)
class Answer:
    """What came back from a node.

    Parameters
    ----------
    node : int
    reply : Reply or None
        None when there is none.
    kind : str
        Why not: "failed" (the client or its node failed), "late" (no reply in time) or "refused" (a reply that cannot
        be read).
    reason : str
        One line for people.
    """

    node: int
    reply: Reply | None
    kind: Literal["", "failed", "late", "refused"] = ""
    reason: str = ""


class Transport(Protocol):
    """Delivers requests to clients and collects their replies."""

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected."""

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """Send requests and yield one answer for each, as they come.

        A client that fails does not affect the others. After `timeout` seconds the requests without a reply are
        answered as late; what still comes for them is dropped. Arrays in requests and replies are read-only; those of a
        request may be shared by many.
        """


def answer_of(one: Addressed, record: Record) -> Answer:
    """Return the answer to a request whose reply has this plain form; its arrays are read-only.

    A reply of another kind, or with a field that is missing or out of range, is refused.
    """
    expected = type(one.request).reply
    if record.kind != expected.kind:
        return Answer(one.node, None, "refused", f"a reply of kind {record.kind!r}: allowed is {expected.kind!r}")
    try:
        return Answer(one.node, read_only(expected.from_record(record)))
    except ValueError as error:
        return Answer(one.node, None, "refused", str(error))


def unknown_node(one: Addressed) -> Answer:
    """Return the answer to a request for a node that the transport does not have."""
    return Answer(one.node, None, "failed", "the node is not there")


def late(one: Addressed, timeout: float) -> Answer:
    """Return the answer to a request that has no reply within `timeout` seconds."""
    return Answer(one.node, None, "late", f"no reply within {timeout:g} s")


def reason_of(error: Exception) -> str:
    """Return what went wrong in words that can travel."""
    return f"{type(error).__name__}: {error}"
