"""Hostile nodes at Flower's own SuperLink: its handlers, its state and its object store, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.message_handler import message_handler as fleet
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers as runtime
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.start_client_internal import _insert_message, _push_messages

from fedtta.messages import grid
from fedtta.messages.flower import reply_message
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import Telemetry, Trained
from fedtta.messages.requests import Identify, Observe, Train, TrainingTask
from fedtta.messages.transport import Addressed, Answer
from tests.server.test_nodes import IDENTITY

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
TRAIN = Train(settings="{}", run="r", round=1, task=TrainingTask("t"), arrays=ARRAYS)
REPLY = Trained(
    arrays=ARRAYS, train_loss=1.0, validation_total=1, validation_correct=1, seconds=0.1, num_examples=3,
)  # fmt: skip
TIMEOUT = 300.0


@dataclass
class RealSuperLink:
    """A SuperLink with one run; nodes pull and push by the handlers of its Fleet API."""

    state: Any
    run: int
    task: int
    nodes: list[int] = field(default_factory=list)

    @classmethod
    def started(cls, database: str, nodes: int) -> RealSuperLink:
        state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
        run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, "flwr-serverapp")
        task = state.get_run_info(run_ids=[run])[0].primary_task_id
        assert state.claim_task(task)
        assert state.activate_task(task)
        made = cls(state, run, task, [state.create_node("account", "name", bytes([i]), 30.0) for i in range(nodes)])
        assert all(state.activate_node(node, 30.0) for node in made.nodes)
        return made

    def grid(self) -> HttpGrid:
        """Flower's grid, which calls the handlers of the Runtime API without HTTP."""
        handlers = {
            "GetNodes": runtime.get_nodes, "PushMessages": runtime.push_messages,
            "PullMessages": runtime.pull_messages, "PushObject": runtime.push_object,
            "PullObject": runtime.pull_object, "ConfirmMessageReceived": runtime.confirm_message_received,
        }  # fmt: skip
        task = SimpleNamespace(run_id=self.run, task_id=self.task)
        calls = {
            name: lambda request, handler=handler: handler(request, self.state, task)
            for name, handler in handlers.items()
        }
        grid = HttpGrid(token="token")
        grid.set_run(self.state.get_run_info(run_ids=[self.run])[0])
        grid._client = SimpleNamespace(**calls)  # type: ignore[assignment]
        return grid

    def pull(self, node: int) -> Message | None:
        """Return the next message to a node, as a SuperNode pulls it."""
        request = PullMessagesRequest(node=Node(node_id=node))
        response = fleet.pull_messages(request, self.state, self.state.object_store)
        if not response.messages_list:
            return None
        name, contents = response.messages_list[0].metadata.message_id, {}
        for one in iterate_object_tree(response.message_object_trees[0]):
            wanted = PullObjectRequest(node=Node(node_id=node), run_id=self.run, object_id=one.object_id)
            while not (found := fleet.pull_object(wanted, self.state)).object_available:
                pass
            contents[one.object_id] = found.object_content
        message: Any = inflate_object_from_contents(name, contents)
        message.metadata.__dict__["_message_id"] = name
        return message

    def push(self, node: int, reply: Message, whole: bool = True) -> int:
        """Push a reply, or only announce it; return how many objects the SuperLink wants."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
        response, objects = fleet.push_messages(request, self.state), get_all_nested_objects(reply)
        for name in response.objects_to_push if whole else ():
            fleet.push_object(
                PushObjectRequest(
                    node=Node(node_id=node), run_id=self.run, object_id=name,
                    object_content=objects[name].deflate(), session_id=response.session_id,
                ),
                self.state,
            )  # fmt: skip
        return len(response.objects_to_push)


@pytest.fixture(params=["memory", "database"])
def link(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealSuperLink:
    """A SuperLink with three nodes."""
    made = RealSuperLink.started(FLWR_IN_MEMORY_DB_NAME if request.param == "memory" else str(tmp_path / "state.db"), 3)
    for name, value in (("_task_id", made.task), ("_run_id", made.run), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    return made


@contextmanager
def working(link: RealSuperLink, answers: dict[int, Callable[[Message], object]]) -> Iterator[None]:
    """Nodes that pull messages and answer them, in a thread."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            for node, answer in answers.items():
                if (message := link.pull(node)) is not None:
                    answer(message)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def exchanged(link: RealSuperLink, answers: list[Callable[[Message], object]], expected: int) -> dict[int, Answer]:
    """Send a request to each node; the time is over when so many have answered. Return the answers by position."""
    found: dict[int, Answer] = {}
    transport = GridTransport(link.grid(), None, lambda: TIMEOUT if len(found) == expected else 0.0)
    with working(link, dict(zip(link.nodes, answers, strict=True))):
        for one in transport.exchange([Addressed(node, TRAIN) for node in link.nodes], TIMEOUT):
            found[link.nodes.index(one.node)] = one
    return found


def honest(link: RealSuperLink, position: int) -> Callable[[Message], object]:
    return lambda message: link.push(link.nodes[position], reply_message(REPLY, message))


def test_a_reply_that_is_announced_and_never_sent_is_late_alone(link: RealSuperLink) -> None:
    other = replace(REPLY, arrays={"w": np.full((2, 3), 7, np.float32)})

    def announce(message: Message) -> None:
        assert link.push(link.nodes[1], reply_message(other, message), whole=False)

    found = exchanged(link, [honest(link, 0), announce, honest(link, 2)], 2)
    assert [found[i].kind for i in range(3)] == ["", "late", ""]
    assert found[1].reason == "a reply was announced, but not sent within 300 s"


def test_a_reply_in_another_node_s_name_is_not_used_and_the_true_one_is(link: RealSuperLink) -> None:
    """The SuperLink takes the forged reply and refuses the true one to the same message."""
    taken: list[int] = []

    def forge(message: Message) -> None:
        request = Message(RecordDict(), dst_node_id=link.nodes[1], message_type="train")
        request.metadata.__dict__["_message_id"] = message.metadata.message_id
        forged = reply_message(replace(REPLY, train_loss=9.0), request)
        forged.metadata.__dict__["_ttl"] = 100.0
        taken.append(link.push(link.nodes[0], forged))

    def answer(message: Message) -> None:
        if not taken:
            forge(message)
        taken.append(link.push(link.nodes[1], reply_message(REPLY, message)))

    found = exchanged(link, [honest(link, 0), answer, honest(link, 2)], 3)
    assert taken[0] > 0
    assert taken[1] == 0, "another version of Flower: the forged reply was not taken, or the true one was, too"
    assert [found[i].reply.train_loss for i in range(3)] == [1.0] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("enrolled", "told", "taken"),
    [
        ("site-a", "site-a", True), ("site-a", "site-b", False), ("0", "1", False), ("node-b", "site-b", False),
        ("node-1", "site-b", True), (None, "site-b", True),  # keys that were registered without a device's name
        ("node-1b", "site-b", False), ("a-node-1", "site-b", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("request_", [Identify(settings="{}", run="r"), Observe(settings="{}", run="r")])
def test_a_node_has_the_name_that_its_key_was_enrolled_under(
    enrolled: str | None, told: str, taken: bool, request_: Identify | Observe, link: RealSuperLink
) -> None:
    """With another one it would take that client's place in a run, also while the true one is away."""
    node = link.state.create_node("account", "owner", b"key", 30.0, name=enrolled)
    assert link.state.activate_node(node, 30.0)
    reply = replace(IDENTITY, name=told) if isinstance(request_, Identify) else Telemetry(name=told)
    with working(link, {node: lambda message: link.push(node, reply_message(reply, message))}):
        answer = next(GridTransport(link.grid()).exchange([Addressed(node, request_)], 60.0))
    if taken:
        assert answer.reply is not None
        assert answer.reply.name == told  # type: ignore[attr-defined]
    else:
        assert answer.reply is None
        assert answer.kind == "refused"
        assert answer.reason == f"{told}: the key of node {node} is enrolled as '{enrolled}'"


@pytest.mark.parametrize("request_", [Identify(settings="{}", run="r"), Observe(settings="{}", run="r")])
def test_a_key_without_a_device_s_name_takes_none_that_another_key_has(
    request_: Identify | Observe, link: RealSuperLink
) -> None:
    known, unnamed = (
        link.state.create_node("account", "owner", key, 30.0, name=name)
        for key, name in ((b"known", "site-a"), (b"unnamed", "node-1"))
    )
    assert all(link.state.activate_node(node, 30.0) for node in (known, unnamed))
    reply = replace(IDENTITY, name="site-a") if isinstance(request_, Identify) else Telemetry(name="site-a")
    with working(link, {unnamed: lambda message: link.push(unnamed, reply_message(reply, message))}):
        answer = next(GridTransport(link.grid()).exchange([Addressed(unnamed, request_)], 60.0))
    assert (answer.reply, answer.kind) == (None, "refused")
    assert answer.reason == f"site-a: the key of node {known} is enrolled under this name"


def test_a_reply_whose_objects_the_superlink_has_dropped_has_failed(link: RealSuperLink) -> None:
    """A line that is cut while a reply travels: the SuperLink drops what did not come whole in three minutes."""
    own: Any = link.grid()
    own._client.PullObject = lambda request: PullObjectResponse(object_found=False)
    with working(link, {link.nodes[0]: honest(link, 0)}):
        answer = next(GridTransport(own).exchange([Addressed(link.nodes[0], TRAIN)], 60.0))
    assert (answer.kind, answer.reason[:27]) == ("failed", "the reply lacks its object ")


@contextmanager
def one_behind(link: RealSuperLink, node: int) -> Iterator[None]:
    """A SuperNode with a reply to a run that has ended, by Flower's own functions; it answers after a moment."""
    store = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME).store()
    state, over = InMemoryNodeState(store), threading.Event()
    ended = Message(RecordDict(), dst_node_id=node, message_type="train")
    ended.metadata.__dict__ |= {"_message_id": "0" * 64, "_run_id": link.run}
    stale = Message(Error(1, "crashed"), reply_to=ended)
    _insert_message(stale, state, store)

    def send(message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        if message.metadata.reply_to_message_id == "0" * 64:
            raise RunNotRunningException
        link.push(node, message)
        return set(), ""

    def answer(message: Message) -> None:
        kind = Telemetry(name="a") if message.metadata.message_type == Observe.kind else REPLY
        _insert_message(reply_message(kind, message), state, store)

    def work() -> None:
        while not over.is_set():
            if (message := link.pull(node)) is None:
                over.wait(0.1)
                continue
            threading.Timer(0.2, answer, [message]).start()
            _push_messages(state, store, send, lambda *_: None)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("reminders", [3, 0])
def test_a_node_that_is_one_reply_behind_is_brought_to_push_it(
    link: RealSuperLink, reminders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "REMINDERS", reminders)
    node, wait = link.nodes[0], 60.0 if reminders else 3.0
    monkeypatch.setattr(grid, "REMIND", 1.0)
    transport = GridTransport(link.grid())
    with one_behind(link, node):
        answers = [next(transport.exchange([Addressed(node, TRAIN)], wait)) for _ in range(3)]
    assert [one.kind for one in answers] == ([""] * 3 if reminders else ["late"] * 3)
