"""Secure aggregation over gRPC, on agents and a node without one: the bits of one process, also with a node killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedtta.messages.requests import Evaluate, Request, Train
from fedtta.settings import Settings
from fedtta.simulation import deployment
from tests.faults.stage import PATIENCE, Stage, stage, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

#: One round, since each takes three exchanges, in which a node starts a process for its message.
SMALL = Settings(
    clients=4, fraction=0.3, image_size=20, device="cpu", rounds=1, local_epochs=5, personal_epochs=1, augment=False,
    methods="fedthe", shifts="original", node_timeout=300.0, round_timeout=300.0,
    secure_aggregation=True, secure_threshold=0.67,
)  # fmt: skip
AGENTS = 3  # the other node answers by itself


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Four SuperNodes, of which all but the last have agents; the last test kills one."""
    root = tmp_path_factory.mktemp("secure")
    with stage(root, SMALL.clients, late=SMALL.clients - AGENTS) as made:
        for i in range(AGENTS, SMALL.clients):
            config = {"name": str(i), "state-dir": str(root / f"state-{i}"), "device": "cpu"}
            own = (made.keys.ca, made.keys.node(i)[0])
            made.nodes.append(deployment.supernode(made.home / f"node-{i}", made.fleet, config, own))
        yield made


def told(made: Stage, run: str, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in made.events(run) if event["event"] in kinds]


def test_a_secure_run_over_grpc_has_the_bits_of_one_process(made: Stage, tmp_path: Path) -> None:
    name = "undisturbed"
    made.run(SMALL, run_name=name).result(PATIENCE)
    sums = told(made, name, "secure_aggregation")
    assert [(one["kind"], one["survivors"], one["unmasked"]) for one in sums] == [
        ("train", 4, True),
        ("train.statistics", 4, True),
    ]
    assert not told(made, name, "failed", "late", "refused")
    assert_same_results(made.results(name), run(tmp_path / "alone", SMALL.replace(state_dir=str(tmp_path / "own"))))


def test_a_node_killed_in_a_secure_round_leaves_the_mean_of_the_others(made: Stage, tmp_path: Path) -> None:
    """Its masks with the others are in their replies: what it has shared of its key removes them."""
    settings = SMALL.replace(methods="fedavg", local_epochs=20, min_replies=3)
    name = "killed"
    running = made.run(settings, run_name=name)
    wait_until(lambda: made.in_training(1), "training", running)
    made.kill_node_at_work(1)
    running.result(PATIENCE)
    (done,) = told(made, name, "round")
    assert done["replied"] == [0, 2, 3]
    assert [(one["clients"], one["survivors"], one["unmasked"]) for one in told(made, name, "secure_aggregation")] == [
        (4, 3, True)
    ]
    (failed,) = [event for event in told(made, name, "failed") if event["phase"] == "train cross_entropy"]
    assert (failed["partition"], failed["round"]) == (1, 1)
    assert "heartbeat" in failed["reason"]
    assert {event["partition"] for event in told(made, name, "evaluation")} == {0, 2, 3}

    def watch(partition: int, request: Request) -> None:
        if partition == 1 and isinstance(request, Train | Evaluate):
            raise ConnectionError("killed")

    alone = settings.replace(state_dir=str(tmp_path / "own"))
    assert_same_results(made.results(name), run(tmp_path / "alone", alone, watch))
