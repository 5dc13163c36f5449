"""Supervised training of one network in one place: central training and source models.

- central: on the union of the clients' training splits, which gives adapters a well-trained network within minutes.
  The splits are those of the federated run with the same seed, so no validation or test sample is trained on.
- source: on one part of a data set, for methods that start from a source model (pFedBBN). Data sets that come in parts
  (CIFAR) are trained on part "train" and measured on part "test"; of others, a tenth of each class is held out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
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

from fedtta.client.algorithms.training import TrainingSet, autocast, epoch, generator, has_batchnorm
from fedtta.client.resources import network_spec, resolve_device
from fedtta.data import DATASETS, CropFlip, Federation, Images, load
from fedtta.models import TwoHead, build, load_model
from fedtta.models.arrays import load_arrays, save_arrays
from fedtta.settings import Settings, SettingsError, words

#: Of one epoch: loss, validation_accuracy (None without validation samples), images_per_second, seconds.
Epoch = dict[str, float | None]
HELD_OUT = 0.1  # of each class, for data sets without parts


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum; the learning rate follows a half cosine from `learning_rate` to 0 over all steps."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    nesterov: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return asdict(self)


#: Central training, whatever the protocol's local training.
CENTRAL = Recipe(epochs=20, batch_size=128, learning_rate=0.05, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Trained:
    """A trained network on the CPU in evaluation mode, the arguments that build it, and what its label says."""

    model: TwoHead
    spec: dict[str, Any]
    content: dict[str, Any]
    trained_on: tuple[Images, NDArray[np.int64]]


@dataclass(frozen=True)
class Parts:
    """Samples that are trained on and samples that accuracy is measured on; the two are disjoint."""

    training: Images
    validation: Images
    measured_on: str


def train_centrally(
    settings: Settings,
    federation: Federation,
    epochs: int,
    console: Console,
    recipe: Recipe = CENTRAL,
    midway: Path | None = None,
) -> Trained:
    """Train encoder and global head on the union of the clients' training splits; the personal head is untouched.

    `midway` is the file of an interrupted training; see `fit`.

    Raises
    ------
    SettingsError
        The network cannot be built.
    FloatingPointError
        The loss is not finite.
    """
    images = federation.images
    index = np.sort(np.concatenate([one.train for one in federation.splits]))
    validation = np.concatenate([one.validation for one in federation.splits])
    recipe = Recipe(**{**asdict(recipe), "epochs": epochs})
    draws = partial(generator, settings.seed, "central")
    model, spec, history = _train(settings, images, index, (images, validation), recipe, draws, console, midway)
    content = {
        "recipe": recipe.as_json(),
        "training_samples": len(index),
        "validation_accuracy": history[-1]["validation_accuracy"],
        "seconds": _seconds(history),
        "epochs": history,
    }
    return Trained(model, spec, content, (images, index))


def train_source(
    settings: Settings, parts: Parts, epochs: int, console: Console, half: bool = False, midway: Path | None = None
) -> Trained:
    """Train a source model on `parts.training` with the batch size and the SGD of the settings, or their `init` again.

    With `half` its weights are rounded to half precision, and its accuracy is that of the rounded network. `midway` is
    the file of an interrupted training; see `fit`.

    Raises
    ------
    SettingsError
        The network cannot be built, or trained with these batches, or the optimizer is not SGD.
    FloatingPointError
        The loss is not finite.
    """
    if settings.optimizer != "sgd":
        raise SettingsError(f"optimizer = {settings.optimizer!r}: allowed is sgd")
    images, validation = parts.training, parts.validation
    index = np.arange(len(images))
    sgd = settings.batch_size, settings.learning_rate, settings.momentum, settings.weight_decay
    recipe = Recipe(epochs, *sgd, nesterov=settings.momentum > 0)
    draws = partial(generator, settings.seed, "source, again" if settings.init else "source")
    on = validation, np.arange(len(validation))
    model, spec, history = _train(settings, images, index, on, recipe, draws, console, midway)
    measured = history[-1]["validation_accuracy"]
    if half:
        model.half().float()
        measured = accuracy(model, *on, torch.device("cpu"), settings.eval_batch_size)
    content = {
        "recipe": recipe.as_json(),
        "training_samples": len(images),
        "validation_samples": len(validation),
        "accuracy": measured,
        "measured_on": parts.measured_on,
        "threads": torch.get_num_threads(),
        "seconds": _seconds(history),
        "epochs": history,
    }
    return Trained(model, spec, content, (images, index))


def source_parts(settings: Settings) -> Parts:
    """Load the data set's parts if dataset-options names part=train, or else hold out a tenth of each class.

    Raises
    ------
    SettingsError
        The data cannot be read.
    """
    options: dict[str, Any] = {**words(settings.dataset_options, "dataset-options")}
    try:
        training = _load(settings, options)
        if "part" in options:
            return Parts(training, _load(settings, {**options, "part": "test"}), "part=test")
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error
    held_out = hold_out(training.labels, settings.seed)
    rest = np.setdiff1d(np.arange(len(training)), held_out)
    return Parts(training.subset(rest), training.subset(held_out), f"{HELD_OUT:.0%} of each class, held out")


def _load(settings: Settings, options: dict[str, Any]) -> Images:
    root, size, download = settings.data_dir or None, settings.image_size, settings.download
    fraction, seed = settings.fraction, settings.seed
    return load(settings.dataset, root, size, download=download, fraction=fraction, seed=seed, **options)


def hold_out(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the sorted positions of round(n_k / 10) samples of each class k, drawn from the seed."""
    draw = generator(seed, "source hold-out")
    chosen = [np.empty(0, np.int64)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = torch.randperm(len(members), generator=draw).numpy()
        chosen.append(members[order[: round(HELD_OUT * len(members))]])
    return np.sort(np.concatenate(chosen))


def _train(
    settings: Settings,
    images: Images,
    index: NDArray[np.int64],
    validation: tuple[Images, NDArray[np.int64]],
    recipe: Recipe,
    draws: Callable[[int], torch.Generator],
    console: Console,
    midway: Path | None,
) -> tuple[TwoHead, dict[str, Any], list[Epoch]]:
    """Build the network of the settings, or load their `init`, and train it on `images` at `index`."""
    device = resolve_device(settings.device)
    try:
        spec = network_spec(images, settings)
        model = load_model(settings.init)[0].float() if settings.init else build(**{"seed": settings.seed, **spec})
    except ValueError as error:
        raise SettingsError(f"model = {settings.model!r}: {error}") from error
    if recipe.batch_size == 1 and has_batchnorm(model):
        raise SettingsError(f"batch-size = 1: model {settings.model!r} has BatchNorm and needs at least 2")
    model = model.to(device).to(memory_format=torch.channels_last)
    data = training_set(settings, images, index, device)

    def validate() -> float | None:
        return accuracy(model, *validation, device, settings.eval_batch_size)

    history = fit(model, data, recipe, draws, validate, console, settings.autocast, midway)
    return model.cpu().eval(), spec, history


def training_set(settings: Settings, images: Images, index: NDArray[np.int64], device: torch.device) -> TrainingSet:
    """Return the images at `index` with the training augmentation of the data set."""
    labels = torch.from_numpy(images.labels[index])
    augment = CropFlip(flip=DATASETS[settings.dataset].flip) if settings.augment else None
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
    midway: Path | None = None,
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
    midway : Path, optional
        File that is written after each epoch, and that an interrupted training goes on from with the same bits. Its
        name must change with all that the training depends on; the caller removes it.

    Raises
    ------
    FloatingPointError
        The loss is not finite.
    ValueError
        The file is corrupt.
    """
    steps = math.ceil(len(data) / recipe.batch_size)
    optimizer, schedule = _descent(model, recipe, steps)
    history = _restore(midway, model, optimizer, schedule) if midway and midway.exists() else []
    speed = TextColumn("{task.fields[speed]:,.0f} images/s")
    columns = TextColumn("batches"), MofNCompleteColumn(), BarColumn(), speed, TimeElapsedColumn(), TextColumn("left")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("batches", total=recipe.epochs * steps, completed=len(history) * steps, speed=0.0)

        def advance(speed: float) -> None:
            progress.update(bar, advance=1, speed=speed)

        for number in range(len(history) + 1, recipe.epochs + 1):
            start = time.perf_counter()
            loss, rate = _epoch(model, data, recipe, optimizer, schedule, draws(number), bfloat16, advance)
            accuracy = validate()
            seconds = time.perf_counter() - start
            history.append(
                {"loss": loss, "validation_accuracy": accuracy, "images_per_second": round(rate, 1), "seconds": seconds}
            )
            if midway:
                _keep(midway, model, optimizer, schedule, history)
            text = "no validation samples" if accuracy is None else f"validation {100 * accuracy:.2f} %"
            left = (recipe.epochs - number) * seconds
            line = f"epoch {number}: loss {loss:.4f}, {text}, {rate:,.0f} images/s, {left:,.0f} s left"
            progress.console.print(line, highlight=False)
    return history


def _descent(
    model: TwoHead, recipe: Recipe, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return SGD on encoder and global head, and its cosine schedule over all epochs of so many steps."""
    optimizer = torch.optim.SGD(
        [*model.encoder.parameters(), *model.head.parameters()],
        lr=recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=recipe.epochs * steps)


def _keep(
    path: Path,
    model: TwoHead,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    history: list[Epoch],
) -> None:
    """Write what `_restore` reads: weights, velocities, and in the metadata all that is no array."""
    state = optimizer.state_dict()
    arrays = {f"model.{name}": value for name, value in model.state_dict().items()}
    arrays |= {
        f"velocity.{i}": own["momentum_buffer"]
        for i, own in state["state"].items()
        if own.get("momentum_buffer") is not None
    }
    notes = {"groups": state["param_groups"], "schedule": schedule.state_dict(), "epochs": history}
    save_arrays(path, {name: value.cpu().numpy() for name, value in arrays.items()}, {"notes": json.dumps(notes)})


def _restore(
    path: Path, model: TwoHead, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> list[Epoch]:
    """Put a network, its optimizer and its schedule back to the end of the last epoch; return the epochs so far."""
    arrays, metadata = load_arrays(path)
    notes = json.loads(metadata["notes"])
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    model.load_state_dict({name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")})
    velocities = {
        int(name.removeprefix("velocity.")): {"momentum_buffer": tensors[name]}
        for name in tensors
        if name.startswith("velocity.")
    }
    optimizer.load_state_dict({"state": velocities, "param_groups": notes["groups"]})
    schedule.load_state_dict(notes["schedule"])
    history: list[Epoch] = notes["epochs"]
    return history


def _seconds(history: Sequence[Epoch]) -> float:
    return round(sum(epoch["seconds"] or 0.0 for epoch in history), 1)


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
    """Train for one epoch and return its mean loss and images per second; `advance` gets the speed so far."""
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
