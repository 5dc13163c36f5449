"""Flower messages and a grid in one process, for tests of strategies and server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid


def record(**arrays: Any) -> ArrayRecord:
    """Make an array record; values are numpy arrays."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def request(node: int = 1, kind: str = "train", content: RecordDict | None = None) -> Message:
    """Make a message that has been sent."""
    message = Message(content or RecordDict({"config": ConfigRecord({})}), dst_node_id=node, message_type=kind)
    message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
    return message


def reply(
    arrays: ArrayRecord | None = None, examples: float = 1, node: int = 1, name: str = "arrays", **metrics: Any
) -> Message:
    """Make a reply with one array record (none when None) and one metric record."""
    content = RecordDict({"metrics": MetricRecord({"num-examples": examples, **metrics})})
    if arrays is not None:
        content[name] = arrays
    return Message(content, reply_to=request(node))


class LocalGrid(Grid):
    """A grid whose nodes are functions: message in, reply content out; an exception becomes an error reply.

    A node that returns None never answers.
    """

    def __init__(
        self, nodes: dict[int, Callable[[Message], RecordDict | None]], order: Callable[[list], list] = list
    ) -> None:
        self.nodes, self.order = nodes, order
        self.waiting: dict[str, Message] = {}
        self.sent: list[Message] = []

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self.waiting[name] = message
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in self.order(list(message_ids)):
            message = self.waiting[name]
            try:
                content = self.nodes[message.metadata.dst_node_id](message)
            except Exception as error:
                replies.append(Message(Error(code=2, reason=str(error)), reply_to=message))
                continue
            if content is not None:
                replies.append(Message(content, reply_to=message))
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
