"""One SuperLink and two SuperNodes over gRPC give the bits of a run in one process, and the network travels once.

A message's ClientApp is a process of its own there: what it knows, it was sent or has on its node's disk. FedICON's
phases, test-time rounds and agents are in `tests/faults/test_undisturbed.py`.
"""

from __future__ import annotations

import os
import signal
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.supercore.task_identity import TaskIdentity

from fedtta.models import load_arrays
from fedtta.settings import Settings
from fedtta.simulation import deployment, superlink
from tests.integration.test_flower_cli import Mark
from tests.server.test_run import assert_same_results, events, run

PATIENCE = 900.0  # seconds that a run which takes some 40 may take on a busy machine
pytestmark = [pytest.mark.faults, pytest.mark.timeout(3 * PATIENCE)]

SHARED = Settings(
    clients=2, fraction=0.2, image_size=20, device="cpu", local_epochs=1, personal_epochs=0, augment=False,
    shifts="original", node_timeout=300.0, round_timeout=300.0,
)  # fmt: skip
#: Steps so large that the learned rates change predictions.
RATES = SHARED.replace(
    methods="fedavg,atp,atp[mode=online]", model="shallow-cnn", rounds=1, learning_rate=0.2, rates_rounds=2,
    rates_learning_rate=10.0,
)  # fmt: skip
MESSAGES = 5  # to each node: identify, train, rates twice, evaluate
#: What a run's events say of the machine: times, digests over them, and ids that Flower gives nodes.
TIMES = {"at", "digest", "node_id", "seconds", "wall_seconds", "train_seconds"}


@dataclass
class Runs:
    """Where things are after the run, on nodes and in one process."""

    root: Path
    refused: str = ""  # the error of a run that the app refuses
    listed: list[dict[str, Any]] = field(default_factory=list)  # by `flwr ls`
    left: list[int] = field(default_factory=list)  # processes that were still there

    @property
    def home(self) -> Path:
        return self.root / "flower"

    def node(self, partition: int) -> Path:
        """The folder `state-dir` of one SuperNode."""
        return self.root / f"state of {partition}"

    @property
    def deployed(self) -> Path:
        return self.root / "deployed" / "rates"

    @property
    def reference(self) -> Path:
        return self.root / "reference"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run that is refused, and one that is not, which also runs in this process."""
    made = Runs(tmp_path_factory.mktemp("deployment"))
    made.home.mkdir()
    mark = Mark(uuid.uuid4().hex)
    nodes = [{"name": str(i), "state-dir": str(made.node(i))} for i in range(2)]
    config = RATES.flat() | {"results": str(made.root / "deployed"), "run-name": "rates"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDTTA_DATA", raising=False)
        patch.setenv(*mark.text.decode().split("="))
        try:
            with deployment.deployment(made.home, nodes):
                with pytest.raises(superlink.FlowerError) as refused:
                    deployment.run(made.home, config | {"rounds": -1}, PATIENCE)
                made.refused = str(refused.value)
                deployment.run(made.home, config, PATIENCE)
                made.listed = superlink.flwr(made.home, "ls", superlink.CONNECTION)["runs"]
        finally:
            made.left = mark.living()
            for pid in made.left:
                os.kill(pid, signal.SIGKILL)
        for attribute in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, attribute, 1)
        run(made.reference, RATES.replace(state_dir=str(made.root / "state of all")))
    return made


def told(folder: Path, kind: str | None = None) -> list[dict]:
    """Events without times and ids of nodes, and without the first, which is about the machine."""
    found = [{key: value for key, value in event.items() if key not in TIMES} for event in events(folder)[1:]]
    return [event for event in found if kind in (None, event["event"])]


def size(path: Path) -> int:
    """Bytes of the numbers in a file of arrays."""
    return sum(array.nbytes for array in load_arrays(path)[0].values())


def network(runs: Runs, partition: int = 0) -> Path:
    """Where a node keeps the network of the run: the one that has the names and values of its model."""
    model = load_arrays(runs.deployed / "model.safetensors")[0]
    for path in sorted((runs.node(partition) / "networks").iterdir()):
        arrays = load_arrays(path)[0]
        if all(key in model and np.array_equal(value, model[key]) for key, value in arrays.items()):
            return path
    raise AssertionError(f"node {partition} does not hold the network")


def test_models_rates_and_tables_are_those_of_one_process(runs: Runs) -> None:
    assert_same_results(runs.deployed, runs.reference)
    files = {path.name for path in runs.deployed.iterdir()}
    assert files == {path.name for path in runs.reference.iterdir()}
    assert "rates.safetensors" in files


def test_all_that_happened_is_what_happens_in_one_process(runs: Runs) -> None:
    ours = told(runs.deployed)
    assert ours == told(runs.reference)
    assert ours[-1] == {"event": "end", "status": "completed"}
    assert not [event for event in ours if event["event"] in ("failed", "refused")]


def test_a_run_that_the_app_refuses_fails_with_its_reason(runs: Runs) -> None:
    assert runs.refused.startswith("finished:failed")
    assert "rounds = -1: allowed is 0 or more" in runs.refused


def test_flowers_command_line_lists_runs_with_the_same_status(runs: Runs) -> None:
    assert sorted(one["status"] for one in runs.listed) == ["finished:completed", "finished:failed"]


def test_the_run_can_tell_right_from_wrong(runs: Runs) -> None:
    scores = {
        method: [event["correct"] for event in told(runs.deployed, "evaluation") if event["method"] == method]
        for method in ("fedavg", "atp")
    }
    assert scores["fedavg"] != scores["atp"]


def test_what_a_node_has_learned_is_what_it_learns_in_one_process(runs: Runs) -> None:
    for partition in range(2):
        ours = sorted(runs.node(partition).glob(f"*/{partition}/*@*.safetensors"))
        theirs = sorted(runs.root.glob(f"state of all/*/{partition}/*@*.safetensors"))
        assert len(ours) == 1  # the personal head
        by_name = {path.name: load_arrays(path)[0] for path in theirs}
        assert sorted(by_name) == sorted(path.name for path in ours)
        for path in ours:
            expected = {key: value.tobytes() for key, value in by_name[path.name].items()}
            assert {key: value.tobytes() for key, value in load_arrays(path)[0].items()} == expected, path.name


def test_private_state_stays_on_its_node(runs: Runs) -> None:
    for partition in range(2):
        folders = [path for path in runs.node(partition).glob("*/*") if path.is_dir()]
        assert [path.name for path in folders] == [str(partition)]
        kept = sorted(path.name for path in (runs.node(partition) / "networks").iterdir())
        assert kept == [network(runs, partition).name]  # whose network travels once


def test_after_the_network_only_rates_travel(runs: Runs) -> None:
    first, second = told(runs.deployed, "rates_round")
    numbers = len(load_arrays(runs.deployed / "rates.safetensors")[0])
    assert numbers > 10
    assert first["bytes_down"] == 2 * (size(network(runs)) + 8 * numbers)
    assert second["bytes_down"] == first["bytes_up"] == second["bytes_up"] == 2 * 8 * numbers
    assert first["context_bytes"] == second["context_bytes"] == 0


def test_every_message_was_answered_by_a_process_of_its_own(runs: Runs) -> None:
    for partition in range(2):
        log = (runs.home / f"node-{partition}" / deployment.NODE_LOG).read_text(encoding="utf-8")
        assert log.count("Receiving: ") == log.count("Start `flwr-clientapp` process") == MESSAGES


def test_no_process_outlives_the_deployment(runs: Runs) -> None:
    assert runs.left == []
    assert superlink.started(runs.home) == []
