"""Flower's Ray simulation: the same bits with 1 and 2 workers and in one process, and faults on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client import app as handlers
from simulation import simulate
from tests.server.test_run import SMALL, assert_same_results, run

pytestmark = pytest.mark.slow
RAY = SMALL.replace(node_timeout=300.0, round_timeout=300.0)  # workers take a while to start, on a busy machine longer
CallNext = Callable[[Message, Context], Message]


def unplugged(message: Message, context: Context, call_next: CallNext) -> Message:
    """A mod: client 2 fails in the second training round."""
    config = message.content.config_records["config"]
    if context.node_config["partition-id"] == 2 and config.get("server-round") == 2:
        raise RuntimeError("sensor unplugged")
    return call_next(message, context)


def killed(message: Message, context: Context, call_next: CallNext) -> Message:
    """A mod: the worker that trains client 1 in the second round is killed, once."""
    config = message.content.config_records["config"]
    mark = Path(str(config["results"])) / "killed"
    if context.node_config["partition-id"] == 1 and config.get("server-round") == 2 and not mark.exists():
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)
    return call_next(message, context)


def wrapped(mod: Callable[[Message, Context, CallNext], Message]) -> ClientApp:
    """The ClientApp's own handlers behind a mod."""
    app = ClientApp(mods=[mod])
    app.query("identify")(handlers.identify)
    app.train()(handlers.train)
    app.train("statistics")(handlers.statistics)
    app.evaluate()(handlers.evaluate)
    return app


def test_same_bits_with_one_and_two_workers_and_without_ray(tmp_path: Path) -> None:
    one = simulate(RAY.replace(workers=1), tmp_path / "one")
    two = simulate(RAY.replace(workers=2), tmp_path / "two")
    assert_same_results(one, two)
    assert_same_results(one, run(tmp_path / "none"))


def test_a_worker_killed_mid_round_is_started_again_and_costs_nothing(tmp_path: Path) -> None:
    # splits drawn anew: a worker that was not there in the rounds before finds the same ones
    shifts = "original,out_of_client"
    settings = RAY.replace(split="published", methods="fedavg_ft,btfl", shifts=shifts, results=str(tmp_path), workers=1)
    seen: list[dict] = []
    disturbed = simulate(settings, tmp_path / "r", [seen.append], wrapped(killed))
    assert (tmp_path / "killed").exists()
    assert not [event for event in seen if event["event"] in ("failed", "refused")]
    assert_same_results(disturbed, run(tmp_path / "undisturbed", settings))


def test_a_client_that_raises_in_ray_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    seen: list[dict] = []
    settings = RAY.replace(methods="fedavg,btfl", rounds=3)
    folder = simulate(settings, tmp_path / "r", [seen.append], wrapped(unplugged))
    failed = [event for event in seen if event["event"] == "failed"]
    assert [(event["partition"], event["round"]) for event in failed] == [(2, 2)]
    assert "sensor unplugged" in failed[0]["reason"]
    rounds = [event["replied"] for event in seen if event["event"] == "round"]
    assert rounds == [[0, 1, 2], [0, 1], [0, 1, 2]]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("end", "completed")
