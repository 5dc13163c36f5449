"""The weather of Hendrycks & Dietterich (ICLR 2019) with CIFAR-10-C's constants (make_cifar_c.py).

Every function takes x [B, C, H, W] in [0, 1], the severity 1..5 and one stream a sample. Nothing is read from
files: the published frost overlays photographs, here the crystals are procedural (`_frost`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from data.corruptions import _filters, _frost, _liquid
from data.corruptions._common import Streams, colour_like, draw, luminance

SNOW = (  # mean, deviation, zoom, threshold, blur radius, blur sigma, weight of the image
    (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
FROST = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))  # weights of image and frost
FOG = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))  # thickness, decay of the roughness
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
FOG_MAP = 32  # side of the fog map, doubled until it covers the image


def snow(images: Tensor, severity: int, streams: Streams) -> Tensor:
    """Whiten the image and add flakes, blurred along a line as they fall (make_cifar_c.py, `snow`).

    The flakes are Gaussian noise, enlarged, thresholded and blurred at an angle uniform in [-135, -45]
    degrees; they are added once as they are and once turned by 180 degrees.
    """
    mean, deviation, zoom, threshold, radius, sigma, weight = SNOW[severity - 1]
    shape = (1, *images.shape[2:])
    flakes = draw(streams, images, lambda stream: stream.normal(mean, deviation, shape))
    flakes = _filters.clipped_zoom(flakes, zoom)
    flakes = torch.where(flakes < threshold, torch.zeros_like(flakes), flakes).clamp(0, 1)
    angles = draw(streams, images.double(), lambda stream: np.asarray(stream.uniform(-135, -45)))
    flakes = _filters.line_blur(flakes, angles, radius, sigma)
    whitened = torch.maximum(images, luminance(images) * 1.5 + 0.5)
    return weight * images + (1 - weight) * whitened + flakes + flakes.flip(2, 3)


def frost(images: Tensor, severity: int, streams: Streams) -> Tensor:
    """Overlay ice: c0 * x + c1 * frost (make_cifar_c.py, `frost`).

    As published one of five textures and a place in it are picked at random for each sample; the textures
    are made here, not photographed, so their crystals differ from CIFAR-10-C's.
    """
    image_weight, frost_weight = FROST[severity - 1]
    height, width = images.shape[-2:]
    high = (_frost.TEXTURES, _frost.SIDE, _frost.SIDE)
    choice = draw(streams, images.double(), lambda stream: stream.integers(high)).long()  # (B, 3)
    row = torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    rows = (choice[:, 1, None] + row)[:, :, None] % _frost.SIDE  # (B, H, 1); the textures tile
    columns = (choice[:, 2, None] + column)[:, None, :] % _frost.SIDE  # (B, 1, W)
    textures = torch.from_numpy(_frost.textures()).to(images)  # (5, S, S, 3)
    ice = textures[choice[:, 0, None, None], rows, columns].permute(0, 3, 1, 2)  # (B, 3, H, W)
    return image_weight * images + frost_weight * (ice if images.shape[1] == 3 else luminance(ice))


def fog(images: Tensor, severity: int, streams: Streams) -> Tensor:
    """Add a plasma fractal and rescale: (x + c0 * fog) * max(x) / (max(x) + c0) (make_cifar_c.py, `fog`)."""
    thickness, decay = FOG[severity - 1]
    height, width = images.shape[-2:]
    side = FOG_MAP
    while side < max(height, width):
        side *= 2
    noise = draw(streams, images, lambda stream: stream.uniform(-1, 1, side * side - 1))
    haze = plasma_fractal(noise, decay)[:, None, :height, :width]  # (B, 1, H, W)
    brightest = images.amax(dim=(1, 2, 3), keepdim=True)
    return (images + thickness * haze) * brightest / (brightest + thickness)


def plasma_fractal(noise: Tensor, decay: float) -> Tensor:
    """Return height maps in [0, 1] by the diamond-square algorithm on a torus.

    Parameters
    ----------
    noise : Tensor
        [B, side^2 - 1], uniform in [-1, 1], side a power of two; used up in order, coarse to fine.
    decay : float
        The roughness starts at 100, is divided by `decay` at each finer step, and enters squared
        (as published: roughness * uniform(-roughness, roughness)).

    Returns
    -------
    Tensor
        [B, side, side], each map reaching 0 and 1.
    """
    side = round((noise.shape[1] + 1) ** 0.5)
    heights = noise.new_zeros((len(noise), side, side))
    step, roughness, used = side, 100.0, 0
    while step >= 2:
        half, cells = step // 2, (side // step) ** 2
        parts = noise[:, used : used + 3 * cells].reshape(len(noise), 3, side // step, side // step)
        wobble = roughness**2 * parts
        used += 3 * cells
        corners = heights[:, ::step, ::step].clone()
        pairs = corners + corners.roll(-1, 1)
        middles = (pairs + pairs.roll(-1, 2)) / 4 + wobble[:, 0]
        heights[:, half::step, half::step] = middles
        across = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        heights[:, ::step, half::step] = across / 4 + wobble[:, 1]
        down = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        heights[:, half::step, ::step] = down / 4 + wobble[:, 2]
        step, roughness = half, roughness / decay
    heights = heights - heights.amin(dim=(1, 2), keepdim=True)
    return heights / heights.amax(dim=(1, 2), keepdim=True)


def spatter(images: Tensor, severity: int, streams: Streams) -> Tensor:
    """Splash water (severity 1 to 3) or mud (4 and 5) on the lens (make_cifar_c.py, `spatter`)."""
    mean, deviation, smoothness, threshold, last = SPATTER[severity - 1]
    shape = (1, *images.shape[2:])
    liquid = draw(streams, images, lambda stream: stream.normal(mean, deviation, shape))
    liquid = _filters.gaussian_blur(liquid, smoothness)
    liquid = torch.where(liquid < threshold, torch.zeros_like(liquid), liquid)  # (B, 1, H, W)
    cover = partial(_mud, sigma=last) if severity >= SPATTER_MUD_FROM else partial(_water, strength=last)
    return cover(images, liquid, threshold)


def _water(images: Tensor, liquid: Tensor, threshold: float, strength: float) -> Tensor:
    """Add pale turquoise where the drops catch the light; an image without a drop stays as it is."""
    glare = _liquid.glare(liquid)
    brightest = glare.amax(dim=(2, 3), keepdim=True)
    share = torch.where(brightest > 0, glare / brightest.clamp_min(1e-12), torch.zeros_like(glare))
    return images + strength * share * colour_like(WATER, images)


def _mud(images: Tensor, liquid: Tensor, threshold: float, sigma: float) -> Tensor:
    """Cover the image with brown where the liquid, smoothed by `sigma`, is dense."""
    dense = _filters.gaussian_blur((liquid > threshold).to(images), sigma)
    dense = torch.where(dense < 0.8, torch.zeros_like(dense), dense)
    return images * (1 - dense) + dense * colour_like(MUD, images)
