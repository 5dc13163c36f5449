"""Tiny federations, networks and devices that train in milliseconds, for tests of the client."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

from client.device import Device
from client.state import Arrays, MemoryState, PrivateState
from client.task import Task
from client.training import TrainingSet
from data import Federation, Images, Role
from data.split import Split
from models import TwoHead
from settings import Settings

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


def federation_of_splits(pictures: Images, *sizes: tuple[int, int, int]) -> Federation:
    """Deal pictures out in order: (train, validation, test) sizes for each client."""
    splits, at = [], 0
    for client in sizes:
        parts = []
        for size in client:
            parts.append(np.arange(at, at + size))
            at += size
        splits.append(Split(*parts))
    return Federation(pictures, tuple(splits), 1)


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


def device(
    partition: int = 0,
    state: PrivateState | None = None,
    world: Federation | None = None,
    model: TwoHead | None = None,
    natural: Images | None = None,
    memory: PrivateState | None = None,
    role: Role | None = None,
    **changes: Any,
) -> Device:
    own = federation() if world is None else world
    return Device(
        own,
        partition,
        network() if model is None else model,
        MemoryState() if state is None else state,
        MemoryState() if memory is None else memory,
        settings(**changes),
        torch.device("cpu"),
        own.roles[partition] if role is None else role,
        natural,
    )


def global_arrays(model: TwoHead) -> dict[str, np.ndarray]:
    """What a server would send: copies of the shared arrays."""
    return {name: value.numpy().copy() for name, value in model.global_state().items()}


def training_set(count: int, shape: tuple[int, ...] = (1, 1, 1), classes: int = CLASSES) -> TrainingSet:
    """A training split whose sample i has the pixel value i everywhere."""
    pixels = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(count, *shape).contiguous()
    labels = torch.arange(count) % classes
    return TrainingSet(np.arange(count), pixels, labels, torch.bincount(labels, minlength=classes))


def picture_set(count: int) -> TrainingSet:
    """A training split of `images`."""
    pictures = images(count)
    labels = torch.tensor(pictures.labels)
    return TrainingSet(
        np.arange(count), torch.tensor(pictures.pixels), labels, torch.bincount(labels, minlength=CLASSES)
    )


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    """Names of the entries whose bits have changed."""
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def same(one: Arrays, other: Arrays) -> bool:
    return set(one) == set(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def state_of(device: Device) -> MemoryState:
    assert isinstance(device.state, MemoryState)
    return device.state


def through_statistics(client: Device, rounds: int = 2) -> tuple[Arrays, Arrays]:
    """Train alone for some rounds and take statistics in the next one."""
    arrays = global_arrays(network(seed=9))
    for round in range(1, rounds + 1):
        arrays, _ = client.train(round, Task("ce"), arrays)
    means, _ = client.statistics(rounds + 1, Task("ce"), arrays)
    return arrays, means
