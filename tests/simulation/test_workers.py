"""The grid in front of workers, with Ray replaced by functions: what is handed on, to whom, and what is forgotten."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from ray.exceptions import RayActorError

from client.work import Done
from messages.held import held_record
from messages.layout import unpacked
from simulation import blocking, workers
from simulation.blocking import allow_messages
from simulation.worker import Sent, Worker, sent
from simulation.workers import AHEAD, WorkersGrid

Made = Callable[[int], Done | str]


class FakeRay:
    """Keeps what is put; work that is begun is done when somebody waits, the newest first, one at a time."""

    exceptions = SimpleNamespace(RayError=RayActorError)

    def __init__(self, make: Made) -> None:
        self.make, self.stored, self.names = make, {}, itertools.count()
        self.begun: dict[str, tuple[int, int, list[Any]]] = {}  # reference → worker, partition, arrays
        self.finished: dict[str, int] = {}  # reference → partition
        self.most: dict[int, int] = {}
        self.stuck = False

    def handle(self, worker: int) -> Any:
        def remote(phase: str, config: Any, partition: int, names: list[str], *references: str) -> str:
            assert phase == "train"
            assert list(config) == ["round"]
            assert len(names) == len(references)
            name = f"work {next(self.names)}"
            self.begun[name] = worker, partition, [self.stored[reference] for reference in references]
            own = sum(busy == worker for busy, *_ in self.begun.values())
            self.most[worker] = max(self.most.get(worker, 0), own)
            return name

        return SimpleNamespace(perform=SimpleNamespace(remote=remote))

    def put(self, arrays: Any) -> str:
        name = f"arrays {len(self.stored)}"
        self.stored[name] = arrays
        return name

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout > 0
        done = [] if self.stuck else references[-1:]
        self.finished |= {one: self.begun.pop(one)[1] for one in done}
        return done, [one for one in references if one not in done]

    def get(self, reference: str) -> Sent:
        return sent(self.make(self.finished.pop(reference)))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[WorkersGrid, FakeRay]]:
    allow_messages()
    monkeypatch.setattr(blocking, "PULL_SECONDS", 0.0)

    def made(count: int = 2, make: Made = lambda partition: Done(metrics={"who": partition})) -> Any:
        fake = FakeRay(make)
        monkeypatch.setattr(workers, "ray", fake)
        return WorkersGrid(10, [fake.handle(i) for i in range(count)]), fake

    return made


def messages(record: ArrayRecord, clients: int = 10) -> list[Message]:
    content = RecordDict({"config": ConfigRecord({"round": 1}), "arrays": record})
    return [Message(content, dst_node_id=node, message_type="train") for node in range(1, clients + 1)]


def test_every_client_answers_for_itself_and_arrays_are_put_once(stage: Any) -> None:
    grid, fake = stage()
    value = np.arange(3.0)
    replies = list(grid.send_and_receive(messages(held_record({"a": value}))))
    who = {reply.metadata.src_node_id: reply.content.metric_records["metrics"]["who"] for reply in replies}
    assert who == {node: node - 1 for node in grid.get_node_ids()}
    (stored,) = fake.stored.values()
    assert np.shares_memory(unpacked(stored)["a"], value)
    assert fake.most == {0: AHEAD, 1: AHEAD}


def test_what_nobody_waits_for_is_not_begun_and_its_answer_is_dropped(stage: Any) -> None:
    grid, fake = stage(1)
    tickets = list(grid.push_messages(messages(held_record({}))))
    fake.stuck = True
    assert list(grid.pull_messages(tickets)) == []
    under_way = len(fake.begun)
    assert under_way == AHEAD
    assert list(grid.pull_messages([])) == []
    fake.stuck = False
    later = list(grid.push_messages(messages(held_record({}), 1)))
    replies = []
    while not replies:
        replies = list(grid.pull_messages(later))
    assert [reply.metadata.reply_to_message_id for reply in replies] == later
    assert len(fake.begun) < under_way  # the old ones make room, and nobody hears of them


def test_a_reason_and_a_worker_that_died_too_often_are_the_clients_answers(stage: Any) -> None:
    asked = Counter[int]()

    def make(partition: int) -> Done | str:
        asked[partition] += 1
        if partition == 3 or (partition == 5 and asked[5] == 1):  # the worker that 3 killed had 5 next
            raise RayActorError(error_msg="the worker died")
        return "ValueError: sensor unplugged" if partition == 4 else Done(metrics={"who": partition})

    grid, _ = stage(2, make)
    replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages(held_record({})))}
    assert sorted(replies) == list(grid.get_node_ids())
    assert {node for node, reply in replies.items() if reply.has_error()} == {4, 5}
    assert "the worker died" in replies[4].error.reason
    assert replies[5].error.reason == "ValueError: sensor unplugged"
    assert (asked[3], asked[4], asked[5], asked[6]) == (2, 1, 2, 1)


def test_a_worker_says_what_went_wrong() -> None:
    assert "nonsense" in str(Worker(2).perform("train", {"nonsense": 1}, 0, []))


def test_a_ray_that_was_there_before_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ray", SimpleNamespace(is_initialized=lambda: True))  # neither `init` nor `shutdown`
    with workers._ray(2):
        pass
