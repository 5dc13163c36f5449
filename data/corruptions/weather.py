"""The weather of Hendrycks & Dietterich (ICLR 2019) with CIFAR-10-C's constants (make_cifar_c.py).

Every function takes x [B, C, H, W] in [0, 1], the severity 1..5 and one generator per sample. Nothing is read from
files. CIFAR-10-C overlays photographs of frost whose licences are unclear; here frost is procedural: feathers of needle
crystals in five tileable textures made from fixed seeds, with the same weights. Each has the colours of one
photograph (mean, spread) at the scale of CIFAR-10-C; `NEEDLE_LENGTH` and `COVER` were chosen so that textures and
photographs cost a network the same. The kept ResNet-8 (82.9 % without frost; 10,000 test images of CIFAR-10,
severities 1, 3 and 5) has 75.7, 54.7 and 42.5 % with photographs, 75.6, 54.2 and 42.6 % with textures.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedtta.data.corruptions import _ops
from fedtta.data.corruptions._ops import Generators, draw, luminance

SNOW = (  # mean, deviation, zoom, threshold, blur radius, blur sigma, weight of the image
    (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
FROST = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))  # weights of image and frost
FOG = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))  # thickness, decay of the roughness
FOG_MAP = 32  # side of the fog map, doubled until it covers the image

# Frost textures. Mean and standard deviation of red, green and blue in 0..255: facts about the five photographs of
# CIFAR-10-C, the mean of the whole one, the deviation of its crops. The second photograph comes twice there.
PHOTOGRAPHS = (
    ((78, 149, 166), (27, 16.5, 15)),
    ((201, 205, 214), (20, 20.5, 21)),
    ((201, 205, 214), (20, 20.5, 21)),
    ((138, 153, 165), (28, 28, 29)),
    ((112, 123, 135), (39, 38.5, 37.5)),
)
TEXTURES = len(PHOTOGRAPHS)
SIDE = 192  # pixels
DIRECTIONS = 18  # of the needles, over 180 degrees
CRYSTALS = 40  # feathers in a texture
NEEDLE_LENGTH = 4.0  # standard deviation in pixels; needles are one pixel wide
BARB_ANGLE = 60.0  # degrees between a feather's shaft and its barbs: the symmetry of ice
COVER = 0.17  # share of the variance that is thicker and thinner ice, smooth over 9 pixels


def snow(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Whiten the image and add flakes, blurred along a line as they fall (make_cifar_c.py, `snow`).

    The flakes are Gaussian noise, enlarged, thresholded and blurred at an angle uniform in [-135, -45]
    degrees; they are added once as they are and once turned by 180 degrees.
    """
    mean, deviation, zoom, threshold, radius, sigma, weight = SNOW[severity - 1]
    shape = (1, *images.shape[2:])
    flakes = draw(rngs, images, lambda rng: rng.normal(mean, deviation, shape))
    flakes = _ops.clipped_zoom(flakes, zoom)
    flakes = torch.where(flakes < threshold, torch.zeros_like(flakes), flakes).clamp(0, 1)
    angles = draw(rngs, images.double(), lambda rng: np.asarray(rng.uniform(-135, -45)))
    flakes = _ops.line_blur(flakes, angles, radius, sigma)
    whitened = torch.maximum(images, luminance(images) * 1.5 + 0.5)
    return weight * images + (1 - weight) * whitened + flakes + flakes.flip(2, 3)


def frost(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Overlay ice: c0 * x + c1 * frost (make_cifar_c.py, `frost`).

    One of five textures and a position in it are drawn for each sample, as published; the textures take the place of
    CIFAR-10-C's photographs (see the module).
    """
    image_weight, frost_weight = FROST[severity - 1]
    height, width = images.shape[-2:]
    high = (TEXTURES, SIDE, SIDE)
    choice = draw(rngs, images.double(), lambda rng: rng.integers(high)).long()  # (B, 3)
    row = torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    rows = (choice[:, 1, None] + row)[:, :, None] % SIDE  # (B, H, 1); the textures tile
    columns = (choice[:, 2, None] + column)[:, None, :] % SIDE  # (B, 1, W)
    ice_textures = torch.from_numpy(textures()).to(images)  # (5, S, S, 3)
    ice = ice_textures[choice[:, 0, None, None], rows, columns].permute(0, 3, 1, 2)  # (B, 3, H, W)
    return image_weight * images + frost_weight * (ice if images.shape[1] == 3 else luminance(ice))


@lru_cache(maxsize=1)
def textures() -> np.ndarray:
    """Return the textures [5, 192, 192, 3], RGB in [0, 1]; they repeat without a seam."""
    return np.stack([_texture(number) for number in range(TEXTURES)])


def _texture(number: int) -> np.ndarray:
    """Return texture `number` [192, 192, 3]: needles along the direction of the nearest crystal, in uneven ice."""
    rng = np.random.default_rng(number)
    noise = np.fft.fft2(rng.standard_normal((SIDE, SIDE)))
    angles = np.arange(DIRECTIONS) * 180.0 / DIRECTIONS
    needles = np.stack([_needles(noise, angle) for angle in angles])  # (DIRECTIONS, S, S)
    warp = [6 * _smooth_noise(rng, 5.0) for _ in range(2)]
    direction = _nearest_crystal(rng, warp)
    barb = round(BARB_ANGLE * DIRECTIONS / 180)
    rows, columns = np.indices((SIDE, SIDE))
    layers = [needles[(direction + turn) % DIRECTIONS, rows, columns] for turn in (0, barb, -barb)]
    feather = _unit(np.maximum(layers[0], 0.8 * np.maximum(layers[1], layers[2])))
    ice = _unit(np.sqrt(1 - COVER) * feather + np.sqrt(COVER) * _smooth_noise(rng, 9.0))
    mean, deviation = np.asarray(PHOTOGRAPHS[number])
    return np.clip((mean + deviation * ice[..., None]) / 255, 0, 1)


def _spectrum(sigma_rows: float, sigma_columns: float, angle: float = 0.0) -> np.ndarray:
    """Return the transfer function [192, 192] of a periodic Gaussian, turned by `angle` degrees."""
    frequency = 2 * np.pi * np.fft.fftfreq(SIDE)
    down, right = np.meshgrid(frequency, frequency, indexing="ij")
    turn = np.deg2rad(angle)
    along = np.cos(turn) * right + np.sin(turn) * down
    across = np.cos(turn) * down - np.sin(turn) * right
    return np.exp(-((sigma_columns * along) ** 2 + (sigma_rows * across) ** 2) / 2)


def _unit(field: np.ndarray) -> np.ndarray:
    """Return a field with mean 0 and standard deviation 1."""
    return (field - field.mean()) / field.std()


def _needles(noise: np.ndarray, angle: float) -> np.ndarray:
    """Return noise stretched along `angle`, mean 0 and standard deviation 1."""
    return _unit(np.fft.ifft2(noise * _spectrum(0.0, NEEDLE_LENGTH, angle)).real)


def _smooth_noise(rng: np.random.Generator, sigma: float) -> np.ndarray:
    """Return periodic noise [192, 192] of that smoothness, mean 0 and standard deviation 1."""
    white = np.fft.fft2(rng.standard_normal((SIDE, SIDE)))
    return _unit(np.fft.ifft2(white * _spectrum(sigma, sigma)).real)


def _nearest_crystal(rng: np.random.Generator, warp: list[np.ndarray]) -> np.ndarray:
    """Return the direction's index of the crystal that each pixel belongs to, on a torus, borders warped."""
    centres = rng.uniform(0, SIDE, (CRYSTALS, 2, 1, 1))
    directions = rng.integers(0, DIRECTIONS, CRYSTALS)
    coordinates = np.indices((SIDE, SIDE)) + np.stack(warp)
    gap = np.abs(coordinates - centres) % SIDE  # (CRYSTALS, 2, S, S)
    gap = np.minimum(gap, SIDE - gap)
    return directions[(gap**2).sum(axis=1).argmin(axis=0)]


def fog(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Add a plasma fractal and rescale: (x + c0 * fog) * max(x) / (max(x) + c0) (make_cifar_c.py, `fog`)."""
    thickness, decay = FOG[severity - 1]
    height, width = images.shape[-2:]
    side = FOG_MAP
    while side < max(height, width):
        side *= 2
    noise = draw(rngs, images, lambda rng: rng.uniform(-1, 1, side * side - 1))
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
