"""Operations that the corruptions share: random draws, luminance, linear filters and resampling of [B, C, H, W].

Filters along an axis are small dense matrices (made by scipy, hence with scipy's boundary rules to the last digit)
applied by a batched product: one tool for Gaussian blur, zoom and box resampling, fast on CPU and GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: One generator per sample, in the order of the batch.
Generators = Sequence[np.random.Generator]
#: Weights of red, green and blue in the luminance (ITU-R BT.601).
LUMINANCE = (0.299, 0.587, 0.114)


def draw(rngs: Generators, like: Tensor, sample: Callable[[np.random.Generator], np.ndarray]) -> Tensor:
    """Draw once from every generator and stack the draws to [B, ...] with the dtype and device of `like`.

    Draws are made on the CPU in float64, so they are equal on all devices.
    """
    return torch.from_numpy(np.stack([sample(rng) for rng in rngs])).to(like)


def luminance(images: Tensor) -> Tensor:
    """Return the BT.601 luminance [B, 1, H, W] of RGB images; grayscale images are returned unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = LUMINANCE
    return red * images[:, 0:1] + green * images[:, 1:2] + blue * images[:, 2:3]


def colour_like(colour: tuple[float, float, float], images: Tensor) -> Tensor:
    """Return an RGB colour as [1, C, 1, 1] for the channels of `images` (its luminance for grayscale images)."""
    rgb = torch.tensor(colour, dtype=torch.float64).to(images).reshape(1, 3, 1, 1)
    return rgb if images.shape[1] == 3 else luminance(rgb)


@lru_cache(maxsize=256)
def gaussian_matrix(size: int, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> np.ndarray:
    """Return the matrix [size, size] of `scipy.ndimage.gaussian_filter1d` along an axis.

    The defaults of `mode` and `truncate` are those of `skimage.filters.gaussian`. The kernel has radius
    int(truncate * sigma + 0.5) pixels.
    """
    from scipy import ndimage  # imported lazily: most processes corrupt nothing

    return ndimage.gaussian_filter1d(np.eye(size), sigma, axis=0, mode=mode, truncate=truncate)


@lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> np.ndarray:
    """Return the matrix [size, size] that enlarges the middle of an axis by `factor` >= 1, linearly.

    The middle ceil(size / factor) pixels are zoomed with `scipy.ndimage.zoom` (order 1) and trimmed to `size`:
    `clipped_zoom` of make_cifar_c.py along one axis.
    """
    crop = math.ceil(size / factor)
    start = (size - crop) // 2
    from scipy import ndimage

    zoomed = ndimage.zoom(np.eye(size)[start : start + crop], (factor, 1.0), order=1)
    trim = (zoomed.shape[0] - size) // 2
    return zoomed[trim : trim + size]


def filter_axes(images: Tensor, rows: np.ndarray, columns: np.ndarray) -> Tensor:
    """Return rows @ image @ columns^T for each channel of each image.

    Parameters
    ----------
    images : Tensor
        [B, C, H, W].
    rows, columns : np.ndarray
        [H', H] and [W', W].

    Returns
    -------
    Tensor
        [B, C, H', W'].
    """
    batch, channels, height, width = images.shape
    planes = images.reshape(batch * channels, height, width)
    left = torch.from_numpy(rows).to(images).t().expand(len(planes), -1, -1)
    right = torch.from_numpy(columns).to(images).t().expand(len(planes), -1, -1)
    # The left factor is applied from the right on the transposed plane: several times faster on a CPU.
    turned = torch.bmm(torch.bmm(planes, right).transpose(1, 2), left)  # (B*C, W', H')
    return turned.transpose(1, 2).reshape(batch, channels, len(rows), len(columns))


def gaussian_blur(images: Tensor, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Blur [B, C, H, W] with a Gaussian of `sigma` pixels; see `gaussian_matrix`."""
    height, width = images.shape[-2:]
    rows = gaussian_matrix(height, sigma, mode, truncate)
    return filter_axes(images, rows, gaussian_matrix(width, sigma, mode, truncate))


def clipped_zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge the middle of [B, C, H, W] by `factor`, same size out; see `zoom_matrix`."""
    height, width = images.shape[-2:]
    return filter_axes(images, zoom_matrix(height, factor), zoom_matrix(width, factor))


def correlate(images: Tensor, kernel: np.ndarray) -> Tensor:
    """Correlate each channel of [B, C, H, W] with an odd square kernel, mirrored at the edges.

    The edge pixel is not repeated (OpenCV's default border, BORDER_REFLECT_101). Taps are added one by one, so a
    sample's result does not depend on its batch.
    """
    height, width = images.shape[-2:]
    radius = len(kernel) // 2
    padded = F.pad(images, (radius,) * 4, mode="reflect")
    total = torch.zeros_like(images)
    for i, j in np.argwhere(kernel != 0):
        total.add_(padded[..., i : i + height, j : j + width], alpha=float(kernel[i, j]))
    return total


def line_blur(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Blur along a line with one direction per sample: the motion blur of ImageMagick.

    Pixel p becomes the weighted mean of p + round(i * direction), i = 0 .. 2 * ceil(radius), with weights
    exp(-i^2 / (2 sigma^2)): a one-sided Gaussian, integer steps, edge pixels repeated outside.

    Parameters
    ----------
    images : Tensor
        [B, C, H, W].
    angles : Tensor
        [B], degrees from the direction of growing columns towards growing rows.
    radius, sigma : float
        Pixels.
    """
    batch, channels, height, width = images.shape
    steps = 2 * math.ceil(radius) + 1
    weights = np.exp(-(np.arange(steps) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    radians = torch.deg2rad(angles.double()).reshape(batch, 1, 1)
    row = torch.arange(height, device=images.device).reshape(1, height, 1)
    column = torch.arange(width, device=images.device).reshape(1, 1, width)
    flat = images.flatten(2)
    total = torch.zeros_like(flat)
    for step, weight in enumerate(weights):
        # ceil(v - 0.5) is ImageMagick's rounding: halves go down.
        down = torch.ceil(step * torch.sin(radians) - 0.5).long()
        right = torch.ceil(step * torch.cos(radians) - 0.5).long()
        source = (row + down).clamp(0, height - 1) * width + (column + right).clamp(0, width - 1)  # (B, H, W)
        index = source.reshape(batch, 1, height * width).expand(-1, channels, -1)
        total.add_(flat.gather(2, index), alpha=float(weight))
    return total.reshape(images.shape)


def resample(images: Tensor, rows: Tensor, columns: Tensor, repeat_edge: bool) -> Tensor:
    """Read [B, C, H, W] at real-valued positions, bilinearly, mirrored outside.

    Parameters
    ----------
    images : Tensor
        [B, C, H, W].
    rows, columns : Tensor
        [B, H', W'], in pixels; 0 is the centre of the first one.
    repeat_edge : bool
        True: mirror at the outer border of the edge pixel (scipy's "reflect"); False: at its centre
        (OpenCV's BORDER_REFLECT_101).
    """
    height, width = images.shape[-2:]
    if repeat_edge:
        down, right = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1
    else:
        down, right = 2 * rows / (height - 1) - 1, 2 * columns / (width - 1) - 1
    grid = torch.stack((right, down), dim=-1).to(images)  # (B, H', W', 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=not repeat_edge)
