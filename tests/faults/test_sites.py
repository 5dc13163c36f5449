"""Boxes with folders of their own: the bits of one process, a bad model, a box that joins, and one that is killed."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.client.agent.control import Connection, rollback
from fedtta.data import load
from fedtta.models import load_model, save_model
from fedtta.settings import Settings
from fedtta.simulation import deployment, devices, superlink
from fedtta.simulation.demo.sites import SITES, Arrivals, write_sites
from fedtta.simulation.engine import simulate
from tests.faults.stage import PATIENCE, Stage, stage, wait_until
from tests.server.test_run import assert_same_results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(6 * PATIENCE)]

ROUNDS = 6  # of the run that a box joins in the fourth
LATE = [site.name for site in SITES if site.joins_late]
SETTINGS = Settings(
    classes=",".join(str(i) for i in range(10)), clients=len(SITES) - len(LATE), rounds=2, image_size=16,
    local_epochs=4, learning_rate=0.1, device="cpu", model_options="norm=batch", methods="fedavg,tent",
    shifts="original", round_timeout=300.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Arrivals]]:
    """Boxes with a folder each; the last one is not started. The last test starts it and kills another."""
    root = tmp_path_factory.mktemp("sites")
    arrivals = write_sites(root / "data", load("digits", image_size=32))
    keys = {site.name: {"data": f"folder:{root}/data/{site.name}/images", "adapter": "tent"} for site in SITES}
    with stage(root, keys, late=len(LATE)) as made:
        yield made, arrivals


def images_in(root: Path, name: str) -> int:
    return len(list((root / "data" / name / "images").rglob("*.png")))


def told(made: Stage, run: str, event: str) -> list[dict[str, Any]]:
    return [one for one in made.events(run) if one["event"] == event]


def test_three_boxes_train_on_all_their_images_as_in_one_process_and_refuse_a_bad_model(
    boxes: tuple[Stage, Arrivals],
) -> None:
    made, arrivals = boxes
    made.run(SETTINGS, run_name="good").result(PATIENCE)
    (begin,) = told(made, "good", "clients")
    assert begin["names"] == ["east", "north", "south"]
    for name, sizes, data in zip(begin["names"], begin["sizes"], begin["data"], strict=True):
        assert sum(sizes) == data["samples"] == images_in(made.root, name)
        assert data["skipped"] == 0
    assert [data["classes_present"] for data in begin["data"]] == [None, 10, 9]

    alone = made.root / "alone"
    alone.mkdir()
    for name in begin["names"]:
        shutil.copy(made.root / f"device-{name}.toml", alone)
    simulate(SETTINGS.replace(devices=f"{alone}/device-*.toml", results=str(alone), run_name="good", workers=1))
    assert_same_results(made.results("good"), alone / "good")
    served_in_turn(made, arrivals)


def served_in_turn(made: Stage, arrivals: Arrivals) -> None:
    """A model that predicts one class is refused, a good one is served, and the one before comes back, under load."""
    north = made.names.index("north")
    first = version(made, north)
    good = made.results("good") / "model.safetensors"
    with under_load(made, "north", arrivals) as answers:
        network, spec = load_model(good)
        network.head.weight.data.zero_()
        network.head.bias.data[:] = 0
        network.head.bias.data[3] = 10
        save_model(made.root / "bad.safetensors", network, spec)
        bad = SETTINGS.replace(rounds=0, init=str(made.root / "bad.safetensors"), methods="fedavg")
        made.run(bad, run_name="bad").result(PATIENCE)
        assert verdicts(made, "bad")["north"].startswith("refused")
        assert version(made, north) == first
        status = made.status(north)
        assert status is not None
        assert any("refused" in note for note in status.notes)

        better = SETTINGS.replace(rounds=1, init=str(good), methods="fedavg")
        made.run(better, run_name="better").result(PATIENCE)
        assert verdicts(made, "better")["north"].startswith("promoted")
        assert version(made, north) != first
        rollback(Connection(f"unix:{made.sockets}/anorth"))
        assert version(made, north) == first
    assert len(answers) > 10
    assert all(len(one) == 10 for one in answers)


def verdicts(made: Stage, run: str) -> dict[str, str]:
    names = told(made, run, "clients")[0]["names"]
    return {names[one["partition"]]: one["served"] for one in told(made, run, "served")}


def version(made: Stage, box: int) -> str:
    status = made.status(box)
    assert status is not None
    return status.model_version


@contextlib.contextmanager
def under_load(made: Stage, name: str, arrivals: Arrivals) -> Iterator[list[Any]]:
    """Ask a box for predictions, some in each second; a request that fails raises at the end."""
    answers, failures, stopping = [], [], threading.Event()
    network, spec = load_model(made.results("good") / "model.safetensors")
    del network
    size = spec["image_size"]
    images = np.ascontiguousarray(arrivals.images[:10, :, :size, :size])

    def ask() -> None:
        try:
            while not stopping.wait(0.1):
                reply = deployment.ask(f"unix:{made.sockets}/a{name}", images)[1]
                assert reply is not None
                answers.append(deployment.predicted(reply))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]


def online(made: Stage) -> int:
    return sum(one.status == "online" for one in devices.listed(*superlink.connection(made.home)))


def test_a_fourth_box_joins_midway_and_one_that_is_killed_is_named(boxes: tuple[Stage, Arrivals]) -> None:
    made, _ = boxes
    name = "long"
    run = made.run(SETTINGS.replace(rounds=ROUNDS), run_name=name)
    wait_until(lambda: made.rounds(name) >= 1, "a round", run)
    south, late = made.names.index("south"), len(made.names) - 1
    with made.held(south):  # the round takes as long as a box takes to start
        made.start_agent(late)
        made.start_node(late)
        wait_until(lambda: online(made) == len(made.names), "the fourth box", run)
        before = made.rounds(name)
    wait_until(lambda: made.rounds(name) > before, "the next round", run)
    with made.held(south):  # and this one as long as it takes to say who it is
        wait_until(lambda: made.answered(late) > 0, "its answer", run)
    wait_until(lambda: bool(told(made, name, "joined")), "the fourth box in the run", run)
    made.kill_node_at_work(made.names.index("north"))
    run.result(PATIENCE)
    (joined,) = told(made, name, "joined")
    assert joined["name"] == LATE[0]
    assert sum(joined["sizes"]) == images_in(made.root, LATE[0])
    rounds = told(made, name, "round")
    assert len(rounds) == ROUNDS
    names = [*told(made, name, "clients")[0]["names"], LATE[0]]
    replied = [{names[partition] for partition in one["replied"]} for one in rounds]
    assert {"north", "south"} == replied[0]
    assert {"south", LATE[0]} == replied[-1]
    lost = [one for one in made.events(name) if one["event"] in ("left", "failed", "late")]
    assert {names[one["partition"]] for one in lost} == {"north"}
    assert "heartbeat" in told(made, name, "failed")[0]["reason"]
    tested = told(made, name, "evaluation")
    assert {names[one["partition"]] for one in tested} == {"south", LATE[0]}
    assert made.events(name)[-1]["status"] == "completed"
