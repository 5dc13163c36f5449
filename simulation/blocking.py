"""A grid of this machine's own clients: messages are answered while somebody asks for their replies."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from client.app import COUNTED, to_content
from client.work import Arrays, Done

RAISED = 2  # Flower's code for an app that raised
PULL_SECONDS = 0.5  # a pull answers for about so long, so that deadlines are looked at


class BlockingGrid(Grid):
    """A grid of clients 0, 1, ... that are nodes 1, 2, ...

    Parameters
    ----------
    clients : int
    """

    #: The server need not wait before it asks again: asking is what makes clients work.
    blocking = True

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._waiting: dict[str, Message] = {}  # in order; nobody works on them yet
        self._known: dict[int, tuple[ArrayRecord, Any]] = {}  # by identity: records, which stay alive so long
        self._run: Any = None

    def set_run(self, run: Any) -> None:
        """Keep the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """Return the run."""
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, *args: Any) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes."""
        return list(range(1, self.clients + 1))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages until somebody asks for their replies, and return their tickets."""
        tickets = []
        for message in messages:
            ticket = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = ticket
            self._waiting[ticket] = message
            tickets.append(ticket)
        return tickets

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer some of the messages; what is not asked for is forgotten, as after a deadline."""
        self._forget_all_but(set(message_ids))
        replies: list[Message] = []
        start = time.monotonic()
        while self._open():
            replies += self._advance()
            if time.monotonic() - start >= PULL_SECONDS:
                break
        if not self._open():
            self._known = {}
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Answer messages; those that begin after `timeout` seconds are not answered."""
        tickets, replies = set(self.push_messages(messages)), []
        end = None if timeout is None else time.monotonic() + timeout
        while tickets and (end is None or time.monotonic() < end):
            for reply in self.pull_messages(tickets):
                tickets.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies

    @abstractmethod
    def _advance(self) -> list[Message]:
        """Work on messages for a moment, and return replies that are there; there may be none."""

    def _arrays(self, record: ArrayRecord) -> Any:
        """Return a record's arrays as clients get them; a record that messages have in common is read once."""
        if id(record) not in self._known:
            self._known[id(record)] = record, self._shared({name: array.numpy() for name, array in record.items()})
        return self._known[id(record)][1]

    def _shared(self, arrays: Arrays) -> Any:
        """Put arrays where clients find them."""
        return arrays

    def _open(self) -> bool:
        """Return whether replies are still to come."""
        return bool(self._waiting)

    def _forget_all_but(self, wanted: set[str]) -> None:
        """Forget the other messages."""
        self._waiting = {ticket: message for ticket, message in self._waiting.items() if ticket in wanted}


def reply(done: Done | str, message: Message) -> Message:
    """Return an answer, or the reason why there is none, as a reply; arrays go by reference."""
    if isinstance(done, str):
        return Message(Error(code=RAISED, reason=done), reply_to=message)
    if message.metadata.message_type.rpartition(".")[2] in COUNTED:
        done.metrics["context-bytes"] = 0  # nothing travels beside the message
    return Message(to_content(done), reply_to=message)


def phase_of(message: Message) -> str:
    """Return which of `client.phases.PHASES` a message asks for."""
    return str(message.metadata.message_type).rpartition(".")[2]


def about(message: Message) -> dict[str, Any]:
    """Return what a message asks for, without its arrays."""
    return dict(message.content.config_records["config"])


def allow_messages() -> None:
    """Give this process the identity without which Flower makes no message."""
    for name in ("task_id", "run_id", "node_id"):
        setattr(TaskIdentity, name, 1)
