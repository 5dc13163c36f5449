"""The blurs of Hendrycks & Dietterich (ICLR 2019) with CIFAR-10-C's constants (make_cifar_c.py).

Every function takes x [B, C, H, W] in [0, 1], the severity 1..5 and one generator per sample, and returns the
blurred images. Constants are in pixels, for 32 x 32 images; other sizes use the same pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtta.data.corruptions import _ops
from fedtta.data.corruptions._ops import Generators, draw

GAUSSIAN_BLUR = (0.4, 0.6, 0.7, 0.8, 1.0)  # standard deviation
DEFOCUS_BLUR = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))  # radius, alias blur
GLASS_BLUR = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))  # sigma, reach, rounds
MOTION_BLUR = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))  # radius, sigma
ZOOM_BLUR = (1.06, 1.11, 1.16, 1.21, 1.26)  # end of the zoom factors, in steps of 0.01 from 1


def gaussian_blur(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Blur with a Gaussian of c pixels, edges repeated, cut at 4 c (make_cifar_c.py, `gaussian_blur`)."""
    return _ops.gaussian_blur(images, GAUSSIAN_BLUR[severity - 1])


def disk_kernel(radius: float, alias_blur: float) -> np.ndarray:
    """Return the defocus kernel [17, 17]: a disk of `radius` <= 8 pixels, smoothed against aliasing.

    The smoothing is a 3 x 3 Gaussian of standard deviation `alias_blur` (make_cifar_c.py, `disk`).
    """
    steps = np.arange(-8, 9)
    disk = (steps[:, None] ** 2 + steps[None, :] ** 2 <= radius**2).astype(np.float64)
    disk /= disk.sum()
    taps = np.exp(-(np.arange(-1, 2) ** 2) / (2 * alias_blur**2))
    taps /= taps.sum()
    padded = np.pad(disk, 1)  # the disk stays clear of the border, so zeros outside change nothing
    smooth_rows = sum(tap * padded[i : i + 17] for i, tap in enumerate(taps))
    return np.asarray(sum(tap * smooth_rows[:, j : j + 17] for j, tap in enumerate(taps)))


def defocus_blur(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Correlate with the disk of the lens, mirrored at the edges (make_cifar_c.py, `defocus_blur`)."""
    kernel = disk_kernel(*DEFOCUS_BLUR[severity - 1])
    reach = np.abs(np.argwhere(kernel > 0) - 8).max()  # what is beyond is exactly zero
    return _ops.correlate(images, kernel[8 - reach : 9 + reach, 8 - reach : 9 + reach])


def glass_blur(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Blur, round down to 8 bits, let pixels jump to their neighbours, blur (make_cifar_c.py, `glass_blur`).

    Each round walks from the bottom right to the top left and sets pixel (h, w) to its neighbour
    (h + dy, w + dx), both offsets uniform in {-reach, ..., reach - 1} = {-1, 0}. The published line looks like
    a swap, `x[h, w], x[h', w'] = x[h', w'], x[h, w]`, but its right side holds views of one array, so that
    the second assignment writes back what the first has just put there: CIFAR-10-C was made by copying, and
    copying is what is done here. Sources lie above or left of their target, where the walk has not yet
    been, so a round reads only pixels of its start: one gather for the whole batch.
    """
    sigma, reach, rounds = GLASS_BLUR[severity - 1]
    batch, channels, height, width = images.shape
    # The small push keeps a level that is k up to rounding from falling to k - 1.
    pixels = torch.floor(_ops.gaussian_blur(images, sigma) * 255 + 1e-4) / 255
    inner = (rounds, 2, height - 2 * reach, width - 2 * reach)
    jumps = draw(rngs, images, lambda rng: rng.integers(-reach, reach, size=inner)).long()
    offset = torch.zeros((batch, rounds, 2, height, width), dtype=torch.long, device=images.device)
    offset[..., reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = jumps  # the rest stays
    here = torch.arange(height * width, device=images.device).reshape(height, width)
    for step in range(rounds):
        source = here + offset[:, step, 0] * width + offset[:, step, 1]  # (B, H, W)
        index = source.reshape(batch, 1, -1).expand(-1, channels, -1)
        pixels = pixels.flatten(2).gather(2, index).reshape(images.shape)
    return _ops.gaussian_blur(pixels, sigma)


def motion_blur(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Blur along a line at an angle uniform in [-45, 45] degrees (make_cifar_c.py, `motion_blur`)."""
    radius, sigma = MOTION_BLUR[severity - 1]
    angles = draw(rngs, images.double(), lambda rng: np.asarray(rng.uniform(-45, 45)))
    return _ops.line_blur(images, angles, radius, sigma)


def zoom_blur(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Average the image with its enlargements by 1, 1.01, 1.02, ... (make_cifar_c.py, `zoom_blur`)."""
    factors = np.arange(1, ZOOM_BLUR[severity - 1], 0.01)  # the published call: rounding keeps the end in
    total = images.clone()
    for factor in factors:
        total += _ops.clipped_zoom(images, float(factor))
    return total / (len(factors) + 1)
