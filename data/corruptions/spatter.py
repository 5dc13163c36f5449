"""Spatter of Hendrycks & Dietterich (ICLR 2019): water or mud on the lens (make_cifar_c.py, `spatter`).

The way light catches on drops of water follows the published 8-bit pipeline of OpenCV (Canny edges, chamfer distance,
histogram equalization, an emboss filter) for whole batches: each step maps [B, 1, H, W] tensors that hold whole numbers
0..255 in floating point.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtta.data.corruptions import _ops
from fedtta.data.corruptions._ops import Generators, colour_like, correlate, draw

SPATTER = (  # mean, deviation, smoothness, threshold, strength (water) or smoothness (mud)
    (0.62, 0.1, 0.7, 0.7, 0.5),
    (0.65, 0.1, 0.8, 0.7, 0.5),
    (0.65, 0.3, 1.0, 0.69, 0.5),
    (0.65, 0.1, 0.7, 0.69, 0.6),
    (0.65, 0.1, 0.5, 0.68, 0.6),
)
SPATTER_MUD_FROM = 4  # severity at which the drops turn from water to mud
WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)

CANNY_LOW, CANNY_HIGH = 50, 150
FAR = 20  # distances are cut here, in pixels
#: Length of a step in the 5 x 5 chamfer metric: straight, diagonal, knight's move (Borgefors 1986; OpenCV).
STRAIGHT, DIAGONAL, KNIGHT = 1.0, 1.4, 2.1969
EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])


def spatter(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Splash water (severity 1 to 3) or mud (4 and 5) on the lens (make_cifar_c.py, `spatter`)."""
    mean, deviation, smoothness, threshold, last = SPATTER[severity - 1]
    shape = (1, *images.shape[2:])
    liquid = draw(rngs, images, lambda rng: rng.normal(mean, deviation, shape))
    liquid = _ops.gaussian_blur(liquid, smoothness)
    liquid = torch.where(liquid < threshold, torch.zeros_like(liquid), liquid)  # (B, 1, H, W)
    cover = partial(_mud, sigma=last) if severity >= SPATTER_MUD_FROM else partial(_water, strength=last)
    return cover(images, liquid, threshold)


def _water(images: Tensor, liquid: Tensor, threshold: float, strength: float) -> Tensor:
    """Add pale turquoise where the drops catch the light; an image without a drop is not changed."""
    shine = glare(liquid)
    brightest = shine.amax(dim=(2, 3), keepdim=True)
    share = torch.where(brightest > 0, shine / brightest.clamp_min(1e-12), torch.zeros_like(shine))
    return images + strength * share * colour_like(WATER, images)


def _mud(images: Tensor, liquid: Tensor, threshold: float, sigma: float) -> Tensor:
    """Cover the image with brown where the liquid, smoothed by `sigma`, is dense."""
    dense = _ops.gaussian_blur((liquid > threshold).to(images), sigma)
    dense = torch.where(dense < 0.8, torch.zeros_like(dense), dense)
    return images * (1 - dense) + dense * colour_like(MUD, images)


def glare(liquid: Tensor) -> Tensor:
    """Return how brightly each pixel of a liquid layer shines, >= 0, without a fixed scale.

    Parameters
    ----------
    liquid : Tensor
        [B, 1, H, W], 0 where there is none.
    """
    levels = torch.floor(liquid.clamp(0, 1) * 255)
    distance = chamfer_distance(canny(levels)).clamp(max=FAR)
    smooth = torch.floor(_mean3(distance) + 1e-4)  # the push keeps 1 + rounding from falling to 0
    embossed = correlate(equalise(smooth), EMBOSS).clamp(0, 255)
    return levels * torch.round(_mean3(embossed))


def _mean3(images: Tensor) -> Tensor:
    """Return the mean over 3 x 3 pixels, mirrored at the edges."""
    return correlate(images, np.ones((3, 3))) / 9


def canny(levels: Tensor) -> Tensor:
    """Return Canny's edges as a boolean [B, 1, H, W]: Sobel 3 x 3, |dx| + |dy|, thresholds 50 and 150.

    J. Canny, "A Computational Approach to Edge Detection", 1986, in OpenCV's form.
    """
    height, width = levels.shape[-2:]
    padded = F.pad(levels, (1, 1, 1, 1), mode="replicate")
    smooth_down = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    smooth_right = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    dx = smooth_down[..., 2:] - smooth_down[..., :-2]
    dy = smooth_right[..., 2:, :] - smooth_right[..., :-2, :]
    size = dx.abs() + dy.abs()
    around = F.pad(size, (1, 1, 1, 1))  # nothing outside

    def neighbour(down: int, right: int) -> Tensor:
        return around[..., 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    # Thin: an edge is a maximum across its direction, which is one of four. Ties go to the earlier pixel.
    flat = dy.abs() < math.tan(math.pi / 8) * dx.abs()
    steep = dy.abs() > math.tan(3 * math.pi / 8) * dx.abs()
    falling = dx * dy < 0
    before = torch.where(falling, neighbour(-1, 1), neighbour(-1, -1))
    after = torch.where(falling, neighbour(1, -1), neighbour(1, 1))
    diagonal = (size > before) & (size > after)
    vertical = (size > neighbour(-1, 0)) & (size >= neighbour(1, 0))
    horizontal = (size > neighbour(0, -1)) & (size >= neighbour(0, 1))
    thin = torch.where(flat, horizontal, torch.where(steep, vertical, diagonal))
    candidate = thin & (size > CANNY_LOW)
    return _grow(candidate & (size > CANNY_HIGH), candidate)


def _grow(strong: Tensor, candidate: Tensor) -> Tensor:
    """Add the candidates that touch a strong edge, directly or through others (hysteresis)."""
    while True:
        near = F.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0
        grown = near & candidate
        if torch.equal(grown, strong):
            return strong
        strong = grown


def chamfer_distance(marked: Tensor) -> Tensor:
    """Return the distance [B, 1, H, W] to the nearest marked pixel in the 5 x 5 chamfer metric.

    Distances are exact up to `FAR` pixels; what lies further off has some value above it.
    """
    height, width = marked.shape[-2:]
    far = torch.full(marked.shape, 2.0 * FAR, device=marked.device)
    distance = torch.where(marked, torch.zeros_like(far), far)
    moves = [(down, right) for down in (-2, -1, 0, 1, 2) for right in (-2, -1, 0, 1, 2)]
    lengths = {1: STRAIGHT, 2: DIAGONAL, 5: KNIGHT}
    steps = [(down, right, lengths[down**2 + right**2]) for down, right in moves if down**2 + right**2 in lengths]
    while True:
        padded = F.pad(distance, (2, 2, 2, 2), value=2.0 * FAR)
        shorter = distance
        for down, right, length in steps:
            moved = padded[..., 2 + down : 2 + down + height, 2 + right : 2 + right + width]
            shorter = torch.minimum(shorter, moved + length)
        if torch.equal(shorter, distance):
            return distance
        distance = shorter


def equalise(levels: Tensor) -> Tensor:
    """Equalise the histogram of images whose levels are whole numbers 0..FAR, to 0..255.

    Level v goes to round(255 * n(v) / n(FAR)), n(v) the number of pixels above the lowest level and up to v;
    an image of one level stays as it is.
    """
    flat = levels.flatten(1).long()  # (B, HW)
    counts = torch.stack([(flat == level).sum(dim=1) for level in range(FAR + 1)], dim=1)  # (B, FAR + 1)
    total = counts.cumsum(dim=1)
    lowest = total.gather(1, flat.amin(dim=1, keepdim=True))  # (B, 1)
    above = flat.shape[1] - lowest
    table = torch.round(255 * (total - lowest).clamp_min(0).double() / above.clamp_min(1))
    mapped = table.gather(1, flat).to(levels).reshape(levels.shape)
    return torch.where((above == 0).reshape(-1, 1, 1, 1), levels, mapped)
