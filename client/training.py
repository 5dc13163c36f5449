"""Local training on one device: the two phases of a round (FedTHE, Algorithm 1, lines 6 to 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from client.compute import autocast
from client.objectives import Objective
from client.objectives import objective as find_objective
from client.randomness import layers_draw_by
from models import TwoHead
from models.finite import all_finite
from models.optim import Optimizer
from settings import Settings

Augment = Callable[[Tensor, torch.Generator], Tensor]
#: (x [B, C, H, W] in [0, 1], labels [B]) → mean loss of the batch, detached; it does all that one batch is for.
Step = Callable[[Tensor, Tensor], Tensor]
AUGMENTED_AT_ONCE = 64  # batches augmented in one call: enough to hide its fixed cost, little memory


@dataclass(frozen=True)
class TrainingSet:
    """A client's training split on its device.

    Parameters
    ----------
    index : ndarray int64 [n]
        Which images of the federation these are.
    pixels : Tensor uint8 [n, C, H, W]
    labels : Tensor int64 [n]
    counts : Tensor int64 [K]
        Samples of each class; they never leave the device.
    augment : callable or None
        `(x [B, C, H, W] in [0, 1], generator) → x`.
    """

    index: NDArray[np.int64]
    pixels: Tensor
    labels: Tensor
    counts: Tensor
    augment: Augment | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)


def epoch(
    data: TrainingSet, batch_size: int, generator: torch.Generator, smallest: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one shuffled, augmented epoch as (x [B, C, H, W] in [0, 1], labels [B]).

    A last short batch is kept unless it has fewer than `smallest` samples (2 for networks with BatchNorm, whose batch
    statistics need two values).
    """
    order = torch.randperm(len(data), generator=generator).to(data.labels.device)
    for chosen in order.split(batch_size * AUGMENTED_AT_ONCE):
        x = data.pixels[chosen].float() / 255
        if data.augment is not None:
            x = data.augment(x, generator)
        x = x.contiguous(memory_format=torch.channels_last)
        for batch, labels in zip(x.split(batch_size), data.labels[chosen].split(batch_size), strict=True):
            if len(labels) >= smallest:
                yield batch, labels


def optimizer(parameters: Sequence[Tensor], settings: Settings) -> Optimizer:
    """Return a fresh local optimiser; its state starts anew in every round."""
    return Optimizer(parameters, settings.optimizer, settings.learning_rate, settings.weight_decay, settings.momentum)


def train_network(
    model: TwoHead,
    data: TrainingSet,
    objective: Objective,
    settings: Settings,
    generator: torch.Generator,
    auxiliary: Callable[[TwoHead, Tensor], Tensor] | None = None,
) -> float:
    """Train all that travels for `local_epochs`; return the mean loss of the last epoch.

    With FedProx each step adds `proximal_term` to the loss, and `auxiliary(model, x)` where there is one; what is
    returned is the objective alone.

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
    mu = settings.proximal_mu if settings.aggregation == "fedprox" else 0.0
    received = [value.detach().clone() for value in shared] if mu else []
    descent = optimizer(shared, settings)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with autocast(x.device, settings.autocast):
            logits = model(x)
        value = objective(logits.float(), labels, data.counts)
        descent.zero_grad()
        more = auxiliary(model, x) if auxiliary is not None else 0.0
        (value + more + proximal_term(shared, received, mu)).backward()
        descent.step()
        return value.detach()

    trained = [*shared, *model.buffers()]
    loss = train_epochs(data, settings, generator, "local training", settings.local_epochs, step, trained, smallest)
    model.eval()
    return loss


def proximal_term(weights: Sequence[Tensor], received: Sequence[Tensor], mu: float) -> Tensor | float:
    """Return (μ/2)‖w - w_received‖² (FedProx: Li et al., MLSys 2020, eq. 2); 0 for μ = 0, without looking."""
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
        What the steps change; looked at after every epoch.
    smallest : int
        A last batch with fewer samples is left out.

    Raises
    ------
    FloatingPointError
        The loss or a trained value is not finite.
    """
    loss = float("nan")
    with layers_draw_by(generator, data.labels.device):
        for _ in range(epochs):
            total = torch.zeros((), device=data.labels.device, dtype=torch.float64)
            seen = 0
            for x, labels in epoch(data, settings.batch_size, generator, smallest):
                total += step(x, labels) * len(labels)
                seen += len(labels)
            loss = float(total) / max(seen, 1)
            require_finite(what, loss, [*trained])
    return loss


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


def require_finite(what: str, loss: float, trained: list[Tensor]) -> None:
    """Raise FloatingPointError if training diverged; what the last step did shows in the trained values only."""
    if not (math.isfinite(loss) and all_finite(trained)):
        raise FloatingPointError(f"{what} diverged: mean loss {loss:g}")


def has_batchnorm(model: nn.Module) -> bool:
    """Tell whether a network normalises with batch statistics in training."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
