"""kill -9 of what trains: the run ends, or is resumed, with the bits of a run that nothing has happened to."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from fedtta.settings import Settings
from fedtta.simulation.superlink import FlowerError
from tests.faults.stage import PATIENCE, Stage, kill, stage, statuses, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

RUN = "killed"
#: Momentum: the server has a state of its own. A client trains for about a second.
SMALL = Settings(
    clients=2, fraction=0.3, image_size=20, device="cpu", rounds=3, local_epochs=10, personal_epochs=1, augment=False,
    methods="fedavgm", shifts="original", node_timeout=300.0, round_timeout=300.0, run_name=RUN,
)  # fmt: skip


def wait_for_training(made: Stage, after: int, run: Future[None]) -> None:
    """Wait until the first client trains and so many rounds, or more, have ended."""
    wait_until(lambda: made.rounds(RUN) >= after and made.in_training(0), f"training after round {after}", run)
    assert made.rounds(RUN) < SMALL.rounds


def test_a_server_app_killed_in_a_round_is_resumed(tmp_path: Path) -> None:
    with stage(tmp_path) as made:
        first = made.run(SMALL)
        wait_for_training(made, 1, first)
        kill(*made.processes("flwr-serverapp"))
        with pytest.raises(FlowerError, match="heartbeat"):
            first.result(PATIENCE)
        assert made.rounds(RUN) < SMALL.rounds
        made.run(SMALL, resume=str(made.results(RUN))).result(PATIENCE)
    assert [event["event"] for event in made.events(RUN)].count("resumed") == 1
    assert_same_results(made.results(RUN), run(tmp_path / "undisturbed", SMALL))


def test_a_run_is_resumed_by_itself_when_its_superlink_was_killed(tmp_path: Path) -> None:
    """Its ServerApp ends with it; restarted on its database it knows its nodes, and fails the run."""
    with stage(tmp_path) as made:
        first = made.run(SMALL, resumes=2)
        wait_for_training(made, 1, first)
        kill(*made.processes("flower-superlink"))
        wait_until(lambda: not made.processes("flwr-serverapp"), "the ServerApp to end")
        made.restart_superlink()
        first.result(PATIENCE)
        (entry, resumed) = sorted(statuses(made.home))
    assert entry == "finished:completed"
    assert resumed == "finished:failed"
    assert [event["event"] for event in made.events(RUN)].count("resumed") == 1
    assert_same_results(made.results(RUN), run(tmp_path / "undisturbed", SMALL))


def test_a_round_waits_for_a_killed_supernode_that_the_quorum_needs(tmp_path: Path) -> None:
    settings = SMALL.replace(min_replies=2)
    with stage(tmp_path) as made:
        first = made.run(settings)
        wait_until(lambda: made.rounds(RUN) >= 1, "a round", first)
        with made.managed("node-1"):
            made.kill_node_at_work(1)
            first.result(PATIENCE)
    (failed,) = [event for event in made.events(RUN) if event["event"] == "failed"]
    assert (failed["partition"], failed["training"]) == (1, "fedavgm")
    assert failed["round"] in (2, 3)
    assert "heartbeat" in failed["reason"]
    notes = [event["text"] for event in made.events(RUN) if event["event"] == "note"]
    assert [note for note in notes if note.endswith("the round is repeated")]
    # the client trains the round again from where it began, not from where it got to
    assert_same_results(made.results(RUN), run(tmp_path / "undisturbed", SMALL))


def test_a_run_goes_on_without_a_killed_supernode_that_no_quorum_needs(tmp_path: Path) -> None:
    with stage(tmp_path) as made:
        first = made.run(SMALL)
        wait_until(lambda: made.rounds(RUN) >= 1, "a round", first)
        made.kill_node_at_work(1)
        first.result(PATIENCE)
    events = made.events(RUN)
    assert {event["partition"] for event in events if event["event"] == "failed"} == {1}
    replied = [event["replied"] for event in events if event["event"] == "round"]
    assert replied in ([[0, 1], [0], [0]], [[0, 1], [0, 1], [0]])
    assert {event["partition"] for event in events if event["event"] == "evaluation"} == {0}
    assert events[-1]["status"] == "completed"
