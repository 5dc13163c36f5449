"""Grids as transports: one answer for each request, deadlines and windows; `tests/hostile` has what nodes may break."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fedtta.messages.flower import secret_of, to_content
from fedtta.messages.grid import GridTransport
from fedtta.messages.replies import Trained
from fedtta.messages.transport import Addressed
from tests.flower import LocalGrid
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
