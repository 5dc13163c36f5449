"""Local training on one device: the two phases of a round (FedTHE, Algorithm 1, lines 6 to 9), and their objectives."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedtta.data import DATASETS, Augmentation, CropFlip, Federation, LazyRows, Rows
from fedtta.models import TwoHead
from fedtta.models.arrays import all_finite, to_device
from fedtta.models.optim import Optimizer
from fedtta.settings import Settings
from fedtta.tta.contrastive import ContrastiveViews

#: (logits [B, K], labels [B], class counts [K] of the client's training split) → mean loss.
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
#: (x [B, C, H, W] in [0, 1], labels [B]) → mean loss of the batch, detached; one whole training step.
Step = Callable[[Tensor, Tensor], Tensor]
DRAWN_AT_ONCE = 64  # batches whose augmentation is drawn in one call; what a seed gives depends on it
AUGMENTED_BYTES = 32 * 2**20  # of the images augmented in one call: enough to hide its fixed cost
FLOAT32 = 4  # bytes


def cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy; `counts` plays no part."""
    return functional.cross_entropy(logits, labels)


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy on logits + ln(count_k + 1).

    The client's label prior is added to the logits during training, so that the trained head is free of it (Ren et al.
    2020; FedTHE trains its global head so, section 4.2, footnote 3).
    """
    return functional.cross_entropy(logits + torch.log(counts.to(logits) + 1), labels)


OBJECTIVES: dict[str, Objective] = {"cross_entropy": cross_entropy, "balanced_softmax": balanced_softmax}


def find_objective(name: str) -> Objective:
    """Return an objective by name; ValueError lists what exists."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; there are: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return a CPU generator that depends on its arguments alone, e.g. `generator(1, "local", round, partition)`."""
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]).generate_state(2)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[None]:
    """Return a bfloat16 autocast context, or one that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class TrainingSet:
    """A client's training split on its device.

    Parameters
    ----------
    index : ndarray int64 [n]
        Which images of the federation these are.
    pixels : Tensor uint8 [n, C, H, W]
        `LazyRows` if the images are not in memory.
    labels : Tensor int64 [n]
    counts : Tensor int64 [K]
        Samples of each class; they never leave the device.
    augment : Augmentation or None
    least_batch : int
        A last batch with fewer samples is left out: its few samples would weigh as much as a whole batch.
    """

    index: NDArray[np.int64]
    pixels: Rows
    labels: Tensor
    counts: Tensor
    augment: Augmentation | None = None
    least_batch: int = 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    @classmethod
    def of_client(cls, federation: Federation, partition: int, settings: Settings, device: torch.device) -> TrainingSet:
        """Return a client's training split, with the training augmentation of the data set."""
        indices = federation.splits[partition].train
        images = federation.images
        labels = torch.from_numpy(images.labels[indices])
        return cls(
            indices,
            images.rows(indices, device),
            labels.to(device),
            torch.bincount(labels, minlength=len(images.classes)).to(device),
            _augmentation(settings),
        )


def labelled(federation: Federation, index: NDArray[np.int64], device: torch.device) -> tuple[Rows, Tensor]:
    """Return images [n, C, H, W] in [0, 1] and their labels [n]; images that are not in memory are read by batches."""
    images = federation.images

    def read(chosen: NDArray[np.int64]) -> Tensor:
        return images.batch(chosen, device).contiguous(memory_format=torch.channels_last)

    x = read(index) if images.in_memory else LazyRows(index, read)
    return x, torch.from_numpy(images.labels[index]).to(device)


def contrastive_views(settings: Settings) -> ContrastiveViews:
    """Return the random views of FedICON for the run's data set."""
    known = DATASETS[settings.dataset]
    return ContrastiveViews.for_data(flip=known.flip, crop=known.crop)


def _augmentation(settings: Settings) -> Augmentation | None:
    """Return the augmentation of training images; None without any."""
    if not settings.augment:
        return None
    if settings.views == "contrastive":
        return contrastive_views(settings)
    return CropFlip(flip=DATASETS[settings.dataset].flip)


def epoch(
    data: TrainingSet, batch_size: int, generator: torch.Generator, smallest: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one shuffled, augmented epoch as (x [B, C, H, W] in [0, 1], labels [B]).

    A last short batch is kept unless it has fewer than `smallest` samples (2 for networks with BatchNorm, whose batch
    statistics need two values). Images that are read from files are read batch by batch, and drawn so; for others how
    many are augmented at once is bounded by bytes and decides no bit.
    """
    order = to_device(torch.randperm(len(data), generator=generator), data.labels.device)
    drawn, size = batch_size, batch_size
    if isinstance(data.pixels, Tensor):
        drawn, size = batch_size * DRAWN_AT_ONCE, augmented_at_once(data.pixels.shape[1:], batch_size)
    smallest = max(smallest, data.least_batch)
    for block in order.split(drawn):
        draws = data.augment.draw(generator, len(block)) if data.augment is not None else block
        for chosen, numbers in zip(block.split(size), draws.split(size), strict=True):
            x = data.pixels[chosen].float() / 255
            if data.augment is not None:
                x = data.augment.apply(x, numbers)
            x = x.contiguous(memory_format=torch.channels_last)
            for batch, labels in zip(x.split(batch_size), data.labels[chosen].split(batch_size), strict=True):
                if len(labels) >= smallest:
                    yield batch, labels


def augmented_at_once(shape: Sequence[int], batch_size: int) -> int:
    """Return how many images of a shape (C, H, W) are augmented in one call: whole batches, at least one."""
    image = FLOAT32 * math.prod(shape)
    return batch_size * min(DRAWN_AT_ONCE, max(1, AUGMENTED_BYTES // (image * batch_size)))


def optimizer(parameters: Sequence[Tensor], settings: Settings) -> Optimizer:
    """Return a fresh local optimizer; its state starts from zero in every round."""
    return Optimizer(parameters, settings.optimizer, settings.learning_rate, settings.weight_decay, settings.momentum)


def train_network(
    model: TwoHead,
    data: TrainingSet,
    objective: Objective,
    settings: Settings,
    generator: torch.Generator,
    proximal_mu: float = 0.0,
    auxiliary: Callable[[TwoHead, Tensor], Tensor] | None = None,
) -> float:
    """Train encoder and global head for `local_epochs`; return the mean loss of the last epoch.

    Each step adds `proximal_term` to the loss, and `auxiliary(model, x)` where there is one; what is returned is the
    objective alone.

    Raises
    ------
    ValueError
        The batch size is 1 and the network has BatchNorm: no batch could be trained on.
    FloatingPointError
        The loss or a parameter is not finite.
    """
    smallest = smallest_batch(model, settings)
    model.train()
    shared = list(model.shared_parameters().values())
    received = [value.detach().clone() for value in shared] if proximal_mu else []
    descent = optimizer(shared, settings)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with autocast(x.device, settings.autocast):
            logits = model(x)
        value = objective(logits.float(), labels, data.counts)
        descent.zero_grad()
        more = auxiliary(model, x) if auxiliary is not None else 0.0
        (value + more + proximal_term(shared, received, proximal_mu)).backward()
        descent.step()
        return value.detach()

    trained = [*shared, *model.buffers()]
    loss = train_epochs(data, settings, generator, "local training", settings.local_epochs, step, trained, smallest)
    model.eval()
    return loss


def proximal_term(weights: Sequence[Tensor], received: Sequence[Tensor], mu: float) -> Tensor | float:
    """Return (μ/2)‖w - w_received‖² (FedProx: Li et al., MLSys 2020, eq. 2); 0 for μ = 0, without computing it."""
    if not mu:
        return 0.0
    return mu / 2 * torch.stack([((new - old) ** 2).sum() for new, old in zip(weights, received, strict=True)]).sum()


@torch.no_grad()
def mean_loss(model: TwoHead, data: TrainingSet, objective: Objective, batch_size: int) -> float:
    """Return the mean objective of the network as it is over the training split, in evaluation mode, unaugmented."""
    model.eval()
    total = torch.zeros((), device=data.labels.device, dtype=torch.float64)
    for pixels, labels in zip(data.pixels.split(batch_size), data.labels.split(batch_size), strict=True):
        total += objective(model(pixels.float() / 255).float(), labels, data.counts).double() * len(labels)
    return float(total) / max(len(data), 1)


@torch.no_grad()
def validate(
    model: TwoHead, federation: Federation, partition: int, batch_size: int, device: torch.device, personal: bool
) -> dict[str, int]:
    """Count correct predictions of the global head, and with `personal` of the personal one, on the validation split.

    Returns
    -------
    dict
        `validation_total`, `validation_correct` and, with `personal`, `personal_validation_correct`.
    """
    indices = federation.splits[partition].validation
    heads = {"validation_correct": model.head}
    if personal:
        heads["personal_validation_correct"] = model.personal_head
    right = {name: torch.zeros((), dtype=torch.int64, device=device) for name in heads}
    for chosen in np.array_split(indices, max(1, len(indices) // batch_size)):
        labels = to_device(torch.from_numpy(federation.images.labels[chosen]), device)
        z = model.features(federation.images.batch(chosen, device))
        for name, head in heads.items():
            right[name] += (head(z).argmax(1) == labels).sum()
    return {"validation_total": len(indices), **{name: int(count) for name, count in right.items()}}


def train_personal_head(model: TwoHead, data: TrainingSet, settings: Settings, generator: torch.Generator) -> float:
    """Train the personal head on the frozen encoder by `personal_objective` for `personal_epochs`.

    Returns the mean loss of the last epoch; raises FloatingPointError when it or a parameter is not finite.
    """
    model.eval()
    loss_function = find_objective(settings.personal_objective)
    own = list(model.personal_head.parameters())
    descent = optimizer(own, settings)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), autocast(x.device, settings.autocast):
            z = model.features(x)
        value = loss_function(model.personal_head(z.float()), labels, data.counts)
        descent.zero_grad()
        value.backward()
        descent.step()
        return value.detach()

    return train_epochs(data, settings, generator, "training of the personal head", settings.personal_epochs, step, own)


def train_epochs(
    data: TrainingSet,
    settings: Settings,
    generator: torch.Generator,
    what: str,
    epochs: int,
    step: Step,
    trained: Sequence[Tensor],
    smallest: int = 1,
) -> float:
    """Call `step` on every batch of shuffled epochs; return the mean loss over the samples of the last one.

    Parameters
    ----------
    what : str
        Named in the error.
    trained : sequence of Tensor
        What the steps change; checked after every epoch.
    smallest : int
        A last batch with fewer samples is left out.

    Raises
    ------
    FloatingPointError
        The loss or a trained value is not finite.
    """
    loss = float("nan")
    with process_draws_by(generator, data.labels.device):
        for _ in range(epochs):
            total = torch.zeros((), device=data.labels.device, dtype=torch.float64)
            seen = 0
            for x, labels in epoch(data, settings.batch_size, generator, smallest):
                total += step(x, labels) * len(labels)
                seen += len(labels)
            loss = float(total) / max(seen, 1)
            require_finite(what, loss, trained)
    return loss


@contextmanager
def process_draws_by(draw: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed the process's generators from a generator's seed alone, and restore them afterwards.

    Layers draw from them (dropout, stochastic depth), and so may adapters of one's own; other clients have used them
    before.
    """
    seed = draw.initial_seed() ^ 1  # not the numbers that the generator itself gives
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def smallest_batch(model: nn.Module, settings: Settings) -> int:
    """Return how many samples a batch needs: 2 with BatchNorm, whose batch statistics need two values, else 1.

    Raises
    ------
    ValueError
        No batch could be trained on.
    """
    smallest = 2 if has_batchnorm(model) else 1
    if settings.batch_size < smallest:
        raise ValueError("batch-size = 1: a network with BatchNorm needs at least 2")
    return smallest


def require_finite(what: str, loss: float, trained: Sequence[Tensor]) -> None:
    """Raise FloatingPointError if training diverged; the effect of the last step shows in the trained values only."""
    if not (math.isfinite(loss) and all_finite([*trained])):
        raise FloatingPointError(f"{what} diverged: mean loss {loss:g}")


def has_batchnorm(model: nn.Module) -> bool:
    """Tell whether a network normalizes with batch statistics in training."""
    batchnorm: Any = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, batchnorm) for module in model.modules())
