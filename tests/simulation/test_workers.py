"""The transport to Ray workers beyond the contract, with Ray replaced by functions: who works on what, and faults."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from fedtta.client.sites import simulated_nodes
from fedtta.messages.arrays import packed, unpacked
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.messages.transport import Addressed
from fedtta.settings import Settings
from fedtta.simulation import workers
from fedtta.simulation.workers import AHEAD, RayTransport, Sent, Worker

Made = Callable[[int], Sent]


def trained(partition: int) -> Sent:
    """A reply that tells its client by its number of samples."""
    about: dict[str, Any] = {"validation_total": 0, "validation_correct": 0, "seconds": 0.0, "train_loss": 0.0}
    record = Trained(num_examples=partition + 1, arrays={"w": np.zeros(2)}, **about).to_record()
    return record.kind, record.values, {name: packed(one) for name, one in record.arrays.items()}


class FakeRay:
    """Ray whose work is done when its result is waited for, the newest first, one at a time."""

    exceptions = SimpleNamespace(RayError=RayActorError)

    def __init__(self, make: Made) -> None:
        self.make, self.stored, self.names = make, {}, itertools.count()
        self.begun: dict[str, tuple[int, int]] = {}  # reference → worker, partition
        self.finished: dict[str, int] = {}  # reference → partition
        self.most: dict[int, int] = {}
        self.stuck = False

    def handle(self, worker: int) -> Any:
        def remote(kind: str, values: Any, partition: int, names: list[str], *references: str) -> str:
            assert (kind, values["round"], names) == ("train", 1, ["arrays"])
            assert set(references) <= set(self.stored)
            name = f"work {next(self.names)}"
            self.begun[name] = worker, partition
            own = sum(busy == worker for busy, _ in self.begun.values())
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
        return self.make(self.finished.pop(reference))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RayTransport, FakeRay]]:
    def made(count: int = 2, make: Made = trained) -> Any:
        fake = FakeRay(make)
        monkeypatch.setattr(workers, "ray", fake)
        return RayTransport(10, [fake.handle(i) for i in range(count)]), fake

    return made


def requests(arrays: Any, clients: int = 10) -> list[Addressed]:
    request = Train(settings="{}", run="r", round=1, task=TrainingTask("ce"), arrays=arrays)
    return [Addressed(node, request) for node in range(1, clients + 1)]


def test_every_client_answers_for_itself_and_arrays_are_put_once(stage: Any) -> None:
    transport, fake = stage()
    value = np.arange(3.0)
    answers = list(transport.exchange(requests({"a": value}), 60.0))
    assert {one.node: one.reply.num_examples for one in answers} == {node: node for node in transport.nodes()}
    (stored,) = fake.stored.values()
    assert np.shares_memory(unpacked(stored)["a"], value)
    assert fake.most == {0: AHEAD, 1: AHEAD}


def test_after_the_timeout_nothing_is_begun_and_late_results_are_dropped(stage: Any) -> None:
    transport, fake = stage(1)
    fake.stuck = True
    assert {one.kind for one in transport.exchange(requests({}), 0.05)} == {"late"}
    assert len(fake.begun) == AHEAD  # the others are never begun
    fake.stuck = False
    (answer,) = transport.exchange(requests({}, 1), 60.0)
    assert (answer.node, answer.reply.num_examples) == (1, 1)
    assert len(fake.begun) < AHEAD  # results of the first exchange have made room, and are no answers
    assert sorted(one.node for one in transport.exchange(requests({}, 3), 60.0)) == [1, 2, 3]


def test_a_reason_and_a_worker_that_died_too_often_are_the_clients_answers(stage: Any) -> None:
    asked = Counter[int]()

    def make(partition: int) -> Sent:
        asked[partition] += 1
        if partition == 3 or (partition == 5 and asked[5] == 1):  # the worker that 3 killed had 5 next
            raise RayActorError(error_msg="the worker died")
        return "ValueError: sensor unplugged" if partition == 4 else trained(partition)

    transport, _ = stage(2, make)
    answers = {one.node: one for one in transport.exchange(requests({}), 60.0)}
    assert sorted(answers) == transport.nodes()
    assert {node for node, one in answers.items() if one.reply is None} == {4, 5}
    assert (answers[4].kind, "the worker died" in answers[4].reason) == ("failed", True)
    assert (answers[5].kind, answers[5].reason) == ("failed", "ValueError: sensor unplugged")
    assert (asked[3], asked[4], asked[5], asked[6]) == (2, 1, 2, 1)


def test_a_worker_returns_its_clients_error_as_text() -> None:
    assert "nonsense" in str(
        Worker(simulated_nodes(Settings(clients=2))).perform("train", {"nonsense": 1}, 0, ["arrays"], {})
    )
    assert "'dance'" in str(Worker(simulated_nodes(Settings(clients=2))).perform("dance", {}, 0, []))


def test_a_ray_that_was_there_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ray", SimpleNamespace(is_initialized=lambda: True))  # neither `init` nor `shutdown`
    with workers._ray(2):
        pass
