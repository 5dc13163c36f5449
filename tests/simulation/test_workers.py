"""The transport to Ray workers beyond the contract, with Ray replaced by functions: who works on what, and faults."""

from __future__ import annotations

import itertools
import pickle
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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
from fedtta.settings import Settings, to_json
from fedtta.simulation import workers
from fedtta.simulation.workers import (
    AHEAD,
    REQUESTS_AT_ONCE,
    TRIES,
    Asked,
    CallError,
    ClientError,
    NotOpen,
    RayTransport,
    Sent,
    Worker,
    ray_transport,
)
from tests.client.through_app import SETTINGS, initial

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
        self.begun: dict[str, tuple[int, list[int]]] = {}  # reference → worker, partitions
        self.finished: dict[str, list[int]] = {}  # reference → partitions
        self.opened: dict[str, bool | Exception] = {}
        self.calls: list[tuple[int, str]] = []  # worker, name of the call
        self.bare, self.broken = set[int](), dict[int, Exception]()
        self.most: dict[int, int] = {}
        self.stuck, self.patience = False, 1  # requests of a call that a worker answers

    def handle(self, worker: int) -> Any:
        def perform(asked: list[Asked], *references: str) -> str:
            assert all(values["round"] == 1 for _, values, _, _ in asked)
            assert set(references) <= set(self.stored)
            name = f"work {next(self.names)}"
            self.begun[name] = worker, [partition for _, _, partition, _ in asked]
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
        if reference not in self.opened:
            return self.performed(self.finished.pop(reference)[: self.patience])
        result = self.opened.pop(reference)
        if isinstance(result, Exception):
            raise result
        return result

    def performed(self, partitions: list[int]) -> Any:
        """As `Worker.perform`; what `make` raises of Ray's, the call raises."""
        results: list[Any] = []
        for partition in partitions:
            try:
                results.append(self.make(partition))
            except ClientError as error:
                results.append(error)
        if any(isinstance(one, ClientError) for one in results):
            raise failed(CallError("sensors", results))
        return results


def failed(cause: Exception) -> RayTaskError:
    """What Ray raises for an error in a worker."""
    return RayTaskError("perform", "", cause)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RayTransport, FakeRay]]:
    def made(count: int = 2, make: Made = trained, images: Any = None, clients: int = 10) -> Any:
        fake = FakeRay(make)
        monkeypatch.setattr(workers, "ray", fake)
        return RayTransport([str(i) for i in range(clients)], [fake.handle(i) for i in range(count)], images), fake

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
            raise ClientError("ValueError: sensor unplugged")
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


def test_calls_have_more_requests_the_more_the_last_one_answered_and_fewer_at_the_end(stage: Any) -> None:
    transport, fake = stage(2, clients=200)
    fake.patience = REQUESTS_AT_ONCE
    answers = list(transport.exchange(requests({}, 200), 60.0))
    assert sorted(one.node for one in answers) == transport.nodes()
    sizes = [name.count(",") + 1 for _, name in fake.calls if name != "open"]
    assert sizes[:2] == [1, 1]
    assert max(sizes) == REQUESTS_AT_ONCE
    assert sizes[-4:] == [1, 1, 1, 1]  # so that all workers have some
    fake.calls.clear()
    fake.patience = 1  # clients are slow now
    assert sorted(one.node for one in transport.exchange(requests({}, 200), 60.0)) == transport.nodes()
    assert {name.count(",") + 1 for _, name in fake.calls} == {1, 2}


def test_of_the_requests_that_a_worker_died_with_only_the_one_that_kills_it_fails(stage: Any) -> None:
    asked = Counter[int]()

    def make(partition: int) -> Sent:
        asked[partition] += 1
        if partition == 33:
            raise RayActorError(error_msg="the worker died")
        if partition == 34:
            raise failed(RuntimeError("no memory for the results"))
        return trained(partition)

    transport, fake = stage(1, make, clients=60)
    fake.patience = REQUESTS_AT_ONCE
    answers = {one.node: one for one in transport.exchange(requests({}, 60), 60.0)}
    assert sorted(answers) == transport.nodes()
    assert {node for node, one in answers.items() if one.reply is None} == {34, 35}
    assert asked[33] == TRIES
    assert answers[35].reason == "RuntimeError: no memory for the results"
    assert {node for node, one in answers.items() if one.reply and one.reply.num_examples != node} == set()
    assert max(asked.values()) == TRIES


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(simulated_nodes(SETTINGS.replace(state_dir=str(tmp_path))))


def training(settings: Settings, partitions: list[int]) -> tuple[list[Asked], dict[str, Any]]:
    """The requests of a call, and their arrays."""
    record = Train(settings=to_json(settings), run="r", round=1, task=TrainingTask("ce"), arrays=initial()).to_record()
    return [(record.kind, record.values, one, {"arrays": 0}) for one in partitions], packed(record.arrays["arrays"])


def bits(sent: Any) -> Any:
    kind, values, arrays = sent
    named = {name: value.tobytes() for name, value in unpacked(arrays["arrays"]).items()}
    return kind, {name: value for name, value in values.items() if name != "seconds"}, named


def test_replies_of_one_call_are_those_of_one_call_each(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SECONDS_AT_ONCE", float("inf"))
    worker.open()
    asked, arrays = training(SETTINGS.replace(state_dir=str(tmp_path)), [2, 0, 3])
    alone = [bits(*worker.perform([one], arrays)) for one in asked]
    together = list(map(bits, worker.perform(asked, arrays)))
    assert together == alone
    assert alone[0][2] != alone[1][2]


@pytest.mark.parametrize(("limit", "value"), [("SECONDS_AT_ONCE", 0.0), ("BYTES_AT_ONCE", 1)])
def test_a_slow_or_large_client_has_a_call_of_its_own(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    worker.open()
    asked, arrays = training(SETTINGS.replace(state_dir=str(tmp_path)), [2, 0])
    monkeypatch.setattr(workers, limit, value)
    (result,) = worker.perform(asked, arrays)
    assert bits(result) == bits(*worker.perform(asked[:1], arrays))


def test_a_worker_raises_its_clients_errors_as_text_with_the_results(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SECONDS_AT_ONCE", float("inf"))
    asked, arrays = training(SETTINGS.replace(state_dir=str(tmp_path)), [2, 0])
    with pytest.raises(NotOpen):
        worker.perform(asked, arrays)
    assert worker.open()
    wrong: Asked = ("train", {"nonsense": 1}, 1, {"arrays": 0})
    with pytest.raises(CallError, match=r"^1: .*nonsense") as caught:
        worker.perform([asked[0], wrong, asked[1]], arrays)
    first, failure, last = pickle.loads(pickle.dumps(caught.value)).results  # as Ray sends it
    assert (bits(first), bits(last)) == (
        bits(*worker.perform(asked[:1], arrays)),
        bits(*worker.perform(asked[1:], arrays)),
    )
    assert (type(failure), "nonsense" in str(failure)) == (ClientError, True)
    with pytest.raises(CallError, match=r"^0: .*'dance'"):
        worker.perform([("dance", {}, 0, {})])


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


def test_a_signal_ends_the_run_as_before_when_ray_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` replaces the handler of SIGTERM by one that aborts the process."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(workers.ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(workers.ray, "shutdown", lambda: None)
    monkeypatch.setattr(workers.ray, "is_initialized", lambda: False)
    try:
        with workers._ray(1):
            assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
