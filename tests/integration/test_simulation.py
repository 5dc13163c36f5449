"""Simulations with Ray, ours and Flower's: equal bits with 1 and 2 workers and in one process, and killed workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtta.client.app import answer
from fedtta.messages.flower import request_of
from fedtta.messages.requests import Request, Train
from fedtta.settings import Settings
from fedtta.simulation import simulate, workers
from fedtta.simulation.workers import Sent, Worker
from tests.server.test_run import SMALL, assert_same_results, run

pytestmark = pytest.mark.slow
RAY = SMALL.replace(node_timeout=300.0, round_timeout=300.0)  # workers take a while to start, on a busy machine longer
CallNext = Callable[[Message, Context], Message]


def die(partition: int, round: object, results: str) -> None:
    """The worker that trains client 1 in the second round is killed, once."""
    mark = Path(results) / "killed"
    if partition == 1 and round == 2 and not mark.exists():
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)


def trained_round(request: Request) -> int | None:
    return request.round if isinstance(request, Train) else None


def killed(message: Message, context: Context, call_next: CallNext) -> Message:
    """A mod of Flower's."""
    request = request_of(message)
    die(int(context.node_config["partition-id"]), trained_round(request), json.loads(request.settings)["results"])
    return call_next(message, context)


class Killed(Worker):
    """A worker that is killed once."""

    def perform(self, kind: str, values: Mapping[str, Any], partition: int, *rest: Any) -> Sent:
        results = json.loads(values["settings"])["results"]
        die(partition, values.get("round") if kind == "train" else None, results)
        return super().perform(kind, values, partition, *rest)


class Doomed(Worker):
    """A worker that client 0 kills in the second round whenever it trains."""

    def perform(self, kind: str, values: Mapping[str, Any], partition: int, *rest: Any) -> Sent:
        if kind == "train" and partition == 0 and values["round"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perform(kind, values, partition, *rest)


def wrapped(mod: Callable[[Message, Context, CallNext], Message]) -> ClientApp:
    """The ClientApp's own handlers behind a mod."""
    app = ClientApp(mods=[mod])
    app.query("identify")(answer)
    app.train()(answer)
    app.train("statistics")(answer)
    app.evaluate()(answer)
    return app


def survives_a_kill(folder: Path, settings: Settings, *apps: ClientApp) -> None:
    """A worker that is killed once changes nothing but the time; splits are redrawn in every round, the same ones."""
    changed = {"split": "published", "methods": "fedavg_ft,btfl", "shifts": "original,out_of_client", "workers": 1}
    settings, seen = settings.replace(results=str(folder), **changed), list[dict]()
    disturbed = simulate(settings, folder / "r", [seen.append], *apps)
    assert (folder / "killed").exists()
    assert not [event for event in seen if event["event"] in ("failed", "refused")]
    assert_same_results(disturbed, run(folder / "undisturbed", settings))


# Flower's simulation; it starts and stops Ray itself, so these come before the tests that share one


def test_same_bits_in_flowers_simulation(tmp_path: Path) -> None:
    assert_same_results(run(tmp_path / "none"), simulate(RAY.replace(engine="flower"), tmp_path / "flower"))


def test_a_worker_of_flowers_killed_mid_round_is_started_again_and_costs_nothing(tmp_path: Path) -> None:
    survives_a_kill(tmp_path, RAY.replace(engine="flower"), wrapped(killed))


# Ours


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray that is there before the runs, which use it as it is: to start one takes longer than a run."""
    with workers._ray(2):
        yield


@pytest.mark.usefixtures("ray")
def test_same_bits_with_one_and_two_workers_and_without_ray(tmp_path: Path) -> None:
    one = simulate(RAY.replace(workers=1), tmp_path / "one")
    assert_same_results(one, simulate(RAY.replace(workers=2), tmp_path / "two"))
    assert_same_results(one, run(tmp_path / "none"))


@pytest.mark.usefixtures("ray")
def test_a_worker_killed_mid_round_is_started_again_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "Worker", Killed)
    survives_a_kill(tmp_path, RAY)


@pytest.mark.usefixtures("ray")
def test_a_client_that_kills_every_worker_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "Worker", Doomed)
    seen: list[dict] = []
    simulate(RAY.replace(methods="fedavg", rounds=3, workers=1), tmp_path / "r", [seen.append])
    failed = [event for event in seen if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(0, 2)]
    assert [event["replied"] for event in seen if event["event"] == "round"] == [[0, 1, 2], [1, 2], [0, 1, 2]]
