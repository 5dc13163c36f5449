"""The noise of Hendrycks & Dietterich (ICLR 2019) with CIFAR-10-C's constants (make_cifar_c.py).

Every function takes x [B, C, H, W] in [0, 1], the severity 1..5 and one generator per sample, and returns the noisy
images, not yet clipped to [0, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtta.data.corruptions._ops import Generators, draw

GAUSSIAN_NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)  # standard deviation
SHOT_NOISE = (500.0, 250.0, 100.0, 75.0, 50.0)  # photons of a white pixel
IMPULSE_NOISE = (0.01, 0.02, 0.03, 0.05, 0.07)  # share of the values replaced
SPECKLE_NOISE = (0.06, 0.10, 0.12, 0.16, 0.20)  # standard deviation relative to the value


def gaussian_noise(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Return x + n, n ~ N(0, c^2) for every value (make_cifar_c.py, `gaussian_noise`)."""
    noise = draw(rngs, images, lambda rng: rng.standard_normal(images.shape[1:]))
    return images + GAUSSIAN_NOISE[severity - 1] * noise


def speckle_noise(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Return x + x * n, n ~ N(0, c^2) for every value (make_cifar_c.py, `speckle_noise`)."""
    noise = draw(rngs, images, lambda rng: rng.standard_normal(images.shape[1:]))
    return images + SPECKLE_NOISE[severity - 1] * images * noise


def shot_noise(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Return Poisson(c * x) / c for every value (make_cifar_c.py, `shot_noise`)."""
    photons = SHOT_NOISE[severity - 1]
    rates = images.double().cpu().numpy() * photons
    counts = np.stack([rng.poisson(rate) for rng, rate in zip(rngs, rates, strict=True)])
    return (torch.from_numpy(counts).double() / photons).to(images)


def impulse_noise(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Replace a share c of the values (each channel on its own) by 0 or 1, both equally likely.

    make_cifar_c.py, `impulse_noise`: skimage's "salt and pepper".
    """
    amount = IMPULSE_NOISE[severity - 1]
    # One uniform number decides both: below amount / 2 pepper, from there to amount salt.
    chance = draw(rngs, images.double(), lambda rng: rng.random(images.shape[1:]))
    noisy = torch.where(chance < amount, torch.ones_like(images), images)
    return torch.where(chance < amount / 2, torch.zeros_like(images), noisy)
