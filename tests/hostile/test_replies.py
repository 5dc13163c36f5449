"""Hostile replies through the server's whole round loop and Flower's own bytes: none ends a run.

In each run every hostile node is honest but for one reply. That reply is refused by node and reason, the replies of the
honest clients count, and the run goes on to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Message
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as fuzzing
from hypothesis import strategies as st

from fedtta.messages import grid, inbox
from fedtta.messages.flower import allow_messages, reply_message, secret_of
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import Identity, Reply, Trained
from fedtta.messages.requests import Adapt, Evaluate, Identify, Observe, Train, TrainingTask
from fedtta.messages.transport import Addressed, Answer
from fedtta.server.app import serve
from fedtta.server.events import Leak
from fedtta.settings import Settings
from tests.hostile.cases import CASES, Case, changed, failure, withheld
from tests.hostile.clients import Attack, client
from tests.hostile.mutations import MUTATIONS, Mutation
from tests.hostile.superlink import Behaviour, Pushed, SuperLink, pushed
from tests.transports import Clock

HONEST = 12
LEARNING = Settings(
    rounds=1, image_size=8, model="resnet20-bn", model_options="depth=8;width=4", methods="fedavg,btfl,atp",
    shifts="original", rates_rounds=1, channels=1, device="cpu", node_timeout=0.5, round_timeout=25, min_clients=1,
)  # fmt: skip
ADAPTING = LEARNING.replace(rounds=0, methods="tent", collaborations="pfedbbn")


def run(folder: Path, settings: Settings, nodes: dict[int, Behaviour]) -> list[dict[str, Any]]:
    """Serve nodes on a clock of its own, and return the events."""
    clock = Clock()
    settings = settings.replace(clients=len(nodes))
    try:
        serve(GridTransport(SuperLink(nodes).grid(), None, clock, clock.sleep), settings, folder)
    finally:
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return events


def with_cases(cases: dict[str, Case], honest: int) -> dict[int, Behaviour]:
    """Honest nodes from 900, and one hostile node for each case from 1000."""
    nodes = {900 + i: client(str(i)) for i in range(honest)}
    return nodes | {1000 + i: client(str(honest + i), *one[:2]) for i, one in enumerate(cases.values())}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The events of two runs with all cases: those of test-time rounds, and the others."""
    allow_messages()
    folder, found = tmp_path_factory.mktemp("hostile"), {}
    for name, settings, honest in (("adapting", ADAPTING, HONEST), ("learning", LEARNING, 3 * HONEST)):
        cases = {key: one for key, one in CASES.items() if (one[0] is Adapt) == (name == "adapting")}
        events = run(folder / name, settings, with_cases(cases, honest))
        by_node = dict(enumerate(cases, 1000))
        found[name] = [{**event, "case": by_node.get(event.get("node_id", 0))} for event in events]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_reply_is_refused_by_node_and_reason(name: str, happened: dict[str, list[dict[str, Any]]]) -> None:
    kind, _, told = CASES[name]
    events = happened["adapting" if kind is Adapt else "learning"]
    refused = [event for event in events if event.get("case") == name]
    assert refused, "nothing was said of it"
    assert {event["event"] for event in refused} <= {"refused", "late", "failed", "left_alone"}
    assert all(told in event["reason"] for event in refused), refused[0]["reason"]
    assert all(len(event["reason"]) < 1000 and event["reason"].isprintable() for event in refused)


def test_runs_with_them_all_are_completed_with_the_honest_replies(happened: dict[str, list[dict[str, Any]]]) -> None:
    for events in happened.values():
        assert events[-1]["status"] == "completed"
    in_phase: dict[str, Any] = {event["event"]: event for event in happened["learning"]}
    for kind in ("round", "statistics", "rates_round"):
        assert set(range(3 * HONEST)) <= set(in_phase[kind]["replied"]), kind
    evaluated = {event["partition"] for event in happened["learning"] if event["event"] == "evaluation"}
    assert set(range(3 * HONEST)) <= evaluated
    assert in_phase["leak_check"]["leaked"] == 0


# -- the binding of a reply to its request, and time

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
TRAIN = Train(settings="{}", run="r", round=1, task=TrainingTask("t"), arrays=ARRAYS)
REPLY = Trained(
    arrays=ARRAYS, train_loss=1.0, validation_total=1, validation_correct=1, seconds=0.1, num_examples=3,
)  # fmt: skip


def good(message: Message) -> Pushed:
    return pushed(reply_message(REPLY, message))


def forged(message: Message) -> Pushed:
    """A reply by a node that does not know the message, only its id."""
    other = Message(message.content, dst_node_id=1, message_type="train")
    other.content.config_records["config"]["secret"] = "0" * 32
    other.metadata.__dict__["_message_id"] = message.metadata.message_id
    return pushed(reply_message(replace(REPLY, train_loss=9.0), other))


def exchanged(link: SuperLink, timeout: float = 25.0) -> tuple[dict[int, Answer], Clock]:
    """Send a request to each node; return the answers by node, and the clock."""
    clock = Clock()
    transport = GridTransport(link.grid(), None, clock, clock.sleep)
    answers = {one.node: one for one in transport.exchange([Addressed(node, TRAIN) for node in link.nodes], timeout)}
    return answers, clock


def test_of_a_forged_and_a_true_reply_the_true_one_counts() -> None:
    replies = iter([forged, forged, good])
    answers, _ = exchanged(SuperLink({1: lambda message: next(replies)(message), 2: good}))
    assert [answers[node].reply.train_loss for node in (1, 2)] == [1.0, 1.0]  # type: ignore[union-attr]


def test_a_node_that_never_repeats_the_secret_is_asked_three_times() -> None:
    sent = 0

    def counting(message: Message) -> Pushed:
        nonlocal sent
        sent += 1
        return forged(message)

    answers, _ = exchanged(SuperLink({1: counting}))
    assert (answers[1].kind, answers[1].reason, sent) == ("refused", "3 replies without the secret", 3)


def test_every_message_has_another_secret_and_so_another_id() -> None:
    seen: list[tuple[str, str | None]] = []

    def noting(message: Message) -> Pushed:
        seen.append((message.metadata.message_id, secret_of(message.content)))
        return good(message)

    for _ in range(3):
        exchanged(SuperLink({1: noting, 2: noting}))
    for column in zip(*seen, strict=True):
        assert len(set(column)) == 6
    assert all(len(secret or "") == 32 for _, secret in seen)


@pytest.mark.parametrize("others", [0, 9])
def test_a_reply_that_is_announced_and_never_sent_holds_up_nobody(others: int) -> None:
    """Flower itself waits for its objects for minutes."""

    def never(message: Message) -> Pushed:
        return withheld(message, REPLY)

    order: list[int] = []
    link = SuperLink({1: never, **{2 + i: good for i in range(others)}, 50: never})
    clock = Clock()
    transport = GridTransport(link.grid(), None, clock, clock.sleep)
    for one in transport.exchange([Addressed(node, TRAIN) for node in link.nodes], 25):
        order.append(one.node)
        assert (clock.now == 0) == (one.reply is not None)
    assert sorted(order[-2:]) == [1, 50]
    assert 25 <= clock.now <= 26
    assert link.forgotten >= 2, "the SuperLink keeps what was announced"


def test_a_reply_to_a_reminder_that_ends_after_the_next_reminders_is_no_error() -> None:
    """It is announced at 60 s, the next reminders go out at 180 s, and at 240 s the SuperLink has dropped it."""
    clock = Clock()

    class Dropping(SuperLink):
        def PullObject(self, request: Any) -> Any:
            response = super().PullObject(request)
            if clock.now > 240:
                response.object_found = False
            return response

    def silent(message: Message) -> Pushed | None:
        return withheld(message, REPLY) if message.metadata.message_type == Observe.kind else None

    transport = GridTransport(Dropping({1: silent}).grid(), None, clock, clock.sleep)
    (answer,) = transport.exchange([Addressed(1, TRAIN)], 600)
    assert (answer.kind, answer.reason) == ("late", "no reply within 600 s")


def test_objects_that_come_one_by_one_make_a_reply() -> None:
    class Slow(SuperLink):
        def PullObject(self, request: Any) -> Any:
            response = super().PullObject(request)
            if self.pulls % 3:
                response.object_available = False
            return response

    answers, clock = exchanged(Slow({1: good}))
    assert answers[1].reply is not None
    assert 0 < clock.now < 25


@pytest.mark.parametrize("first", [True, False])
def test_replies_that_have_come_in_part_do_not_fill_the_memory(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each reply the object that its node pushes first, or last, is not there for five seconds."""
    monkeypatch.setattr(inbox, "HELD", 10_000)
    monkeypatch.setattr(inbox, "SMALL", 100)
    many, clock = replace(REPLY, arrays={f"w{i}": np.full(500, i, np.float32) for i in range(5)}), Clock()
    late: set[str] = set()
    most = 0

    def behaviour(message: Message) -> Pushed:
        reply = pushed(reply_message(many, message))
        names = [one for one in reply.objects if one != reply.message]
        late.add(names[0] if first else reply.message)
        return reply

    class Slow(SuperLink):
        def PullObject(self, request: Any) -> Any:
            nonlocal most
            most = max(most, sum(one.size for one in found[0]._coming.values()))
            response = super().PullObject(request)
            if request.object_id in late and clock.now < 5:
                response.object_available = False
            return response

    found: list[inbox.HttpInbox] = []
    made = inbox.HttpInbox.__init__
    monkeypatch.setattr(inbox.HttpInbox, "__init__", lambda self, *args: (found.append(self), made(self, *args))[1])
    link = Slow(dict.fromkeys(range(1, 21), behaviour))
    transport = GridTransport(link.grid(), None, clock, clock.sleep)
    answers = list(transport.exchange([Addressed(node, TRAIN) for node in link.nodes], 25))
    assert [one.reason for one in answers if one.reply is None] == []
    assert len(answers) == 20
    assert 5 <= clock.now < 25
    assert most <= 10_000 + 12_000, "what is held, and one reply more"


@pytest.mark.parametrize("large", [False, True])
def test_small_replies_are_fetched_together_and_large_ones_one_at_a_time(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: replies of which objects are being fetched at the same moment, after the first ones."""
    monkeypatch.setattr(inbox, "SMALL", 10 if large else 1_000_000)
    busy: Counter[int] = Counter()
    owner: dict[str, int] = {}
    lock, most, answered = threading.Lock(), 0, 0

    def behaviour(message: Message) -> Pushed:
        arrays = {"w": np.full((2, 3), message.metadata.dst_node_id, np.float32)}
        reply = pushed(reply_message(replace(REPLY, arrays=arrays, num_examples=len(owner) + 1), message))
        owner.update(dict.fromkeys(reply.objects, message.metadata.dst_node_id))
        return reply

    class Slow(SuperLink):
        def PullObject(self, request: Any) -> Any:
            nonlocal most
            node = owner[request.object_id]
            with lock:
                busy[node] += 1
                most = max(most, len(+busy) if answered else 0)
            time.sleep(0.005)
            response = super().PullObject(request)
            with lock:
                busy[node] -= 1
            return response

    link, clock = Slow(dict.fromkeys(range(1, 31), behaviour)), Clock()
    for one in GridTransport(link.grid(), None, clock, clock.sleep).exchange(
        [Addressed(node, TRAIN) for node in link.nodes], 60
    ):
        assert one.reply is not None, one.reason
        assert float(one.reply.arrays["w"][0, 0]) == one.node  # type: ignore[attr-defined]
        answered += 1
    assert answered == 30
    assert most == 1 if large else 1 < most <= inbox.COMPANY


def test_replies_are_fetched_while_requests_are_still_being_sent() -> None:
    link, clock = SuperLink(dict.fromkeys(range(1, 3 * grid.BATCH), good)), Clock()
    seen: list[int] = []
    flower = link.grid()
    push = flower.push_messages

    def pushing(messages: Any) -> Any:
        seen.append(len(answered))
        return push(messages)

    answered: list[int] = []
    flower.push_messages = pushing  # type: ignore[method-assign]
    requests = [Addressed(node, TRAIN) for node in link.nodes]
    for one in GridTransport(flower, None, clock, clock.sleep).exchange(requests, 60):
        answered.append(one.node)
    assert seen == [0, grid.BATCH, 2 * grid.BATCH]


@pytest.mark.parametrize(("call", "nodes"), [("PullObject", 1), ("PullObject", 2), ("PushObject", 1)])
def test_a_signal_ends_a_call_of_a_superlink_that_is_gone(call: str, nodes: int) -> None:
    """Flower's watch over the parent process signals from a thread of its own; one reply or two: both thread pools."""

    class Ended(Exception):
        """What the signal raises, as Flower's handler raises SystemExit."""

    def end(*_: object) -> None:
        raise Ended

    def unanswered(_: Any) -> Any:
        asked.set()
        over.wait()
        raise ConnectionError

    def parent_has_ended() -> None:
        asked.wait()
        time.sleep(0.3)  # the main thread waits by now
        signal.raise_signal(signal.SIGUSR1)

    asked, over = threading.Event(), threading.Event()
    link = SuperLink(dict.fromkeys(range(1, nodes + 1), good))
    setattr(link, call, unanswered)
    before = signal.signal(signal.SIGUSR1, end)
    try:
        threading.Thread(target=parent_has_ended, daemon=True).start()
        with pytest.raises(Ended):
            exchanged(link)
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, before)


def test_a_reply_that_makes_the_superlink_fail_is_refused_alone() -> None:
    class Failing(SuperLink):
        def PullMessages(self, request: Any) -> Any:
            nodes = [self.waiting[one].metadata.dst_node_id for one in request.message_ids if one in self.waiting]
            if 1 in nodes:
                raise httpx.HTTPStatusError("500", request=None, response=None)  # type: ignore[arg-type]
            return super().PullMessages(request)

    answers, _ = exchanged(Failing({1: good, 2: good, 3: good}))
    assert answers[1].kind == "refused"
    assert "HTTPStatusError" in answers[1].reason
    assert all(answers[node].reply is not None for node in (2, 3))


def test_a_reply_is_no_larger_than_what_was_sent_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "REPLY_BYTES", 2000)

    def large(message: Message) -> Pushed:
        return pushed(reply_message(replace(REPLY, arrays={"w": np.zeros(1000, np.float32)}), message))

    link = SuperLink({1: large, 2: good})
    answers, _ = exchanged(link)
    assert answers[1].reason == "a reply of more than 2096 bytes"
    assert answers[2].reply is not None
    monkeypatch.setattr(inbox, "OBJECTS", 4)
    assert "objects; allowed are at most 4" in exchanged(SuperLink({1: good}))[0][1].reason


# -- claims, and the texts of nodes


@pytest.mark.parametrize(("liars", "ends"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_leak_that_most_clients_report_ends_the_run_and_no_other(liars: int, ends: bool, tmp_path: Path) -> None:
    nodes = {900 + i: client(str(i), Evaluate, changed(leaked=1) if i < liars else None) for i in range(4)}
    settings = LEARNING.replace(methods="fedavg")
    if ends:
        with pytest.raises(Leak, match=f"{liars} of 40 test samples"):
            run(tmp_path / "r", settings, nodes)
        return
    events = run(tmp_path / "r", settings, nodes)
    assert [event["partition"] for event in events if event["event"] == "refused"] == list(range(liars))
    assert events[-1]["status"] == "completed"


@pytest.mark.drawn
def test_texts_of_nodes_move_no_cursor_and_are_no_markup(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[2J\u202e<script>alert(1)</script>[red]"
    attacks: list[Attack] = [changed(served=text), failure(text)]

    def noted(message: Message, reply: Reply) -> Reply:
        return replace(reply, note=text, notes=[text])  # type: ignore[call-arg]

    nodes = {900 + i: client(str(i), Evaluate, attack) for i, attack in enumerate(attacks)}
    nodes |= {950: client("2", Identify, noted), 951: client("3"), 952: client("4")}
    run(tmp_path / "r", LEARNING.replace(methods="fedavg"), nodes)
    shown = capfd.readouterr()
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    for output in (shown.err, shown.out, page, (tmp_path / "r" / "metrics.jsonl").read_text()):
        assert not {"\x1b", "\u202e"} & set(output)
        assert "\\u001b" not in output
    assert "<script>alert(1)</script>[red]" in shown.err, "brackets are text, not markup"


# -- random replies

#: Replies that the fuzzer tries, about: `FEDTTA_FUZZ=10000` for all of them.
REPLIES = int(os.environ.get("FEDTTA_FUZZ", "200"))
NODES = 30  # hostile ones of a run


@pytest.mark.timeout(max(600, REPLIES))
def test_no_random_reply_ends_a_run(tmp_path: Path) -> None:
    """A mutation for each hostile node, which it applies in all phases; a few apply it to their identity, too."""
    tried: Counter[str] = Counter()
    refused = runs = 0

    def counted(mutation: Mutation, identities: bool) -> Attack:
        def attack(message: Message, reply: Reply) -> Reply | Pushed | None:
            if isinstance(reply, Identity) and not identities:
                return reply
            tried[reply.kind] += 1
            return mutation(message, reply)

        return attack

    @fuzzing(max_examples=max(3, REPLIES // 80), phases=[Phase.generate], database=None, derandomize=True,
             suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(MUTATIONS, min_size=NODES, max_size=NODES))
    def fuzz(mutations: list[Mutation]) -> None:
        nonlocal refused, runs
        runs += 1
        nodes = {900 + i: client(str(i)) for i in range(HONEST)}
        for i, mutation in enumerate(mutations):
            nodes[1000 + i] = client(str(HONEST + i), attack=counted(mutation, i % 5 == 0))
        folder = tmp_path / str(runs)
        events = run(folder, LEARNING if runs % 2 else ADAPTING, nodes)
        assert events[-1]["status"] == "completed"
        refused += sum(event["event"] in ("refused", "failed", "late", "left_alone") for event in events)
        shutil.rmtree(folder)

    fuzz()
    assert sum(tried.values()) >= REPLIES, tried
    assert refused > REPLIES // 3, "most random replies are refused"
    print(f"{sum(tried.values())} replies in {runs} runs, {refused} refused: {dict(tried)}")
