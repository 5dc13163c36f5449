"""Tiny federations, networks and devices that train in milliseconds, for tests of the client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtta.client.algorithms.training import TrainingSet
from fedtta.client.device import Device
from fedtta.client.node import Node, make_device
from fedtta.client.serving import Served
from fedtta.client.state import MemoryState, NetworkStore, PrivateState, private_folder
from fedtta.data import Federation, Images, Role
from fedtta.data.split import Split
from fedtta.messages.arrays import Arrays, digest
from fedtta.messages.replies import Evaluated
from fedtta.messages.requests import Adapt, AdapterRow, Evaluate, Identify, RefineRates, Summarize, Train, TrainingTask
from fedtta.models import TwoHead
from fedtta.settings import Settings, to_json

CLASSES = 3
FEATURES = 6
SIZE = 16


def settings(**changes: Any) -> Settings:
    """One short local epoch, no augmentation, on the CPU; `npz` is a data set without a natural shift."""
    defaults: dict[str, Any] = {
        "dataset": "npz",
        "clients": 3,
        "local_epochs": 1,
        "batch_size": 8,
        "learning_rate": 0.05,
        "augment": False,
        "device": "cpu",
        "eval_batch_size": 16,
    }
    return Settings(**{**defaults, **changes})


def images(count: int, seed: int = 0, name: str = "blobs") -> Images:
    """Noise around one coloured square a class: learnable, and every picture is different."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(CLASSES, size=count)
    pixels = draw.integers(0, 60, size=(count, 3, SIZE, SIZE))
    for label in range(CLASSES):
        pixels[labels == label, label, 4:12, 4:12] += 150
    return Images(name, pixels.astype(np.uint8), labels.astype(np.int64), tuple(f"class{k}" for k in range(CLASSES)))


def federation(count: int = 120, clients: int = 3, seed: int = 1) -> Federation:
    return Federation.create(images(count), clients, scheme="iid", seed=seed)


def federation_of_splits(images_: Images, *sizes: tuple[int, int, int]) -> Federation:
    """Deal images_ out in order: (train, validation, test) sizes for each client."""
    splits, at = [], 0
    for client in sizes:
        parts = []
        for size in client:
            parts.append(np.arange(at, at + size))
            at += size
        splits.append(Split(*parts))
    return Federation(images_, tuple(splits), 1)


def network(
    norm: bool = False, seed: int = 0, size: int = SIZE, classes: int = CLASSES, rotation: bool = False
) -> TwoHead:
    """A small convolutional network whose features are not negative, d = FEATURES."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(3, 4, 3, stride=2))
        if norm:
            layers["norm"] = nn.BatchNorm2d(4)
        layers["relu"] = nn.ReLU()
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(4 * ((size - 1) // 2) ** 2, FEATURES)
        layers["last"] = nn.ReLU()
        with torch.no_grad():
            layers["fc"].weight *= 20  # so that features lie on both sides of the threshold of the DLE
            layers["fc"].bias.fill_(0.3)
        return TwoHead(nn.Sequential(layers), FEATURES, classes, rotation_head=rotation)


@dataclass(frozen=True)
class Task:
    """A training task, and the names of the arrays that are aggregated (None: all)."""

    training: str
    algorithm: str = "fedavg"
    objective: str = "cross_entropy"
    aggregated: Collection[str] | None = None

    @property
    def wire(self) -> TrainingTask:
        return TrainingTask(self.training, self.algorithm, self.objective)


class Client:
    """A device with short calls: each makes the request and returns arrays and values of the reply."""

    def __init__(self, device: Device) -> None:
        self.inner = device
        self.about: dict[str, Any] = {"settings": to_json(device.settings), "run": "run1"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def serve(self, round: int, task: Task, arrays: Arrays, statistics: Arrays | None, row: AdapterRow) -> Served:
        return self.inner.serve(self.evaluation(round, task, arrays, statistics, [row], []), row)

    def describe(self) -> dict[str, Any]:
        values = self.inner.identify(Identify(**self.about)).to_record().values
        return {key: value for key, value in values.items() if key not in ("num-examples", "saved")}

    def request(
        self, round: int, task: Task, arrays: Arrays, proximal_mu: float = 0.0, client_metrics: Sequence[str] = ()
    ) -> Train:
        aggregated = None if task.aggregated is None else sorted(task.aggregated)
        more: dict[str, Any] = {"aggregated": aggregated, "client_metrics": list(client_metrics)}
        return Train(round=round, task=task.wire, arrays=arrays, proximal_mu=proximal_mu, **more, **self.about)

    def train(
        self, round: int, task: Task, arrays: Arrays, lend: bool = False, **more: Any
    ) -> tuple[Arrays, dict[str, Any]]:
        reply = replace(self.inner, lends=lend).train(self.request(round, task, arrays, **more))
        return reply.arrays, reply.to_record().values

    def statistics(
        self, round: int, task: Task, arrays: Arrays, wanted: Collection[str] = ()
    ) -> tuple[Arrays, dict[str, Any]]:
        request = Summarize(round=round, task=task.wire, arrays=arrays, wanted=list(wanted), **self.about)
        reply = self.inner.summarize(request)
        return reply.statistics, reply.to_record().values

    def refine_rates(
        self, round: int, arrays: Arrays, rates: Mapping[str, float], variant: Any
    ) -> tuple[dict[str, float], dict[str, Any]]:
        start = {name: np.asarray(value, np.float64) for name, value in rates.items()}
        about = {"network": digest(arrays), **self.about}
        request = RefineRates(round=round, variant=variant, arrays=arrays, rates=start, **about)
        reply = self.inner.refine_rates(request)
        return {name: float(value) for name, value in reply.rates.items()}, reply.to_record().values

    def adapt(self, round: int, cell: str, arrays: Arrays, row: AdapterRow, **more: Any) -> Any:
        about = {"share": "all", "network": digest(arrays), "send_normalization": True, "send_start": True}
        return self.inner.adapt(
            Adapt(round=round, cell=cell, arrays=arrays, row=row, **{**about, **more}, **self.about)
        )

    def evaluate(
        self,
        round: int,
        task: Task,
        arrays: Arrays,
        statistics: Arrays | None,
        rows: Sequence[AdapterRow],
        shifts: Sequence[str],
        rates: Mapping[str, Mapping[str, float]] | None = None,
    ) -> tuple[dict[str, int], list[dict[str, Any]]]:
        reply = self.inner.evaluate(self.evaluation(round, task, arrays, statistics, rows, shifts, rates))
        return {"checked": reply.checked, "leaked": reply.leaked}, results_of(reply)

    def evaluation(
        self,
        round: int,
        task: Task,
        arrays: Arrays,
        statistics: Arrays | None,
        rows: Sequence[AdapterRow],
        shifts: Sequence[str],
        rates: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Evaluate:
        numbers = {
            variant: {name: np.asarray(value, np.float64) for name, value in one.items()}
            for variant, one in (rates or {}).items()
        }
        more: dict[str, Any] = {"rows": list(rows), "shifts": list(shifts), "rates": numbers}
        return Evaluate(round=round, task=task.wire, arrays=arrays, statistics=statistics, **more, **self.about)


def results_of(reply: Evaluated) -> list[dict[str, Any]]:
    """Return the results of an evaluation as dictionaries, without what they do not have."""
    found = []
    for one in reply.results:
        weights = {"weight_histogram": one.weight_histogram, "weight_mean": one.weight_mean}
        known = {"correct": one.correct, "total": one.total, "seconds": one.seconds, **one.metrics}
        weights = {key: value for key, value in weights.items() if value is not None}
        found.append({"method": one.label, "shift": one.shift, **known, **weights})
    return found


def device(
    partition: int = 0,
    state: PrivateState | None = None,
    world: Federation | None = None,
    model: TwoHead | None = None,
    natural: Images | None = None,
    memory: PrivateState | None = None,
    role: Role | None = None,
    **changes: Any,
) -> Client:
    own, chosen = federation() if world is None else world, settings(**changes)
    return Client(
        Device(
            own,
            partition,
            network() if model is None else model,
            MemoryState() if state is None else state,
            MemoryState() if memory is None else memory,
            chosen,
            torch.device("cpu"),
            own.roles[partition] if role is None else role,
            NetworkStore(private_folder(chosen) / "networks"),
            natural,
            name=str(partition),
        )
    )


def made(settings: Settings, partition: int, role: str | None = None) -> Client:
    """Return the device that a node makes for a request with these settings."""
    node = Node(str(partition), MemoryState(), role=role, memory=MemoryState())
    return Client(make_device(Identify(settings=to_json(settings), run="run1"), node))


def global_arrays(model: TwoHead) -> dict[str, np.ndarray]:
    """What a server would send: copies of the shared arrays."""
    return {name: value.numpy().copy() for name, value in model.global_state().items()}


def training_set(count: int, shape: tuple[int, ...] = (1, 1, 1), classes: int = CLASSES) -> TrainingSet:
    """A training split whose sample i has the pixel value i everywhere."""
    pixels = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(count, *shape).contiguous()
    labels = torch.arange(count) % classes
    return TrainingSet(np.arange(count), pixels, labels, torch.bincount(labels, minlength=classes))


def image_set(count: int) -> TrainingSet:
    """A training split of `images`."""
    images_ = images(count)
    labels = torch.tensor(images_.labels)
    return TrainingSet(
        np.arange(count), torch.tensor(images_.pixels), labels, torch.bincount(labels, minlength=CLASSES)
    )


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    """Names of the entries whose bits have changed."""
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def same(one: Arrays, other: Arrays) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def state_of(device: Client | Device) -> MemoryState:
    assert isinstance(device.state, MemoryState)
    return device.state


def through_statistics(client: Client, rounds: int = 2) -> tuple[Arrays, Arrays]:
    """Train alone for some rounds and take statistics in the next one."""
    arrays = global_arrays(network(seed=9))
    for round in range(1, rounds + 1):
        arrays, _ = client.train(round, Task("ce"), arrays)
    means, _ = client.statistics(rounds + 1, Task("ce"), arrays)
    return arrays, means
