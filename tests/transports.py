"""A transport in one process whose clients are functions, for tests of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtta.client.node import Node, perform
from fedtta.client.state import MemoryState
from fedtta.messages.record import read_only
from fedtta.messages.replies import Reply
from fedtta.messages.requests import Request
from fedtta.messages.transport import Addressed, Answer, answer_of, reason_of
from fedtta.settings import Settings

#: A client: it returns its reply, or None when it never replies, or raises.
Client = Callable[[Request], Reply | None]


@dataclass
class Clock:
    """Seconds that pass only during sleep; each action of `later` is done at its time."""

    now: float = 0.0
    later: dict[float, Callable[[], object]] = field(default_factory=dict)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.later if when <= self.now]:
            self.later.pop(when)()


class FakeTransport:
    """Clients in this process; requests and replies go through their plain form, as on every wire.

    Parameters
    ----------
    clients : dict
        node id → client.
    order : callable
        Rearranges the requests of an exchange; answers come in this order.
    clock : Clock
        Passes the timeout when a client never replies.

    Attributes
    ----------
    sent : list of (Addressed, float)
        Every request that reached a client, with its timeout.
    """

    def __init__(
        self, clients: dict[int, Client], order: Callable[[list], list] = list, clock: Clock | None = None
    ) -> None:
        self.clients, self.order, self.clock = clients, order, clock or Clock()
        self.sent: list[tuple[Addressed, float]] = []

    def nodes(self) -> list[int]:
        return list(self.clients)

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        known: dict[int, Any] = {}
        silent: list[int] = []
        for one in self.order(list(requests)):
            if one.node not in self.clients:
                yield Answer(one.node, None, "failed", "the node is not there")
                continue
            self.sent.append((one, timeout))
            plain = type(one.request).from_record(one.request.to_record())
            answer = self._answer(one, read_only(plain, known))
            if answer is None:
                silent.append(one.node)
            else:
                yield answer
        if silent:
            self.clock.sleep(timeout)
        for node in silent:
            yield Answer(node, None, "late", f"no reply within {timeout:g} s")

    def _answer(self, one: Addressed, request: Request) -> Answer | None:
        try:
            reply = self.clients[one.node](request)
        except Exception as error:
            return Answer(one.node, None, "failed", reason_of(error))
        if reply is None:
            return None
        return answer_of(one, reply.to_record())

    def requests(self, kind: type[Request], node: int | None = None) -> list[Any]:
        """Return the requests of a kind that were sent, to one node or to all."""
        found = [one for one, _ in self.sent if type(one.request) is kind and node in (None, one.node)]
        return [one.request for one in found]


def devices(
    settings: Settings,
    ids: Callable[[int], int] = lambda partition: 900 - partition,
    watch: Callable[[int, Request], object] = lambda partition, request: None,
    config: Callable[[int], dict[str, Any]] = lambda partition: {},
    order: Callable[[list], list] = list,
) -> FakeTransport:
    """Return real clients in this process.

    Parameters
    ----------
    ids : callable
        partition → node id.
    watch : callable
        Called with partition and request before each reply; it may raise.
    config : callable
        partition → what the node overrides: settings of the group "node", and "role".
    """

    def client(partition: int) -> Client:
        own = dict(config(partition))
        node = Node(str(partition), MemoryState(), role=own.pop("role", None), settings=own)

        def answer(request: Request) -> Reply:
            watch(partition, request)
            return perform(request, node)

        return answer

    return FakeTransport({ids(i): client(i) for i in reversed(range(settings.clients))}, order)
