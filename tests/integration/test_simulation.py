"""Simulations with Ray, ours and Flower's: equal bits with 1 and 2 workers and in one process, and killed workers.

A divided data set is simulated on our workers, devices with data of their own on both.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray as library
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtta.client.app import answer
from fedtta.messages.flower import allow_messages, request_of
from fedtta.messages.record import Record
from fedtta.messages.replies import Telemetry
from fedtta.messages.requests import Observe, Request, Train
from fedtta.messages.transport import Addressed
from fedtta.settings import Settings
from fedtta.simulation import simulate, workers
from fedtta.simulation.workers import Asked, RayTransport, Sent, Worker
from tests.client.folders import OWN, sites
from tests.server.test_run import SMALL, assert_same_results, run

pytestmark = pytest.mark.slow
RAY = SMALL.replace(
    methods="fedavg_ft,fixed_mix,fedthe,btfl", split="published", shifts="original,out_of_client",
    # workers take a while to start, on a busy machine longer
    node_timeout=300.0, round_timeout=300.0,
)  # fmt: skip
DEVICES = OWN.replace(rounds=2, workers=1, stacked_clients=1)
CallNext = Callable[[Message, Context], Message]


def die(partition: int, round: object, results: str) -> None:
    """The worker that trains client 1 in the second round is killed, once."""
    mark = Path(results) / "killed"
    if partition == 1 and round == 2 and not mark.exists():
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)


def trained_round(request: Request) -> int | None:
    return request.round if isinstance(request, Train) else None


class Killed(Worker):
    """A worker that is killed once."""

    def answer(self, record: Record, number: int) -> Sent:
        results = json.loads(record.values["settings"])["results"]
        die(number, record.values.get("round") if record.kind == "train" else None, results)
        return super().answer(record, number)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    allow_messages()
    return run(tmp_path_factory.mktemp("reference") / "none", RAY)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Path]:
    """A run of three devices, one of them without labels, and its results in one process."""
    folder = tmp_path_factory.mktemp("devices")
    sites(folder)
    settings = DEVICES.replace(devices=str(folder / "*.toml"))
    return settings, simulate(settings.replace(engine="vectorised"), folder / "alone")


def survives_a_kill(folder: Path, settings: Settings, reference: Path, *apps: ClientApp) -> None:
    """A worker that is killed once changes nothing but the time."""
    seen: list[dict] = []
    disturbed = simulate(settings.replace(results=str(folder)), folder / "r", [seen.append], *apps)
    assert (folder / "killed").exists()
    assert not [event for event in seen if event["event"] in ("failed", "refused")]
    assert_same_results(disturbed, reference)


# Flower's simulation; it starts and stops Ray itself, so this comes before the tests that share one


def killed(message: Message, context: Context, call_next: CallNext) -> Message:
    """A mod of Flower's."""
    request = request_of(message)
    die(int(context.node_config["partition-id"]), trained_round(request), json.loads(request.settings)["results"])
    return call_next(message, context)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_same_bits_after_a_worker_of_flowers_was_killed_mid_round(
    tmp_path: Path, devices: tuple[Settings, Path]
) -> None:
    settings, alone = devices
    app = ClientApp(mods=[killed])
    for handles in (app.query("identify"), app.train(), app.train("statistics"), app.evaluate()):
        handles(answer)
    survives_a_kill(tmp_path, settings.replace(engine="flower"), alone, app)


# Ours


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray that is there before the runs, which use it as it is: to start one takes longer than a run."""
    with workers._ray(2, ["2", "GPU-1b"]):  # logical GPUs: Ray does not look for them
        yield


@pytest.mark.usefixtures("ray")
def test_same_bits_with_one_worker_and_in_one_process(tmp_path: Path, reference: Path) -> None:
    assert_same_results(simulate(RAY.replace(workers=1), tmp_path / "one"), reference)


@pytest.mark.usefixtures("ray")
def test_same_bits_with_devices_of_their_own_data(tmp_path: Path, devices: tuple[Settings, Path]) -> None:
    settings, alone = devices
    assert_same_results(simulate(settings.replace(engine="ray"), tmp_path / "r"), alone)


@pytest.mark.usefixtures("ray")
def test_same_bits_after_one_of_two_workers_was_killed_mid_round(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits are redrawn in every round, the same ones."""
    monkeypatch.setattr(workers, "Worker", Killed)
    survives_a_kill(tmp_path, RAY.replace(workers=2), reference)


@pytest.mark.usefixtures("ray")
def test_each_of_two_workers_sees_a_gpu_of_the_mask_as_its_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seeing:
        def __init__(self, *about: Any) -> None:
            pass

        def open(self) -> bool:
            return True

        def seen(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setattr(workers, "Worker", Seeing)
    monkeypatch.setattr(workers, "simulated_nodes", lambda settings: [])  # so that workers import nothing of ours
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with workers.ray_transport(RAY.replace(workers=2, device="auto")) as (settings, _):
        names = [f"fedtta-run-worker-{i}" for i in range(2)]
        seen = [library.get(library.get_actor(name).seen.remote()) for name in names]  # type: ignore[attr-defined]
    assert (sorted(seen), settings.device) == (["2", "GPU-1b"], "cuda")


def doomed(kind: str, values: dict[str, Any]) -> Any:
    """Ray's class of a worker that client 0 always kills; a local class travels whole and imports nothing of ours."""

    class Doomed:
        def open(self) -> bool:
            return True

        def perform(self, asked: Sequence[Asked], *arrays: Any) -> list[Sent]:
            if any(number == 0 for _, _, number, _ in asked):
                os.kill(os.getpid(), signal.SIGKILL)
            return [(kind, values, {}) for _ in asked]

    return library.remote(Doomed)


@pytest.mark.usefixtures("ray")
def test_a_client_that_kills_every_worker_fails_alone() -> None:
    reply = Telemetry(name="sound").to_record()
    worker = doomed(reply.kind, reply.values).options(max_restarts=-1).remote()
    try:
        transport = RayTransport(["0", "1", "2"], [worker])
        request = Observe(settings="{}", run="r")
        answers = transport.exchange([Addressed(node, request) for node in transport.nodes()], RAY.round_timeout)
        heard = sorted((one.node, one.kind, one.reply) for one in answers)
        assert heard[0] == (1, "failed", None)
        assert heard[1:] == [(node, "", Telemetry(name="sound")) for node in (2, 3)]
    finally:
        library.kill(worker)
