"""Supervised training of one network in one place: what `central` and `source` share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional

from benchmarks.record import provenance
from benchmarks.start import label_path, write_label
from client.compute import autocast
from client.training import TrainingSet, epoch, has_batchnorm
from data import DATASETS, Images, crop_flip
from models import TwoHead, save_model
from server.nodes import FederationInfo
from server.run import model_spec
from settings import Settings

#: Of one epoch: loss, validation_accuracy (None without validation samples), images_per_second.
Epoch = dict[str, float | None]


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum, its rate a half cosine from `learning_rate` to 0 over all steps."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    nesterov: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return asdict(self)


def spec_of(settings: Settings, images: Images) -> dict[str, Any]:
    """Return the arguments that build the network, as the server of a federated run makes them."""
    channels = images.shape[0]
    mean, std = DATASETS[settings.dataset].normalisation(channels)
    world = FederationInfo(list(images.classes), channels, list(mean), list(std), shifts=[], note="", sizes=[])
    return model_spec(settings, world)


def training_set(settings: Settings, images: Images, index: NDArray[np.int64], device: torch.device) -> TrainingSet:
    """Return the images at `index` with the training augmentation of the data set."""
    labels = torch.from_numpy(images.labels[index])
    augment = partial(crop_flip, flip=DATASETS[settings.dataset].flip) if settings.augment else None
    counts = torch.bincount(labels, minlength=images.num_classes).to(device)
    return TrainingSet(index, torch.from_numpy(images.pixels[index]).to(device), labels.to(device), counts, augment)


def fit(
    model: TwoHead,
    data: TrainingSet,
    recipe: Recipe,
    draws: Callable[[int], torch.Generator],
    validate: Callable[[], float | None],
    console: Console,
    bfloat16: bool = False,
) -> list[Epoch]:
    """Train encoder and global head with plain cross-entropy; the personal head is left as it is.

    Parameters
    ----------
    model : TwoHead
        On the device of `data`, convolutions in channels-last format; changed in place.
    data : TrainingSet
    recipe : Recipe
        No early stop and no choice of an epoch: the network after the last one is the result.
    draws : callable
        Epoch 1, 2, ... → CPU generator of its order and augmentation.
    validate : callable
        Returns the accuracy after an epoch; only printed and kept, nothing depends on it.
    console : Console
        Gets a progress bar (images/s, time left) and a line an epoch.
    bfloat16 : bool
        Autocast the forward pass.

    Raises
    ------
    FloatingPointError
        The loss is not finite.
    """
    optimizer = torch.optim.SGD(
        [*model.encoder.parameters(), *model.head.parameters()],
        lr=recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )
    steps = math.ceil(len(data) / recipe.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=recipe.epochs * steps)
    history: list[Epoch] = []
    speed = TextColumn("{task.fields[speed]:,.0f} images/s")
    columns = TextColumn("batches"), MofNCompleteColumn(), BarColumn(), speed, TimeElapsedColumn(), TextColumn("left")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("batches", total=recipe.epochs * steps, speed=0.0)

        def advance(speed: float) -> None:
            progress.update(bar, advance=1, speed=speed)

        for number in range(1, recipe.epochs + 1):
            start = time.perf_counter()
            loss, rate = _epoch(model, data, recipe, optimizer, schedule, is_stochastic(number), bfloat16, advance)
            accuracy = validate()
            history.append({"loss": loss, "validation_accuracy": accuracy, "images_per_second": round(rate, 1)})
            text = "no validation samples" if accuracy is None else f"validation {100 * accuracy:.2f} %"
            left = (recipe.epochs - number) * (time.perf_counter() - start)
            line = f"epoch {number}: loss {loss:.4f}, {text}, {rate:,.0f} images/s, {left:,.0f} s left"
            progress.console.print(line, highlight=False)
    return history


def _epoch(
    model: TwoHead,
    data: TrainingSet,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    draw: torch.Generator,
    bfloat16: bool,
    advance: Callable[[float], None],
) -> tuple[float, float]:
    """Train for one epoch and return its mean loss and the images a second; `advance` hears the speed so far."""
    model.train()
    total, seen, start = torch.zeros((), device=data.labels.device), 0, time.perf_counter()
    for x, labels in epoch(data, recipe.batch_size, draw, smallest=2 if has_batchnorm(model) else 1):
        with autocast(x.device, bfloat16):
            loss = functional.cross_entropy(model(x), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach() * len(labels)
        seen += len(labels)
        advance(seen / (time.perf_counter() - start))
    mean = float(total) / max(seen, 1)  # waits for the device, so the time below is that of the whole epoch
    if not math.isfinite(mean):
        raise FloatingPointError(f"training diverged: mean loss {mean}")
    return mean, seen / (time.perf_counter() - start)


@torch.no_grad()
def accuracy(
    model: TwoHead, images: Images, index: NDArray[np.int64], device: torch.device, batch_size: int
) -> float | None:
    """Return the accuracy of the global head on `images` at `index`, None if there are none; in evaluation mode."""
    model.eval()
    correct = 0
    for begin in range(0, len(index), batch_size):
        chosen = index[begin : begin + batch_size]
        x = images.batch(chosen, device).contiguous(memory_format=torch.channels_last)
        correct += int((model(x).argmax(1).cpu() == torch.from_numpy(images.labels[chosen])).sum())
    return correct / len(index) if len(index) else None


def write_model(
    path: Path,
    model: TwoHead,
    spec: Mapping[str, Any],
    settings: Settings,
    content: Mapping[str, Any],
    console: Console,
) -> None:
    """Write the model file and beside it its label: `content` and where it comes from."""
    label_path(path).unlink(missing_ok=True)  # never an old label beside a new model
    save_model(path, model, spec)
    label = write_label(path, settings, {**content, **provenance()})
    console.print(f"Written: {path} and {label}", highlight=False)
