"""Grids as transports: one answer for each request, deadlines and windows; `tests/hostile` has what nodes may break."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedtta.messages import grid as grids
from fedtta.messages.flower import in_blocks, reply_message, secret_of, to_content
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Observe
from fedtta.messages.transport import Addressed
from tests.flower import LocalGrid
from tests.hostile.superlink import SuperLink
from tests.messages.test_flower import ARRAYS, trained, training
from tests.transports import Clock


def test_a_grid_answers_each_request_once_whatever_its_nodes_do() -> None:
    def good(message: Message) -> RecordDict:
        return to_content(trained().to_record(), secret_of(message.content))

    def bad(message: Message) -> RecordDict:
        return to_content(trained(validation_total=-1).to_record(), secret_of(message.content))

    def broken(_: Message) -> RecordDict:
        raise RuntimeError("out of memory")

    grid, clock = LocalGrid({1: good, 2: bad, 3: broken, 4: lambda _: None}), Clock()
    transport = GridTransport(grid, None, clock, clock.sleep)
    assert transport.nodes() == [1, 2, 3, 4]
    requests = [Addressed(node, training(arrays=ARRAYS)) for node in (1, 2, 3, 4, 9)]
    answers = {one.node: one for one in transport.exchange(requests, 5.0)}
    assert len(answers) == 5
    assert isinstance(answers[1].reply, Trained)
    assert {node: answers[node].kind for node in answers} == {1: "", 2: "refused", 3: "failed", 4: "late", 9: "failed"}
    assert "validation-total = -1" in answers[2].reason
    assert answers[3].reason.endswith("out of memory")
    assert answers[4].reason == "no reply within 5 s"
    assert clock.now >= 5.0
    assert all(message.metadata.ttl == 5.0 for message in grid.sent)
    first = next(iter(transport.exchange(requests[:1], 5.0)))
    assert first.reply is not None


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("<class 'PermissionError'>:<'policy phases: no train'>", "PermissionError: policy phases: no train"),
        ("<class 'torch.cuda.OutOfMemoryError'>:<'first\nlast'>", "last"),
        ("The FAB could not be verified.", "The FAB could not be verified."),
        ("", "no reason given"),
    ],
)
def test_an_error_of_a_node_is_told_in_plain_words(reason: str, told: str) -> None:
    def failing(_: Message) -> RecordDict:
        raise RuntimeError(reason)  # which the grid's error reply repeats

    (answer,) = GridTransport(LocalGrid({1: failing})).exchange([Addressed(1, training())], 5.0)
    assert (answer.kind, answer.reason) == ("failed", f"error 2: {told}")


def test_a_window_bounds_the_messages_under_way() -> None:
    most = 0

    class Counting(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            nonlocal most
            most = max(most, len(list(message_ids)))
            return super().pull_messages(list(message_ids)[:1])

    def good(message: Message) -> RecordDict:
        return to_content(trained().to_record(), secret_of(message.content))

    clock = Clock()
    grid = Counting(dict.fromkeys(range(9), good))
    answers = list(
        GridTransport(grid, 2, clock, clock.sleep).exchange([Addressed(n, training()) for n in range(9)], 60)
    )
    assert sorted(one.node for one in answers if one.reply is not None) == list(range(9))
    assert most == 2
    with pytest.raises(ValueError, match="window = 0: allowed is 1 or more"):
        GridTransport(grid, 0)


def test_a_full_window_is_looked_at_now_and_then_while_more_requests_wait() -> None:
    """The replies are there after a second: some 20 looks, `POLL` apart, and not as many as a core can do."""
    looks = 0

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            nonlocal looks
            looks += 1
            assert looks < 100, "the server spins"
            return super().pull_messages(message_ids) if clock.now >= 1 else []

    clock = Clock()
    grid = Slow(dict.fromkeys(range(3), lambda message: to_content(trained().to_record(), secret_of(message.content))))
    requests = [Addressed(node, training()) for node in range(3)]
    answers = list(GridTransport(grid, 2, clock, clock.sleep).exchange(requests, 60))
    assert [one.kind for one in answers] == [""] * 3


def test_requests_are_pushed_in_batches_and_those_not_taken_fail_alone() -> None:
    sizes = []

    class Refusing(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            sizes.append(len(messages))
            tickets = super().push_messages(messages)
            return [None if one.metadata.dst_node_id == 70 else t for one, t in zip(messages, tickets, strict=True)]

    def good(message: Message) -> RecordDict:
        return to_content(trained().to_record(), secret_of(message.content))

    clock, grid = Clock(), Refusing(dict.fromkeys(range(130), good))
    requests = [Addressed(node, training(arrays=ARRAYS)) for node in range(130)]
    answers = list(GridTransport(grid, None, clock, clock.sleep).exchange(requests, 60.0))
    assert sizes == [64, 64, 2]
    assert [one.metadata.dst_node_id for one in grid.sent] == list(range(130))
    assert sorted(one.node for one in answers) == list(range(130))
    assert {one.node: one.reason for one in answers if one.kind} == {70: "the message was not accepted for sending"}


def test_a_batch_has_few_different_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "BATCH_BYTES", 100)
    own = [training(arrays={"w": np.zeros(10, np.float32)}) for _ in range(4)]  # 40 bytes each
    queued = [(Addressed(node, request), 1) for node, request in enumerate(own[:1] * 5 + own[1:])][::-1]
    sizes = []
    while queued:
        sizes.append(len(grids._batch(queued, 64)))
    assert sizes == [7, 1]  # the first five have one model, and the third model reaches the bound


def test_reminders_wait_for_replies_to_cease() -> None:
    grid = LocalGrid(dict.fromkeys(range(30), lambda _: None))
    waiting = [grids._Sent(Addressed(node, training()), "s", 1) for node in range(30)]
    reminders = grids._Reminders(60.0, 0.0)
    reminders.send(grid, waiting, 59.0)
    reminders.answered(50.0)
    reminders.send(grid, waiting, 109.0)
    assert not grid.sent
    reminders.send(grid, waiting, 110.0)
    assert len(grid.sent) == len(reminders.tickets) == 30 * grids.REMINDERS
    reminders.send(grid, waiting, 229.0)  # the wait has doubled
    assert len(grid.sent) == 30 * grids.REMINDERS


def test_reminders_are_made_when_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pushed, reminder = [], [], grids._reminder

    class Watching(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            pushed.append((len(made), len(messages)))
            return super().push_messages(messages)

    monkeypatch.setattr(grids, "_reminder", lambda *node: made.append(reminder(*node)) or made[-1])
    waiting = [grids._Sent(Addressed(node, training()), "s", 1) for node in range(50)]
    grids._Reminders(60.0, 0.0).send(Watching(dict.fromkeys(range(50), lambda _: None)), waiting, 60.0)
    assert pushed == [(64, 64), (128, 64), (150, 22)]  # one that waits for the pushes before it may expire meanwhile
    assert {message.metadata.ttl for message in made} == {grids.REMINDER_LIFE}


class Failing(LocalGrid):
    """A grid whose SuperLink answers a push with a status."""

    status, fails = 500, staticmethod(lambda message: True)

    def push_messages(self, messages: Any) -> Any:
        if any(map(self.fails, messages)):
            request = httpx.Request("POST", "http://superlink/push-messages")
            raise httpx.HTTPStatusError("refused", request=request, response=httpx.Response(self.status))
        return super().push_messages(messages)


def test_a_superlink_that_takes_no_reminders_does_not_end_the_exchange(caplog: pytest.LogCaptureFixture) -> None:
    grid, clock = Failing({1: lambda _: None}), Clock()
    grid.fails = lambda message: message.metadata.message_type == Observe.kind
    transport = GridTransport(grid, None, clock, clock.sleep)
    transport._reminds = True
    (answer,) = transport.exchange([Addressed(1, training(arrays=ARRAYS))], 100.0)
    assert answer.kind == "late"
    assert "3 messages were not taken: refused" in caplog.text


def test_requests_that_a_superlink_fails_to_take_fail_alone_and_a_refusal_ends_the_exchange() -> None:
    def good(message: Message) -> RecordDict:
        return to_content(trained().to_record(), secret_of(message.content))

    grid, clock = Failing(dict.fromkeys(range(65), good)), Clock()
    grid.fails = lambda message: message.metadata.dst_node_id == 64  # in the second batch
    requests = [Addressed(node, training(arrays=ARRAYS)) for node in range(65)]
    answers = list(GridTransport(grid, None, clock, clock.sleep).exchange(requests, 60.0))
    assert {one.node: one.reason for one in answers if one.kind} == {64: "the message was not accepted for sending"}
    grid.status = 403
    with pytest.raises(httpx.HTTPStatusError):
        list(GridTransport(grid, None, clock, clock.sleep).exchange(requests, 60.0))


def test_a_request_that_expires_on_its_way_to_the_superlink_is_late() -> None:
    class Slow(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            clock.now += 2.0
            tickets = list(super().push_messages(messages))
            return [None if clock.now >= one.metadata.ttl else t for one, t in zip(messages, tickets, strict=True)]

    def good(message: Message) -> RecordDict:
        return to_content(trained().to_record(), secret_of(message.content))

    clock = Clock()
    grid = Slow({1: good, 2: good})
    requests = [Addressed(node, training(arrays=ARRAYS)) for node in (1, 2)]
    answers = GridTransport(grid, 1, clock, clock.sleep).exchange(requests, 3.0)
    assert [(one.node, one.kind) for one in answers] == [(1, ""), (2, "late")]


@pytest.mark.parametrize("over_http", [True, False])
def test_arrays_travel_in_blocks_over_http_only(over_http: bool) -> None:
    seen = []

    def good(message: Message) -> RecordDict:
        seen.append(in_blocks(message.content))
        return reply_message(trained(), message).content

    grid = SuperLink({1: good}).grid() if over_http else LocalGrid({1: good})
    (answer,) = GridTransport(grid).exchange([Addressed(1, training(arrays=ARRAYS))], 60.0)
    assert seen == [over_http]
    assert {name: value.tolist() for name, value in answer.reply.arrays.items()} == {
        name: value.tolist() for name, value in trained().arrays.items()
    }
