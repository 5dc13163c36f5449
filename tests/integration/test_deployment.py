"""One SuperLink and two SuperNodes over gRPC give the bits of a run in one process, and the network travels once.

A message's ClientApp is a process of its own there: what it knows, it was sent or has on its node's disk.
"""

from __future__ import annotations

import os
import signal
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from flwr.common.config import parse_config_args
from flwr.supercore.task_identity import TaskIdentity

from fedtta.models import load_arrays
from fedtta.settings import Settings
from fedtta.simulation import deployment, superlink
from tests.integration.test_flower_cli import Mark
from tests.server.test_run import assert_same_results, events, run

PATIENCE = 900.0  # seconds that a run which takes some 40 may take on a busy machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE)]

SHARED = Settings(
    clients=2, fraction=0.2, image_size=20, device="cpu", local_epochs=1, personal_epochs=0, augment=False,
    shifts="original", node_timeout=300.0, round_timeout=300.0,
)  # fmt: skip
#: A network that travels once, too; with a set temperature: with the median, two clients' W is the same whatever they
#: send. It runs among the tests of faults (`make test-faults`).
ADAPT = SHARED.replace(
    methods="bbn", model="resnet20-bn", model_options="depth=8;width=4", rounds=0,
    collaborations="pfedbbn[temperature=1]", stream_mix="iid", stream_size=40, stream_batch=20, stream_rounds=2,
)  # fmt: skip
RUNS = {
    # steps so large that the learned rates change predictions
    "rates": SHARED.replace(
        methods="fedavg,atp,atp[mode=online]", model="shallow-cnn", rounds=1, learning_rate=0.2,
        rates_rounds=2, rates_learning_rate=10.0,
    ),
    # FedICON's three phases, and a training that keeps a model of the client's own
    "personal": SHARED.replace(
        methods="fedicon[mode=offline],fedicon,ditto", model_options="norm=batch", rounds=1, classifier_rounds=1,
        classifier_epochs=1,
    ),
}  # fmt: skip
#: To each node: identify, train, rates twice, evaluate; identify, FedICON's encoder and classifier, evaluate, Ditto's
#: round, evaluate.
MESSAGES = 5 + 6
#: What a run's events say of the machine: times, digests over them, and ids that Flower gives nodes.
TIMES = {"at", "digest", "node_id", "seconds", "wall_seconds", "train_seconds"}


@dataclass
class Runs:
    """Where things are after both runs, on nodes and in one process."""

    root: Path
    left: list[int] = field(default_factory=list)  # processes that were still there

    @property
    def home(self) -> Path:
        return self.root / "flower"

    def node(self, partition: int) -> Path:
        """The folder `state-dir` of one SuperNode."""
        return self.root / f"state of {partition}"

    def deployed(self, name: str) -> Path:
        return self.root / "deployed" / name

    def reference(self, name: str) -> Path:
        return self.root / "reference" / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Both runs on the same SuperLink and SuperNodes, one after another, and both in this process."""
    made = Runs(tmp_path_factory.mktemp("deployment"))
    made.home.mkdir()
    mark = Mark(uuid.uuid4().hex)
    nodes = [{"name": str(i), "state-dir": str(made.node(i))} for i in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDTTA_DATA", raising=False)
        patch.setenv(*mark.text.decode().split("="))
        try:
            with deployment.deployment(made.home, nodes):
                for name, settings in RUNS.items():
                    config = settings.flat() | {"results": str(made.root / "deployed"), "run-name": name}
                    deployment.run(made.home, config, PATIENCE)
        finally:
            made.left = mark.living()
            for pid in made.left:
                os.kill(pid, signal.SIGKILL)
        for attribute in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, attribute, 1)
        for name, settings in RUNS.items():
            run(made.reference(name), settings.replace(state_dir=str(made.root / "state of all" / name)))
    return made


def told(folder: Path, kind: str | None = None) -> list[dict]:
    """Events without times and ids of nodes, and without the first, which is about the machine."""
    found = [{key: value for key, value in event.items() if key not in TIMES} for event in events(folder)[1:]]
    return [event for event in found if kind in (None, event["event"])]


def size(path: Path) -> int:
    """Bytes of the numbers in a file of arrays."""
    return sum(array.nbytes for array in load_arrays(path)[0].values())


def network(runs: Runs, name: str, partition: int = 0) -> Path:
    """Where a node keeps the network of a run: the one that has the names and values of the run's model."""
    model = load_arrays(runs.deployed(name) / "model.safetensors")[0]
    for path in sorted((runs.node(partition) / "networks").iterdir()):
        arrays = load_arrays(path)[0]
        if all(key in model and np.array_equal(value, model[key]) for key, value in arrays.items()):
            return path
    raise AssertionError(f"node {partition} does not hold the network of {name}")


@pytest.mark.parametrize("name", RUNS)
def test_models_rates_and_tables_are_those_of_one_process(runs: Runs, name: str) -> None:
    assert_same_results(runs.deployed(name), runs.reference(name))
    files = {path.name for path in runs.deployed(name).iterdir()}
    assert files == {path.name for path in runs.reference(name).iterdir()}
    expected = {"rates": "rates.safetensors", "personal": "model-ditto.safetensors"}
    assert expected[name] in files


@pytest.mark.parametrize("name", RUNS)
def test_all_that_happened_is_what_happens_in_one_process(runs: Runs, name: str) -> None:
    ours = told(runs.deployed(name))
    assert ours == told(runs.reference(name))
    assert ours[-1] == {"event": "end", "status": "completed"}
    assert not [event for event in ours if event["event"] in ("failed", "refused")]


def test_the_runs_can_tell_right_from_wrong(runs: Runs) -> None:
    scores = {
        method: [event["correct"] for event in told(runs.deployed("rates"), "evaluation") if event["method"] == method]
        for method in ("fedavg", "atp")
    }
    assert scores["fedavg"] != scores["atp"]


def test_what_a_node_has_learned_is_what_it_learns_in_one_process(runs: Runs) -> None:
    for partition in range(2):
        ours = sorted(runs.node(partition).glob(f"*/{partition}/*@*.safetensors"))
        theirs = sorted(runs.root.glob(f"state of all/*/*/{partition}/*@*.safetensors"))
        # the personal head; FedICON's two rounds and Ditto's
        assert len(ours) == 1 + 3
        by_name = {path.name: load_arrays(path)[0] for path in theirs}
        assert sorted(by_name) == sorted(path.name for path in ours)
        for path in ours:
            expected = {key: value.tobytes() for key, value in by_name[path.name].items()}
            assert {key: value.tobytes() for key, value in load_arrays(path)[0].items()} == expected, path.name


def test_private_state_stays_on_its_node(runs: Runs) -> None:
    for partition in range(2):
        folders = [path for path in runs.node(partition).glob("*/*") if path.is_dir()]
        assert [path.name for path in folders] == [str(partition)] * len(RUNS)
        kept = sorted(path.name for path in (runs.node(partition) / "networks").iterdir())
        assert kept == [network(runs, "rates", partition).name]  # whose network travels once


def test_arrays_that_a_stage_does_not_aggregate_stay_on_the_nodes(runs: Runs) -> None:
    encoder, classifier, ditto = told(runs.deployed("personal"), "round")
    arrays = load_arrays(runs.deployed("personal") / "model.safetensors")[0]
    head = sum(value.nbytes for name, value in arrays.items() if name.startswith("head."))
    whole = sum(value.nbytes for value in arrays.values())
    assert (encoder["bytes_up"], classifier["bytes_up"]) == (2 * (whole - head), 2 * head)
    assert encoder["bytes_down"] == classifier["bytes_down"] == 2 * whole  # each stage's first message
    assert ditto["bytes_up"] == ditto["bytes_down"] == 2 * whole
    scores = {event["method"]: event["correct"] for event in told(runs.deployed("personal"), "evaluation")}
    assert set(scores) == {"fedicon[mode=offline]", "fedicon", "ditto"}


def test_after_the_network_only_rates_travel(runs: Runs) -> None:
    first, second = told(runs.deployed("rates"), "rates_round")
    numbers = len(load_arrays(runs.deployed("rates") / "rates.safetensors")[0])
    assert numbers > 10
    assert first["bytes_down"] == 2 * (size(network(runs, "rates")) + 8 * numbers)
    assert second["bytes_down"] == first["bytes_up"] == second["bytes_up"] == 2 * 8 * numbers
    assert first["context_bytes"] == second["context_bytes"] == 0


def test_the_error_of_a_failed_run_has_the_logs_of_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That Flower's reason is in it, `test_flower_cli` shows with a real run."""

    def refused(*_: object, **__: object) -> None:
        raise superlink.FlowerError("finished:failed: rounds = -1")

    monkeypatch.setattr(superlink, "run", refused)
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        (tmp_path / f"node-{node}" / deployment.NODE_LOG).write_text(f"first\nlast of {node}\n")
    with pytest.raises(superlink.FlowerError, match=r"(?s)^finished:failed: rounds = -1\n.*last of 0.*last of 1"):
        deployment.run(tmp_path, {}, PATIENCE)


def test_a_node_config_is_what_flower_reads() -> None:
    config = {"name": "site-a", "rounds": 1, "state-dir": "/var/lib/a folder = ü", "fraction": 0.5, "download": True}
    assert parse_config_args([deployment.node_config(config)]) == config
    with pytest.raises(ValueError, match="without quotes"):
        deployment.node_config({"state-dir": 'a "b"'})


def test_every_message_was_answered_by_a_process_of_its_own(runs: Runs) -> None:
    for partition in range(2):
        log = (runs.home / f"node-{partition}" / deployment.NODE_LOG).read_text(encoding="utf-8")
        assert log.count("Receiving: ") == log.count("Start `flwr-clientapp` process") == MESSAGES


def test_no_process_outlives_the_deployment(runs: Runs) -> None:
    assert runs.left == []
    assert superlink.started(runs.home) == []
