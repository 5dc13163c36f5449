"""A SuperLink in memory whose nodes are functions: real messages, objects and bytes through Flower's own `HttpGrid`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid


@dataclass
class Pushed:
    """A reply as a node pushes it.

    Parameters
    ----------
    message : str
        The id of the message's own object.
    objects : dict
        id → bytes.
    withheld : set of str
        Objects that the node announces and never sends.
    """

    message: str
    objects: dict[str, bytes]
    withheld: set[str] = field(default_factory=set)


#: A node: it returns what it pushes, or None when it never replies, or raises.
Behaviour = Callable[[Message], RecordDict | Pushed | None]


def pushed(reply: Message) -> Pushed:
    """Return a message as an honest node pushes it."""
    objects = get_all_nested_objects(reply)
    return Pushed(reply.object_id, {name: one.deflate() for name, one in objects.items()})


def reply_to(message: Message, content: RecordDict) -> Pushed:
    """Return a reply with this content, pushed."""
    return pushed(Message(content, reply_to=message))


def made(kind: str, children: list[str], body: bytes) -> bytes:
    """Return the bytes of an object of any form."""
    head = f"{kind}{HEAD_VALUE_DIVIDER}{','.join(children)}{HEAD_VALUE_DIVIDER}{len(body)}"
    return head.encode() + HEAD_BODY_DIVIDER + body


def rebuilt(one: Pushed, name: str, content: bytes) -> Pushed:
    """Return a reply in which one object has other bytes; the ids of those above it change with it."""
    objects = dict(one.objects)
    del objects[name]
    renamed = {name: get_object_id(content)}
    objects[renamed[name]] = content
    for above, value in one.objects.items():  # children come before their parents
        if above != name and any(old.encode() in value for old in renamed):
            for old, new in list(renamed.items()):
                value = value.replace(old.encode(), new.encode())
            del objects[above]
            renamed[above] = get_object_id(value)
            objects[renamed[above]] = value
    return Pushed(renamed.get(one.message, one.message), objects)


class SuperLink:
    """What `HttpGrid` asks a SuperLink for.

    Parameters
    ----------
    nodes : dict
        node id → behaviour.

    Attributes
    ----------
    pulls, forgotten : int
        Objects that the server has asked for, and replies that it has confirmed.
    """

    def __init__(self, nodes: dict[int, Behaviour]) -> None:
        self.nodes = nodes
        self.objects: dict[str, bytes] = {}
        self.waiting: dict[str, Any] = {}  # message id → the message without its content
        self.pulls = self.forgotten = 0

    def grid(self) -> HttpGrid:
        """Return Flower's grid over it."""
        grid = HttpGrid(token="token")
        grid.set_run(Run.create_empty(1))
        grid._client = self  # type: ignore[assignment]
        return grid

    def close(self) -> None:
        """Nothing is open."""

    def GetNodes(self, _: Any) -> GetNodesResponse:
        """Return the nodes."""
        return GetNodesResponse(nodes=[NodeInfo(node_id=one) for one in self.nodes])

    def PushMessages(self, request: Any) -> PushAppMessagesResponse:
        """Take messages of the server."""
        for message in request.messages_list:
            self.waiting[message.metadata.message_id] = message
        trees = [one.object_id for tree in request.message_object_trees for one in _flat(tree)]
        ids = [message.metadata.message_id for message in request.messages_list]
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=trees, session_id="s")

    def PushObject(self, request: Any) -> Any:
        """Take an object of a message of the server."""
        self.objects[request.object_id] = request.object_content
        return type("Response", (), {"stored": True})()

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        """Let the nodes answer; each reply is announced once."""
        response = PullAppMessagesResponse()
        for ticket in request.message_ids:
            if ticket not in self.waiting:
                continue
            message: Any = inflate_object_from_contents(ticket, dict(self.objects))
            message.metadata.__dict__["_message_id"] = ticket
            reply = self._answered(message)
            del self.waiting[ticket]
            if reply is None:
                continue
            for name, content in reply.objects.items():  # one that the SuperLink has already stays
                self.objects[name] = self.objects.get(name) or (b"" if name in reply.withheld else content)
            told = message_to_proto(remove_content_from_message(Message(RecordDict(), reply_to=message)))
            told.metadata.message_id = reply.message
            response.messages_list.append(told)
            children = [ObjectTree(object_id=name) for name in reply.objects if name != reply.message]
            response.message_object_trees.append(ObjectTree(object_id=reply.message, children=children))
        return response

    def _answered(self, message: Message) -> Pushed | None:
        try:
            reply = self.nodes[message.metadata.dst_node_id](message)
        except Exception as error:
            return pushed(Message(Error(code=2, reason=str(error)), reply_to=message))
        return reply_to(message, reply) if isinstance(reply, RecordDict) else reply

    def PullObject(self, request: Any) -> PullObjectResponse:
        """Return an object of a reply."""
        self.pulls += 1
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        """Forget a reply."""
        self.forgotten += 1
        self.objects.pop(request.message_object_id, None)


def _flat(tree: ObjectTree) -> list[ObjectTree]:
    return [one for child in tree.children for one in _flat(child)] + [tree]
