"""Simulations with Ray, ours and Flower's: equal bits with 1 and 2 workers and in one process, and killed workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedtta.client.app import answer
from fedtta.messages.flower import request_of
from fedtta.messages.requests import Request, Train
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


def test_same_bits_with_one_and_two_workers_and_without_ray(tmp_path: Path) -> None:
    one = simulate(RAY.replace(workers=1), tmp_path / "one")
    two = simulate(RAY.replace(workers=2), tmp_path / "two")
    assert_same_results(one, two)
    assert_same_results(one, run(tmp_path / "none"))
    assert_same_results(one, simulate(RAY.replace(engine="flower"), tmp_path / "flower"))


@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_worker_killed_mid_round_is_started_again_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(workers, "Worker", Killed)
    # splits redrawn in every round: a restarted worker draws the same ones
    shifts = "original,out_of_client"
    settings = RAY.replace(split="published", methods="fedavg_ft,btfl", shifts=shifts, results=str(tmp_path), workers=1)
    seen: list[dict] = []
    apps = {"flower": [wrapped(killed)], "ray": []}
    disturbed = simulate(settings, tmp_path / "r", [seen.append], *apps[engine])
    assert (tmp_path / "killed").exists()
    assert not [event for event in seen if event["event"] in ("failed", "refused")]
    assert_same_results(disturbed, run(tmp_path / "undisturbed", settings))


def test_a_client_that_kills_every_worker_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "Worker", Doomed)
    seen: list[dict] = []
    simulate(RAY.replace(methods="fedavg", rounds=3, workers=1), tmp_path / "r", [seen.append])
    failed = [event for event in seen if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(0, 2)]
    assert [event["replied"] for event in seen if event["event"] == "round"] == [[0, 1, 2], [1, 2], [0, 1, 2]]
