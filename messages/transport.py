"""The interface of everything that runs clients: requests in, answers out.

Five transports implement it: one process that trains many clients at once (`fedtta.simulation.vectorized`), Ray workers
(`fedtta.simulation.workers`), Flower's simulation and SuperNodes over gRPC (both
`fedtta.messages.grid.GridTransport`), and the relay to resident agents (`fedtta.client.relay`). One contract test
runs against all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fedtta.messages.arrays import array_bytes
from fedtta.messages.record import Record, printable, read_only
from fedtta.messages.replies import Reply
from fedtta.messages.requests import Request

LOG = logging.getLogger(__name__)


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
        One line for people; a node may have chosen the words.
    bytes : int
        Of all arrays in the reply, as it came.
    """

    node: int
    reply: Reply | None
    kind: Literal["", "failed", "late", "refused"] = ""
    reason: str = ""
    bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


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
    """Return the answer to a request whose reply has this plain form; see `read_answer`."""
    return read_answer(one, lambda: record)


def read_answer(one: Addressed, read: Callable[[], Record]) -> Answer:
    """Return the answer to a request whose reply `read` returns in plain form; its arrays are read-only.

    A reply of another kind, or with a field that is missing or out of range, is refused, and so is an update that does
    not fit the model that was sent. So is one that makes its reading raise anything else: a node chooses the bytes, and
    none of them may end the run.
    """
    expected = type(one.request).reply
    try:
        record = read()
        if record.kind != expected.kind:
            raise ValueError(f"a reply of kind {record.kind!r}: allowed is {expected.kind!r}")
        reply = one.request.decoded(expected.from_record(record))
        return Answer(one.node, read_only(reply), bytes=sum(map(array_bytes, record.arrays.values())))
    except Exception as error:
        return Answer(one.node, None, "refused", unreadable(f"reply of node {one.node}", error))


def unreadable(what: str, error: Exception) -> str:
    """Return why something that a node sent is refused, and log it.

    A ValueError says so itself. Anything else was not foreseen, and its type is named.
    """
    foreseen = isinstance(error, ValueError)
    reason = str(error) if foreseen else f"cannot be read: {reason_of(error)}"
    level = logging.INFO if foreseen else logging.WARNING
    LOG.log(level, "%s is refused: %s: %s", what, type(error).__name__, printable(reason))
    return reason


def unknown_node(one: Addressed) -> Answer:
    """Return the answer to a request for a node that the transport does not have."""
    return Answer(one.node, None, "failed", "the node is not there")


def late(one: Addressed, timeout: float) -> Answer:
    """Return the answer to a request that has no reply within `timeout` seconds."""
    return Answer(one.node, None, "late", f"no reply within {timeout:g} s")


def reason_of(error: Exception) -> str:
    """Return what went wrong in words that can travel."""
    return f"{type(error).__name__}: {error}"
