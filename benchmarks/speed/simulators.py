"""Simulated rounds beside those of Flower's simulation and of pfl-research: same clients, network, batches and steps.

Our run's clients are written to one file that the others read: their images, the order of every epoch, and the initial
weights. So all of them compute the same model up to rounding, which is checked. Each trains with one worker of one
thread. Our clients validate the received network before they train, and no setting switches that off; Flower's and
pfl-research's do not, unless it is said.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import statistics as averages
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import load_file

from fedtta.benchmarks.speed import fedavg_app, pfl_app
from fedtta.benchmarks.speed.federation import Watched
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.client.algorithms.training import generator
from fedtta.client.resources import federation_of, network_spec
from fedtta.data import Federation
from fedtta.messages.arrays import Arrays
from fedtta.models import build
from fedtta.server.events import RunError
from fedtta.settings import Settings
from fedtta.settings.versions import versions

PFL = "pfl==0.6.0"
ENVIRONMENT = Path(".cache/pfl")
LINK = "fedtta-torch.pth"
PFL_APP = Path(pfl_app.__file__)
BASE: dict[str, Any] = {
    "dataset": "cifar10", "partition": "iid", "methods": "fedavg", "shifts": "original", "augment": False,
    "local_epochs": 1, "personal_epochs": 0, "weight_decay": 0.0, "checkpoint_every": 0, "workers": 1, "device": "cpu",
    "stacked_clients": 1, "clip_factor": 0.0, "max_share": 0.0,  # the others have no limits on what a client does
}  # fmt: skip
#: Some 100 images a client to train on, and 25.
HUNDRED: dict[str, Any] = {"clients": 100, "fraction": 0.28, "rounds": 4}
THOUSAND: dict[str, Any] = {"clients": 1000, "fraction": 0.67, "rounds": 2}  # a round of Flower's takes minutes
#: Noise, because even areas make ties in max pooling, which memory formats resolve differently.
QUICK = {"dataset": "npz", "clients": 3, "rounds": 2, "fraction": 1.0}
QUICK_IMAGES = 200
#: Engine → how it is called in the table.
ENGINES = {"ray": "Ray", "vectorised": "one process"}
VALIDATED = {False: "no validation", True: "with validation"}
TARGET = 1.0  # of Flower's and pfl-research's seconds are ours, at most
TOLERANCE = 1e-4  # of a weight after all rounds; what differs is the order of additions
TIMEOUT = 3600.0  # seconds of one simulation


@dataclass(frozen=True)
class Simulated:
    """One simulation's seconds of each round, final weights, and which versions computed them."""

    seconds: list[float]
    weights: Arrays
    versions: Mapping[str, str | None]

    @property
    def round(self) -> float:
        """The median seconds of a round without the first, in which workers start."""
        return averages.median(self.seconds[1:])


def simulators(quick: bool) -> Measured:
    """Measure a round of 100 clients in each simulator; see `compare`."""
    return compare(QUICK if quick else HUNDRED)


def thousand(quick: bool) -> Measured:
    """Measure a round of 1,000 clients in each simulator; see `compare`."""
    return compare(QUICK if quick else THOUSAND)


def compare(size: Mapping[str, Any]) -> Measured:
    """Measure a round of each simulator, one after another, on the same clients.

    Raises
    ------
    RunError
        A simulation failed, or ended with other weights.
    """
    python = environment(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        if size is QUICK:
            write_noise(Path(folder) / "data.npz")
        settings = Settings(**{**BASE, **size, **({"data_dir": folder} if size is QUICK else {})})
        found, title = measured(settings, Path(folder), python), f"{settings.clients:,} clients"
        return Measured(compared(title, found, settings), {title: described(found, settings)})


def write_noise(path: Path) -> None:
    """Write images of noise as a data set."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (QUICK_IMAGES, 3, 32, 32), np.uint8)
    np.savez(path, allow_pickle=False, x=pixels, y=draw.integers(0, 10, QUICK_IMAGES))


def measured(settings: Settings, folder: Path, python: Path) -> dict[str, Simulated]:
    """Run all simulators on one federation; return their results by name."""
    job = write_job(folder / "job.npz", settings)
    found = {f"fedtta, {title}": ours(settings.replace(engine=name), folder / name) for name, title in ENGINES.items()}
    found["Flower"] = flowers(settings, folder, job)
    for validate, title in VALIDATED.items():
        found[f"pfl, {title}"] = pfls(python, job, folder / f"pfl-{validate}.json", validate)
    return found


def compared(title: str, found: Mapping[str, Simulated], settings: Settings) -> list[Ratio]:
    """Return the seconds of ours over those of the others; RunError unless all have computed the same model."""
    first, *others = found.items()
    for name, other in others:
        if not (apart := difference(first[1].weights, other.weights)) <= TOLERANCE:
            raise RunError(f"{title}: a weight of {name} differs from that of {first[0]} by {apart:.2g}")
    correct = {name: accuracy(one.weights, settings) for name, one in found.items()}
    return [
        Ratio(
            f"{title}, {name.removeprefix('fedtta, ')}, beside {beside}",
            one.round / other.round,
            "s a round",
            one.round,
            other.round,
            f"{beside}; accuracy {correct[name]:.4f} and {correct[beside]:.4f}",
            TARGET,
        )
        for name, one in found.items()
        if name.startswith("fedtta")
        for beside, other in found.items()
        if not beside.startswith("fedtta")
    ]


def described(found: Mapping[str, Simulated], settings: Settings) -> dict[str, Any]:
    """Return what is kept of the simulations beside the ratios."""
    splits = federation_of(settings).splits
    sizes = {part: [len(getattr(one, part)) for one in splits] for part in ("train", "validation", "test")}
    one = next(iter(found.values()))
    return {
        "images": {part: [min(counts), max(counts)] for part, counts in sizes.items()},
        "simulations": {
            name: {
                "seconds": other.seconds,
                "versions": dict(other.versions),
                "accuracy": accuracy(other.weights, settings),
                "weights_apart": difference(one.weights, other.weights),
            }
            for name, other in found.items()
        },
    }


def write_job(path: Path, settings: Settings) -> Path:
    """Write the clients of a run, the order of their epochs and the initial weights as `pfl_app.read` reads them."""
    federation = federation_of(settings)
    images, spec = federation.images, network_spec(federation.images, settings)
    content: dict[str, Any] = {"lr": settings.learning_rate, "batch": settings.batch_size}
    content |= {
        "mean": np.float32(spec["mean"]),
        "std": np.float32(spec["std"]),
        "orders": orders(federation, settings),
    }
    for part in ("train", "validation"):
        chosen = [getattr(one, part) for one in federation.splits]
        content[f"{part}_sizes"] = [len(one) for one in chosen]
        content[f"{part}_pixels"] = images.pixels[np.concatenate(chosen)]
        content[f"{part}_labels"] = images.labels[np.concatenate(chosen)]
    for name, value in build(**{"seed": settings.seed, **spec}).global_state().items():
        content[f"{pfl_app.INITIAL}{name}"] = value.numpy()
    np.savez(path, allow_pickle=False, **content)
    return path


def orders(federation: Federation, settings: Settings) -> np.ndarray:
    """Return the order of each client's images in its epoch of each round, int64 [rounds, images of all clients]."""
    return np.stack(
        [
            np.concatenate(
                [
                    torch.randperm(len(one.train), generator=generator(settings.seed, "local", round, number)).numpy()
                    for number, one in zip(federation.numbers, federation.splits, strict=True)
                ]
            )
            for round in range(1, settings.rounds + 1)
        ]
    )


def ours(settings: Settings, folder: Path) -> Simulated:
    """Simulate with an engine of ours, which validates in each round."""
    from fedtta.simulation import simulate

    watched = Watched()
    simulate(settings, folder, [watched])
    for event in watched.rounds:
        if event["replied"] != event["sampled"]:
            raise RunError(f"round {event['round']}: {len(event['replied'])} of {len(event['sampled'])} replied")
    first, *_ = watched.rounds
    # from the end of a round to the end of the next: all that the server does is in it
    seconds = [first["wall_seconds"], *(after["at"] - before["at"] for before, after in pairwise(watched.rounds))]
    return Simulated(seconds, load_file(folder / "model.safetensors"), versions("ray", "torch", "numpy"))


def flowers(settings: Settings, folder: Path, job: Path) -> Simulated:
    """Simulate with Flower's FedAvg and its Ray backend; a worker keeps data and network from message to message."""
    from fedtta.simulation import flower

    initial, results = folder / "initial.npz", folder / "flower.json"
    np.savez(initial, allow_pickle=False, **pfl_app.read(str(job)).weights)
    config: dict[str, Any] = {"nodes": settings.clients, "rounds": settings.rounds, "timeout": TIMEOUT}
    config |= {"results": str(results), "initial": str(initial)}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        fedavg_app.main(grid, dataclasses.replace(context, run_config=config))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    flower.start(server, flower_client(str(job)), settings)
    if not results.exists():
        raise RunError("Flower's simulation failed")
    with np.load(results.with_suffix(".npz"), allow_pickle=False) as file:
        weights = dict(file.items())
    seconds = json.loads(results.read_text(encoding="utf-8"))
    return Simulated(seconds, weights, versions("flwr", "ray", "torch", "numpy"))


def flower_client(job: str) -> ClientApp:
    """Return a ClientApp that trains on the clients of a job."""
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return Message(trained(job, message, int(context.node_config["partition-id"])), reply_to=message)

    return client


def trained(path: str, message: Message, number: int) -> RecordDict:
    """Train a client of a job on the received weights, in plain PyTorch; return the content of its reply."""
    torch.set_num_threads(1)
    job = pfl_app.read(path)
    network = job.network()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    descent = torch.optim.SGD(network.parameters(), lr=job.lr)
    round: Any = message.content.config_records["config"]["server-round"]
    order = job.orders[round - 1][number]
    for x, labels in zip(*(one.split(job.batch) for one in job.clients[number].ordered(order)), strict=True):
        descent.zero_grad()
        network.loss(x, labels).backward()
        descent.step()
    metrics = MetricRecord({"num-examples": len(order)})
    return RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})


def pfls(python: Path, job: Path, results: Path, validate: bool) -> Simulated:
    """Simulate with pfl-research in its own environment."""
    command = [str(python), "-P", str(PFL_APP), str(job), str(results), "validate" if validate else ""]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    called(command, {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""})
    found = json.loads(results.read_text(encoding="utf-8"))
    with np.load(results.with_suffix(".npz"), allow_pickle=False) as file:
        return Simulated(found["seconds"], dict(file.items()), found["versions"])


def environment(folder: Path) -> Path:
    """Return the interpreter of an environment with pfl-research and our PyTorch; make it if it is not there.

    PyTorch comes from this environment by a path file: the same build computes on all sides, and none is downloaded.
    What pfl-research itself depends on is its own.

    Raises
    ------
    RunError
        There is no `uv`, or it cannot install.
    """
    folder = folder.absolute()
    python = folder / "bin" / "python"
    if (folder / PFL).exists():
        return python
    own = Path(sys.executable).parent
    uv = shutil.which("uv", path=os.pathsep.join([str(own), os.environ.get("PATH", "")]))
    if uv is None:
        raise RunError(f"{folder}: to make this environment, `uv` must be on the PATH")
    called([uv, "venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, str(folder)])
    called([uv, "pip", "install", "--quiet", "--python", str(python), PFL])
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / LINK).write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    (folder / PFL).touch()  # last: an environment without it is made again
    return python


def called(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run a command; RunError with the end of its output if it fails."""
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if run.returncode:
        raise RunError(f"{' '.join(command[:4])} ... failed with {run.returncode}: {run.stderr[-2000:]}")


def accuracy(weights: Arrays, settings: Settings) -> float:
    """Return the share of all clients' test images that a network classifies correctly."""
    federation = federation_of(settings)
    spec = network_spec(federation.images, settings)
    network = pfl_app.Network(weights, spec["mean"], spec["std"])
    test = np.concatenate([one.test for one in federation.splits])
    right = 0
    for chosen in np.array_split(test, max(1, len(test) // 256)):
        pixels = torch.from_numpy(federation.images.pixels[chosen]).float() / 255
        right += network.correct(pixels, torch.from_numpy(federation.images.labels[chosen]))
    return right / len(test)


def difference(one: Arrays, other: Arrays) -> float:
    """Return the largest difference of two networks' weights; infinite if their names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float(np.abs(value - other[name]).max()) for name, value in one.items())
