"""Procedural frost: feathers of needle crystals, five tileable textures made once from fixed seeds.

CIFAR-10-C overlays photographs whose licences are unclear. These textures stand in for them: same use, same
weights, similar brightness, other crystals.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

TEXTURES = 5
SIDE = 192  # pixels
DIRECTIONS = 18  # of the needles, over 180 degrees
CRYSTALS = 40  # feathers in a texture
NEEDLE_LENGTH, NEEDLE_WIDTH = 6.0, 0.6  # standard deviations in pixels
BARB_ANGLE = 60.0  # degrees between a feather's shaft and its barbs: the symmetry of ice
TINT = (1.3, 1.1, 0.9)  # exponents of red, green, blue: thin ice is bluish, thick ice white


@lru_cache(maxsize=1)
def textures() -> np.ndarray:
    """Return the textures [5, 192, 192, 3], RGB in [0, 1]; they repeat without a seam."""
    return np.stack([_texture(np.random.default_rng(number)) for number in range(TEXTURES)])


def _texture(stream: np.random.Generator) -> np.ndarray:
    """Return one texture [192, 192, 3]: needles along the direction of the nearest crystal."""
    noise = np.fft.fft2(stream.standard_normal((SIDE, SIDE)))
    angles = np.arange(DIRECTIONS) * 180.0 / DIRECTIONS
    needles = np.stack([_needles(noise, angle) for angle in angles])  # (DIRECTIONS, S, S)
    warp = [6 * _smooth_noise(stream, 5.0) for _ in range(2)]
    direction = _nearest_crystal(stream, warp)
    barb = round(BARB_ANGLE * DIRECTIONS / 180)
    rows, columns = np.indices((SIDE, SIDE))
    layers = [needles[(direction + turn) % DIRECTIONS, rows, columns] for turn in (0, barb, -barb)]
    feather = np.maximum(layers[0], 0.8 * np.maximum(layers[1], layers[2]))
    cover = 1 / (1 + np.exp(-1.5 * _smooth_noise(stream, 9.0)))
    ice = np.clip(0.22 + 0.3 * cover + 0.27 * (0.4 + 0.6 * cover) * feather, 0, 1)
    return np.stack([ice**exponent for exponent in TINT], axis=-1)


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
    return _unit(np.fft.ifft2(noise * _spectrum(NEEDLE_WIDTH, NEEDLE_LENGTH, angle)).real)


def _smooth_noise(stream: np.random.Generator, sigma: float) -> np.ndarray:
    """Return periodic noise [192, 192] of that smoothness, mean 0 and standard deviation 1."""
    white = np.fft.fft2(stream.standard_normal((SIDE, SIDE)))
    return _unit(np.fft.ifft2(white * _spectrum(sigma, sigma)).real)


def _nearest_crystal(stream: np.random.Generator, warp: list[np.ndarray]) -> np.ndarray:
    """Return the direction's index of the crystal that each pixel belongs to, on a torus, borders warped."""
    centres = stream.uniform(0, SIDE, (CRYSTALS, 2, 1, 1))
    directions = stream.integers(0, DIRECTIONS, CRYSTALS)
    places = np.indices((SIDE, SIDE)) + np.stack(warp)
    gap = np.abs(places - centres) % SIDE  # (CRYSTALS, 2, S, S)
    gap = np.minimum(gap, SIDE - gap)
    return directions[(gap**2).sum(axis=1).argmin(axis=0)]
