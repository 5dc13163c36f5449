"""Simulated rounds: wall time over local training by engine, shipping of a large network, memory over many rounds."""

from __future__ import annotations

import statistics as averages
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtta.benchmarks.clients import client_of
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.client.algorithms.training import validate
from fedtta.client.resources import resolve_device
from fedtta.models.accelerator import clock
from fedtta.server.events import RunError
from fedtta.settings import Settings

#: Embedded data and one epoch per round.
BASE: dict[str, Any] = {
    "methods": "fedavg", "shifts": "original", "partition": "iid", "local_epochs": 1, "personal_epochs": 0,
    "workers": 2, "checkpoint_every": 0, "rounds": 4, "device": "auto",
}  # fmt: skip
CIFAR: dict[str, Any] = {"dataset": "cifar10", "fraction": 0.2, "partition": "equal", "personal_epochs": 1}
#: Title → settings and the largest ratio of wall time to training over the workers, where there is a target.
CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "20 clients, CNN, Ray": ({"clients": 20, "engine": "ray", "local_epochs": 20}, None),
    "20 clients, CNN, CIFAR-10, Ray": ({**CIFAR, "clients": 20, "engine": "ray", "local_epochs": 5}, 1.25),
    "100 clients, CNN, Ray": ({"clients": 100, "engine": "ray", "local_epochs": 20}, 1.10),
    "100 clients, CNN, Flower's own": ({"clients": 100, "engine": "flower", "local_epochs": 20}, None),
    "100 clients, CNN, one process": ({"clients": 100, "engine": "vectorised", "local_epochs": 20}, None),
    "1,000 clients, CNN, Ray": ({"clients": 1000, "engine": "ray"}, None),
    "1,000 clients, CNN, Flower's own": ({"clients": 1000, "engine": "flower"}, None),
    "1,000 clients, CNN, one process": ({"clients": 1000, "engine": "vectorised"}, None),
}
RESNET = {"clients": 100, "model": "resnet18", "rounds": 3, "augment": False}
#: Title → settings and the most seconds of a round beyond its training.
SHIPPED: dict[str, tuple[dict[str, Any], float]] = {
    "100 clients, ResNet-18, Flower's own": ({**RESNET, "engine": "flower"}, 10.0),
    "100 clients, ResNet-18, Ray": ({**RESNET, "engine": "ray"}, 3.0),
    "100 clients, ResNet-18, one process": ({**RESNET, "engine": "vectorised", "stacked_clients": 1}, 3.0),
}
#: CIFAR-10, a fifth of its images: one process that stacks the clients, and the Ray path, on whatever device there is.
ENGINES = {"clients": 100, "dataset": "cifar10", "fraction": 0.2, "rounds": 3}
AT_ONCE = 50
STACKED = 5.0  # times the Ray path's clients a second on one GPU, at least
MEMORY = {"clients": 1000, "rounds": 100, "engine": "vectorised"}
GROWTH = 1.0  # MB a round after the tenth, at most
SETTLED = 10


@dataclass
class Watched:
    """Events and memory of a run's rounds."""

    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes of this process after each round

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Record a round."""
        if event["event"] == "round":
            self.rounds.append(event)
            self.memory.append(resident())


def resident() -> int:
    """Return the resident memory of this process in bytes; RunError where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise RunError(f"this system does not report the memory of a process: {error}") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def simulated(changes: Mapping[str, Any], quick: bool) -> Watched:
    """Run a simulation in a temporary folder; RunError if a client of a round did not reply."""
    from fedtta.simulation import simulate

    small = {"clients": 3, "rounds": 2, "local_epochs": 1, "stacked_clients": 2, "dataset": "digits"} if quick else {}
    watched = Watched()
    with tempfile.TemporaryDirectory() as folder:
        simulate(Settings(**{**BASE, **changes, **small}), Path(folder) / "run", [watched])
    for event in watched.rounds:
        if event["replied"] != event["sampled"]:
            raise RunError(f"round {event['round']}: {len(event['replied'])} of {len(event['sampled'])} replied")
    return watched


def rounds(quick: bool) -> Measured:
    """Measure all rounds but the first, in which workers start."""
    found = []
    for title, (changes, target) in CASES.items():
        workers = 1 if changes["engine"] == "vectorised" else BASE["workers"]
        wall, training = times(simulated(changes, quick), workers)
        found.append(Ratio(title, wall / training, "s a round", wall, training, "training / workers", target))
    return Measured(found)


def engines(quick: bool) -> Measured:
    """Measure how many clients a second the vectorised engine trains over the Ray path, where it stacks them."""
    device = resolve_device("auto").type
    changes = {**ENGINES, "dataset": "digits"} if quick else ENGINES
    speed = {
        name: clients_a_second({"stacked_clients": AT_ONCE, **changes, "engine": name}, quick)
        for name in ("vectorised", "ray")
    }
    title = f"{ENGINES['clients']} clients, CNN, {changes['dataset']}, one process over Ray, {device}"
    target = STACKED if device == "cuda" else None
    ratio = speed["vectorised"] / speed["ray"]
    ours, other = speed["vectorised"], speed["ray"]
    return Measured([Ratio(title, ratio, "clients/s", ours, other, "the Ray path", target, least=True)])


def clients_a_second(changes: Mapping[str, Any], quick: bool) -> float:
    """Return the median over a simulation's rounds, the first left out, in which workers start."""
    later = simulated(changes, quick).rounds[1:]
    return averages.median(len(event["replied"]) / event["wall_seconds"] for event in later)


def shipping(quick: bool) -> Measured:
    """Measure what a round of a large network takes beyond what clients compute in it, in seconds."""
    found = []
    than = "training and validation / workers; the ratio is their difference in s"
    for title, (changes, target) in SHIPPED.items():
        if quick:
            changes = {**changes, "model": "cnn"}
        workers = 1 if changes["engine"] == "vectorised" else BASE["workers"]
        watched = simulated(changes, quick)
        wall, training = times(watched, workers)
        clients = len(watched.rounds[-1]["replied"])
        computed = (
            training + clients * validation_seconds(Settings(**{**BASE, **changes, "clients": clients})) / workers
        )
        found.append(Ratio(title, max(wall - computed, 0.0), "s a round", wall, computed, than, target))
    return Measured(found)


def validation_seconds(settings: Settings) -> float:
    """Return the median seconds in which a client evaluates the received network on its validation split.

    The training seconds of a round do not include them.
    """
    seconds = []
    for partition in range(min(settings.clients, 10)):
        client = client_of(settings, partition)
        start = clock(client.device)
        validate(client.model.eval(), client.federation, partition, settings.eval_batch_size, client.device, False)
        seconds.append(clock(client.device) - start)
    return averages.median(seconds)


def times(watched: Watched, workers: int) -> tuple[float, float]:
    """Return the median seconds of a round, on the clock and of training over the workers, without the first."""
    later = watched.rounds[1:]
    wall = averages.median(event["wall_seconds"] for event in later)
    return wall, averages.median(sum(event["train_seconds"]) / workers for event in later)


def memory(quick: bool) -> Measured:
    """Measure by how much this process grows a round once it has settled."""
    held = simulated(MEMORY, quick).memory
    after = held[min(SETTLED, len(held) - 1) - 1 :]
    growth = (after[-1] - after[0]) / max(len(after) - 1, 1) / 1e6
    title = f"{len(held)} rounds in one process: MB a round after {len(held) - len(after) + 1}"
    return Measured([Ratio(title, growth, "MB", after[-1] / 1e6, after[0] / 1e6, "before", GROWTH)])
