"""`central`: a protocol's network, trained in one place on the union of its clients' training splits.

It gives the adapters a well-trained network to start from within minutes; accuracies from it say nothing about
federated training, and the label beside the file says so. The splits are those of the federated run with the same
seed, so no client's validation or test sample is trained on.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional

from benchmarks.protocol import load_protocol
from benchmarks.record import provenance
from benchmarks.start import label_path, write_label
from client.compute import autocast, resolve_device
from client.randomness import generator
from client.runtime import federation_of
from client.training import TrainingSet, epoch, has_batchnorm
from data import DATASETS, Federation, crop_flip
from models import TwoHead, save_model
from server.run import World, initial_model, model_spec
from settings import Settings, SettingsError

#: SGD with momentum, its rate a half cosine from the value here to 0.
RECIPE = {"batch_size": 128, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `central`."""
    parser.add_argument("--protocol", required=True, help="whose data set, splits and network")
    parser.add_argument("--seed", type=int, required=True, help="of the splits and of the training")
    parser.add_argument("--epochs", type=int, default=20, help="default: 20")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="model file; its label is PATH.json")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train, print the validation accuracy of each epoch, and write the model file and its label.

    Raises
    ------
    SettingsError
        An unknown protocol, an impossible setting, or data that cannot be read.
    FloatingPointError
        Training diverged.
    """
    settings = load_protocol(arguments.protocol, arguments.set).replace(seed=arguments.seed, init="")
    if arguments.epochs < 1:
        raise SettingsError(f"--epochs {arguments.epochs}: allowed is 1 or more")
    try:
        federation = federation_of(settings)
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error
    start = time.perf_counter()
    model, spec, history = train_centrally(settings, federation, arguments.epochs, console)
    label_path(arguments.out).unlink(missing_ok=True)  # never an old label beside a new model
    save_model(arguments.out, model, spec)
    content = {
        "protocol": arguments.protocol,
        "recipe": {"epochs": arguments.epochs, **RECIPE},
        "training_samples": sum(len(one.train) for one in federation.splits),
        "validation_accuracy": history[-1]["validation_accuracy"],
        "seconds": round(time.perf_counter() - start, 1),
        "epochs": history,
        **provenance(),
    }
    path = write_label(arguments.out, settings, content)
    console.print(f"Written: {arguments.out} and {path}", highlight=False)


def train_centrally(
    settings: Settings, federation: Federation, epochs: int, console: Console
) -> tuple[TwoHead, dict[str, Any], list[dict[str, float | None]]]:
    """Train encoder and global head with plain cross-entropy; the personal head is left as it is.

    Returns
    -------
    model, spec, history
        The network in evaluation mode; the arguments that build it; `loss` and `validation_accuracy` of each epoch
        (None without validation samples).

    Raises
    ------
    SettingsError
        The network cannot be built.
    FloatingPointError
        The loss is not finite.
    """
    device = resolve_device(settings.device)
    spec = spec_of(settings, federation)
    model = initial_model(settings, spec).to(device).to(memory_format=torch.channels_last)
    data = training_set(settings, federation, device)
    optimizer = torch.optim.SGD(
        [*model.encoder.parameters(), *model.head.parameters()],
        lr=RECIPE["learning_rate"],
        momentum=RECIPE["momentum"],
        weight_decay=RECIPE["weight_decay"],
    )
    steps = math.ceil(len(data) / int(RECIPE["batch_size"]))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * steps)
    history: list[dict[str, float | None]] = []
    columns = TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("epochs", total=epochs)
        for number in range(1, epochs + 1):
            loss = _epoch(model, data, optimizer, schedule, generator(settings.seed, "central", number), settings)
            accuracy = validate(model, federation, device, settings.eval_batch_size)
            history.append({"loss": loss, "validation_accuracy": accuracy})
            text = "no validation samples" if accuracy is None else f"validation {100 * accuracy:.2f} %"
            progress.console.print(f"epoch {number}: loss {loss:.4f}, {text}", highlight=False)
            progress.advance(bar)
    return model.cpu().eval(), spec, history


def spec_of(settings: Settings, federation: Federation) -> dict[str, Any]:
    """Return the arguments that build the network, as the server of a federated run makes them."""
    images = federation.images
    channels = int(images.pixels.shape[1])
    mean, std = DATASETS[settings.dataset].normalisation(channels)
    world = World(list(images.classes), channels, list(mean), list(std), shifts=[], note="", sizes=[])
    return model_spec(settings, world)


def training_set(settings: Settings, federation: Federation, device: torch.device) -> TrainingSet:
    """Return the union of the clients' training splits, with the training augmentation of the data set."""
    index = np.sort(np.concatenate([one.train for one in federation.splits]))
    images = federation.images
    labels = torch.from_numpy(images.labels[index])
    augment = partial(crop_flip, flip=DATASETS[settings.dataset].flip) if settings.augment else None
    counts = torch.bincount(labels, minlength=images.num_classes).to(device)
    return TrainingSet(index, torch.from_numpy(images.pixels[index]).to(device), labels.to(device), counts, augment)


def _epoch(
    model: TwoHead,
    data: TrainingSet,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    draw: torch.Generator,
    settings: Settings,
) -> float:
    """Train for one epoch and return its mean loss."""
    model.train()
    total, seen = torch.zeros((), device=data.labels.device), 0
    for x, labels in epoch(data, int(RECIPE["batch_size"]), draw, smallest=2 if has_batchnorm(model) else 1):
        with autocast(x.device, settings.autocast):
            loss = functional.cross_entropy(model(x), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach() * len(labels)
        seen += len(labels)
    if not torch.isfinite(total):
        raise FloatingPointError(f"central training diverged: mean loss {float(total) / max(seen, 1)}")
    return float(total) / max(seen, 1)


@torch.no_grad()
def validate(model: TwoHead, federation: Federation, device: torch.device, batch_size: int) -> float | None:
    """Return the accuracy on the union of the clients' validation splits, None if that is empty."""
    model.eval()
    index = np.concatenate([one.validation for one in federation.splits])
    correct = 0
    for begin in range(0, len(index), batch_size):
        chosen = index[begin : begin + batch_size]
        predicted = model(federation.images.batch(chosen, device)).argmax(1).cpu()
        correct += int((predicted == torch.from_numpy(federation.images.labels[chosen])).sum())
    return correct / len(index) if len(index) else None
