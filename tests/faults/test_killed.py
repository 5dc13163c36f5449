"""kill -9 of what trains: the run ends, or is resumed, with the bits of a run that nothing has happened to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from fedtta.messages.flower import allow_messages
from fedtta.settings import Settings
from tests.faults.stage import PATIENCE, Stage, kill, stage, wait_until
from tests.server.test_run import assert_same_results, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

#: Momentum: the server has a state of its own. A client trains for about a second.
SMALL = Settings(
    clients=2, fraction=0.3, image_size=20, device="cpu", rounds=3, local_epochs=10, personal_epochs=1, augment=False,
    methods="fedavgm", shifts="original", node_timeout=300.0, round_timeout=300.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("killed")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    allow_messages()
    return run(tmp_path_factory.mktemp("undisturbed"), SMALL)


@contextlib.contextmanager
def in_round(made: Stage, name: str, after: int, run: Future[None]) -> Iterator[None]:
    """Wait until so many rounds, or more, have ended, and hold the first client at work in the next one."""
    wait_until(lambda: made.rounds(name) >= after, f"round {after}", run)
    with made.held_at_work(0):
        assert made.rounds(name) < SMALL.rounds
        yield


def test_a_run_is_resumed_by_itself_when_its_server_app_and_then_its_superlink_were_killed(
    made: Stage, undisturbed: Path
) -> None:
    """A ServerApp ends with its SuperLink, which, restarted on its database, knows its nodes, and fails the run."""
    name = "server"
    running = made.run(SMALL, resumes=2, run_name=name)

    def resumed() -> int:
        return [event["event"] for event in made.events(name)].count("resumed")

    with in_round(made, name, 1, running):
        kill(*made.processes("flwr-serverapp"))
    wait_until(lambda: resumed() == 1, "the run to be resumed", running)
    with in_round(made, name, 2, running):
        kill(*made.processes("flower-superlink"))
    wait_until(lambda: not made.processes("flwr-serverapp"), "the ServerApp to end")
    made.restart_superlink()
    running.result(PATIENCE)
    lost = "finished:failed No heartbeat received from the task"
    completed, *ends = made.ends(name)
    assert completed == "finished:completed"
    assert [end[: len(lost)] for end in ends] == [lost, lost]
    assert resumed() == 2
    assert_same_results(made.results(name), undisturbed)


def test_a_round_waits_for_a_killed_supernode_that_the_quorum_needs(made: Stage, undisturbed: Path) -> None:
    name = "node"
    running = made.run(SMALL, min_replies=2, run_name=name)
    wait_until(lambda: made.rounds(name) >= 1, "a round", running)
    with made.managed("node-1"):
        made.kill_node_at_work(1)
        running.result(PATIENCE)
    (failed,) = [event for event in made.events(name) if event["event"] == "failed"]
    assert (failed["partition"], failed["training"]) == (1, "fedavgm")
    assert failed["round"] in (2, 3)
    assert "heartbeat" in failed["reason"]
    notes = [event["text"] for event in made.events(name) if event["event"] == "note"]
    assert [note for note in notes if note.endswith("the round is repeated")]
    # the client trains the round again from where it began, not from where it got to
    assert_same_results(made.results(name), undisturbed)
