"""ATP on a source client: refining adaptation rates on its held-out labelled data (Bao et al. 2023, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models import TwoHead
from settings import Settings
from tta.atp import Adapt, refine_with_loss


@dataclass(frozen=True)
class Refined:
    """What a client's epochs over its validation split gave.

    `loss` and `correct` are of the adapted network on each batch, before the rates move, in the last epoch.
    """

    rates: dict[str, float]
    loss: float
    correct: int
    total: int


def refine_rates(
    model: TwoHead,
    x: Tensor,
    y: Tensor,
    rates: Mapping[str, float],
    variant: Adapt,
    settings: Settings,
    generator: torch.Generator,
) -> Refined:
    """Refine rates for some epochs of shuffled batches; every batch starts from the network's own weights.

    Parameters
    ----------
    x : Tensor [n, C, H, W]
        Validation images in [0, 1], n at least 1.
    y : Tensor [n]
        Their labels.

    Raises
    ------
    ValueError
        As `tta.atp.refine`, or the client has no validation samples.
    """
    if len(y) == 0:
        raise ValueError("rates are refined on validation samples, and there are none")
    new, loss, correct = dict(rates), math.nan, 0
    for _ in range(settings.rates_epochs):
        order = torch.randperm(len(y), generator=generator).to(y.device)
        loss, correct = 0.0, 0
        for chosen in order.split(settings.rates_batch_size):
            step = refine_with_loss(model, x[chosen], y[chosen], new, settings.rates_learning_rate, variant)
            new, loss, correct = step.rates, loss + step.loss * len(chosen), correct + step.correct
    return Refined(new, loss / len(y), correct, len(y))
