"""The part `simulators` on a tiny federation: Flower's nodes in this process, and a process in place of pfl-research.

pfl-research itself is asked where its environment is at hand (`python -m fedtta.benchmarks speed --parts simulators`
makes it).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedtta.benchmarks.speed import command, pfl_app, simulators
from fedtta.benchmarks.speed.simulators import Simulated
from fedtta.server.events import RunError
from fedtta.settings import Settings
from fedtta.simulation import flower
from tests.flower import LocalGrid

#: A process that answers as `pfl_app.py`: FedAvg in plain PyTorch, client after client, and the second time the same.
STAND_IN = """
import json, shutil, sys
from pathlib import Path

path, result, validate = sys.argv[1:]
seconds, kept = [9.0, 8.0 if validate else 4.0], Path(__file__).with_name("kept.npz")
open(result, "w").write(json.dumps({"seconds": seconds, "versions": {"pfl": "a stand-in"}}))
if kept.exists():
    shutil.copy(kept, result.replace(".json", ".npz"))
    sys.exit()

import numpy as np, torch
from fedtta.benchmarks.speed import pfl_app

job = pfl_app.read(path)
state = job.network().state_dict()
for orders in job.orders:
    sums = {name: torch.zeros_like(value) for name, value in state.items()}
    for client, order in zip(job.clients, orders):
        network = job.network()
        network.load_state_dict(state)
        x, labels = client.pixels[order] / 255, client.labels[order]
        for start in range(0, len(order), job.batch):
            batch = slice(start, start + job.batch)
            loss = torch.nn.functional.cross_entropy(network(x[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            with torch.no_grad():
                for value, gradient in zip(network.parameters(), gradients):
                    value -= job.lr * gradient
        for name, value in network.state_dict().items():
            sums[name] += len(order) * value
    state = {name: value / sum(map(len, orders)) for name, value in sums.items()}
np.savez(kept, **{name: value.numpy() for name, value in state.items()})
shutil.copy(kept, result.replace(".json", ".npz"))
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    simulators.write_noise(tmp_path / "data.npz")
    return Settings(**{**simulators.BASE, **simulators.QUICK, "data_dir": str(tmp_path)})


def start(server: ServerApp, client: ClientApp, settings: Settings) -> None:
    """Run two apps on a grid in this process."""

    def node(number: int) -> Callable[[Message], RecordDict]:
        context = SimpleNamespace(node_config={"partition-id": number})
        return lambda message: client(message, context).content  # type: ignore[arg-type]

    grid = LocalGrid({number: node(number) for number in range(settings.clients)})
    server(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}))


def test_all_simulators_end_with_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(simulators, "PFL_APP", tmp_path / "stand_in.py")
    monkeypatch.setattr(simulators, "environment", lambda folder: Path(sys.executable))
    monkeypatch.setattr(simulators, "ENGINES", {"vectorised": "one process"})
    monkeypatch.setattr(flower, "start", start)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    measured = simulators.simulators(quick=True)
    titles = [
        f"3 clients, one process, beside {name}" for name in ("Flower", "pfl, no validation", "pfl, with validation")
    ]
    assert [one.what for one in measured.ratios] == titles
    assert [one.other for one in measured.ratios[1:]] == [4.0, 8.0]
    assert all(one.ratio == one.ours / one.other for one in measured.ratios)
    found = measured.details["3 clients"]["simulations"]
    assert len({one["accuracy"] for one in found.values()}) == 1
    assert all(one["weights_apart"] < 1e-6 for one in found.values())
    assert measured.details["3 clients"]["images"]["train"] == [40, 40]  # 60 % of 200 images


def test_another_model_is_refused(settings: Settings, tmp_path: Path) -> None:
    weights = pfl_app.read(str(simulators.write_job(tmp_path / "job.npz", settings))).weights
    other = {**weights, "head.bias": weights["head.bias"] + np.float32(1e-3)}
    found = {"fedtta, Ray": Simulated([1.0, 2.0], weights, {}), "Flower": Simulated([1.0, 4.0, 8.0], weights, {})}
    (one,) = simulators.compared("3 clients", found, settings)
    assert (one.ratio, one.mark) == (2.0 / 6.0, "✓")
    with pytest.raises(RunError, match="a weight of pfl differs from that of fedtta, Ray by"):
        simulators.compared("3 clients", {**found, "pfl": Simulated([1.0, 2.0], other, {})}, settings)


@pytest.mark.skipif(not (simulators.ENVIRONMENT / simulators.PFL).exists(), reason="pfl-research is not installed")
def test_pfl_research_trains_as_flower_does(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "start", start)
    job = simulators.write_job(tmp_path / "job.npz", settings)
    flowers = simulators.flowers(settings, tmp_path, job)
    pfls = simulators.pfls(simulators.environment(simulators.ENVIRONMENT), job, tmp_path / "pfl.json", True)
    assert simulators.difference(flowers.weights, pfls.weights) < 1e-5
    assert (len(pfls.seconds), pfls.versions["pfl"]) == (2, simulators.PFL.split("==")[1])
    assert pfls.versions["torch"] == torch.__version__


def test_the_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def called(words: list[str], *_: Any, **__: Any) -> Any:
        ran.append(words)
        python = tmp_path / "pfl" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        python.mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(returncode=len(ran) // 3, stderr="no index")

    monkeypatch.setattr(subprocess, "run", called)
    monkeypatch.setattr(simulators.shutil, "which", lambda name, path: f"/bin/{name}")
    for _ in range(2):
        assert simulators.environment(tmp_path / "pfl") == tmp_path / "pfl" / "bin" / "python"
    assert [words[1] for words in ran] == ["venv", "pip"]
    assert ran[1][-1] == simulators.PFL
    with pytest.raises(RunError, match="no index"):
        simulators.environment(tmp_path / "other")
    monkeypatch.setattr(simulators.shutil, "which", lambda name, path: None)
    with pytest.raises(RunError, match="`uv` must be on the PATH"):
        simulators.environment(tmp_path / "other")


def test_it_is_a_part_of_speed() -> None:
    assert command.PARTS["simulators"].measure is simulators.simulators
