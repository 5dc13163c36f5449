"""The transport to Ray workers beyond the contract, with Ray replaced by functions: who works on what, and faults."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError

from fedtta.client.sites import simulated_nodes
from fedtta.messages.arrays import packed, unpacked
from fedtta.messages.replies import Trained
from fedtta.messages.requests import RefineRates, Train, TrainingTask
from fedtta.messages.transport import Addressed
from fedtta.settings import Settings
from fedtta.simulation import workers
from fedtta.simulation.workers import AHEAD, TRIES, ClientError, NotOpen, RayTransport, Sent, Worker, ray_transport

Made = Callable[[int], Sent]


def trained(partition: int) -> Sent:
    """A reply that tells its client by its number of samples."""
    about: dict[str, Any] = {"validation_total": 0, "validation_correct": 0, "seconds": 0.0, "train_loss": 0.0}
    record = Trained(num_examples=partition + 1, arrays={"w": np.zeros(2)}, **about).to_record()
    return record.kind, record.values, {name: packed(one) for name, one in record.arrays.items()}


class FakeRay:
    """Ray whose work is done when its result is waited for, the newest first, one at a time.

    Workers get ready at once, those in `bare` when they are given images; `broken` ones never.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, make: Made) -> None:
        self.make, self.stored, self.names = make, {}, itertools.count()
        self.begun: dict[str, tuple[int, int]] = {}  # reference → worker, partition
        self.finished: dict[str, int] = {}  # reference → partition
        self.opened: dict[str, bool | Exception] = {}
        self.calls: list[tuple[int, str]] = []  # worker, name of the call
        self.bare, self.broken = set[int](), dict[int, Exception]()
        self.most: dict[int, int] = {}
        self.stuck = False

    def handle(self, worker: int) -> Any:
        def perform(kind: str, values: Any, partition: int, names: list[str], *references: str) -> str:
            assert values["round"] == 1
            assert set(references) <= set(self.stored)
            name = f"work {next(self.names)}"
            self.begun[name] = worker, partition
            own = sum(busy == worker for busy, _ in self.begun.values())
            self.most[worker] = max(self.most.get(worker, 0), own)
            return name

        def open(*images: str) -> str:
            name = f"open {next(self.names)}"
            self.opened[name] = self.broken.get(worker) or bool(images) or worker not in self.bare
            return name

        def options(remote: Any, name: str, **more: Any) -> Any:
            self.calls.append((worker, name))
            return SimpleNamespace(remote=remote)

        return SimpleNamespace(
            perform=SimpleNamespace(options=partial(options, perform)),
            open=SimpleNamespace(options=partial(options, open)),
        )

    def put(self, arrays: Any) -> str:
        name = f"arrays {len(self.stored)}"
        self.stored[name] = arrays
        return name

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout > 0
        done = [one for one in references if one in self.opened] or ([] if self.stuck else references[-1:])
        self.finished |= {one: self.begun.pop(one)[1] for one in done if one in self.begun}
        return done, [one for one in references if one not in done]

    def get(self, reference: str) -> Any:
        result = self.opened.pop(reference) if reference in self.opened else self.make(self.finished.pop(reference))
        if isinstance(result, Exception):
            raise result
        return result


def failed(cause: Exception) -> RayTaskError:
    """What Ray raises for an error in a worker."""
    return RayTaskError("perform", "", cause)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RayTransport, FakeRay]]:
    def made(count: int = 2, make: Made = trained, images: Any = None) -> Any:
        fake = FakeRay(make)
        monkeypatch.setattr(workers, "ray", fake)
        return RayTransport([str(i) for i in range(10)], [fake.handle(i) for i in range(count)], images), fake

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
        if partition == 4:
            raise failed(ClientError("ValueError: sensor unplugged"))
        return trained(partition)

    transport, fake = stage(2, make)
    answers = {one.node: one for one in transport.exchange(requests({}), 60.0)}
    assert sorted(answers) == transport.nodes()
    assert {node for node, one in answers.items() if one.reply is None} == {4, 5}
    assert (answers[4].kind, "the worker died" in answers[4].reason) == ("failed", True)
    assert (answers[5].kind, answers[5].reason) == ("failed", "ValueError: sensor unplugged")
    assert (asked[3], asked[4], asked[5], asked[6]) == (TRIES, 1, 2, 1)
    assert sum(name == "open" for _, name in fake.calls) == 2 + TRIES + 1  # before each new life of a worker
    assert sum(name == "train 5 round 1" for _, name in fake.calls) == 2


def test_a_worker_that_was_started_again_unnoticed_gets_ready_first(stage: Any) -> None:
    asked = Counter[int]()

    def make(partition: int) -> Sent:
        asked[partition] += 1
        if asked[partition] <= TRIES:  # it does not count as a try
            raise failed(NotOpen())
        return trained(partition)

    transport, fake = stage(1, make)
    assert [one.kind for one in transport.exchange(requests({}, 1), 60.0)] == [""]
    assert [name for _, name in fake.calls] == ["open", *["train 0 round 1", "open"] * TRIES, "train 0 round 1"]


def test_images_are_stored_once_and_only_for_workers_that_lack_them(stage: Any) -> None:
    transport, fake = stage(3, images=lambda: "images")
    assert {one.kind for one in transport.exchange(requests({}), 60.0)} == {""}
    assert "images" not in fake.stored.values()
    transport, fake = stage(3, images=lambda: "images")
    fake.opened = dict.fromkeys(fake.opened, False)
    fake.bare = {0, 1, 2}
    assert {one.kind for one in transport.exchange(requests({}), 60.0)} == {""}
    assert list(fake.stored.values()).count("images") == 1
    assert [name for _, name in fake.calls].count("open") == 6


def test_workers_that_cannot_be_started_are_left_out_and_without_any_the_reason_is_told(stage: Any) -> None:
    transport, fake = stage(2)
    (broken, _) = fake.opened
    fake.opened[broken] = failed(ValueError("no network card"))
    assert {one.kind for one in transport.exchange(requests({}), 60.0)} == {""}
    assert {worker for worker, name in fake.calls if name != "open"} == {1}
    transport, fake = stage(2)
    fake.opened = dict.fromkeys(fake.opened, failed(ValueError("no network card")))
    answers = list(transport.exchange(requests({}), 60.0))
    assert {(one.kind, one.reason) for one in answers} == {("failed", "no worker is left: ValueError: no network card")}
    assert sorted(one.node for one in answers) == transport.nodes()


def test_a_network_that_was_sent_once_comes_along_on_a_cluster_only(stage: Any) -> None:
    refine: dict[str, Any] = {"settings": "{}", "run": "r", "round": 1, "variant": "all", "rates": {}, "network": "d"}
    for images in (None, lambda: "images"):
        transport, fake = stage(1, images=images)
        for arrays in ({"w": np.ones(2)}, None):
            fake.stored.clear()
            request = RefineRates(**refine, arrays=arrays)
            list(transport.exchange([Addressed(1, request)], 60.0))
            assert ("w" in str(fake.stored)) == (arrays is not None or images is not None)


def test_a_worker_raises_its_clients_error_as_text() -> None:
    worker = Worker(simulated_nodes(Settings(clients=2)))
    with pytest.raises(NotOpen):
        worker.perform("train", {}, 0, [])
    assert worker.open()
    with pytest.raises(ClientError, match="nonsense"):
        worker.perform("train", {"nonsense": 1}, 0, ["arrays"], {})
    with pytest.raises(ClientError, match="'dance'"):
        worker.perform("dance", {}, 0, [])


def test_a_ray_that_was_there_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ray", SimpleNamespace(is_initialized=lambda: True))  # neither `init` nor `shutdown`
    with workers._ray(2):
        pass


@pytest.mark.parametrize("temporary", [False, True])
def test_state_that_the_run_removes_need_not_outlive_a_power_cut(
    monkeypatch: pytest.MonkeyPatch, temporary: bool
) -> None:
    made: list[Any] = []

    class Kind:
        """Ray's handle of a class, of one of its workers, and of their methods."""

        def __getattr__(self, name: str) -> Kind:
            return self

        def __call__(self, *given: Any, **options: Any) -> Kind:
            made.extend(given)
            return self

    monkeypatch.setattr(workers, "ray", Kind())
    monkeypatch.setattr(workers, "_ray", lambda count, gpus: nullcontext())
    monkeypatch.setattr(workers, "running", lambda: None)
    monkeypatch.setattr(workers, "reserved", lambda shares, name: nullcontext(SimpleNamespace()))
    with ray_transport(Settings(clients=3, device="cpu"), temporary=temporary):
        handed = [one for one in made if isinstance(one, list)]
    assert [[node.durable for node in nodes] for nodes in handed] == [[not temporary] * 3] * Settings().workers
