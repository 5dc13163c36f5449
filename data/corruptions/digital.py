"""The digital corruptions of Hendrycks & Dietterich (ICLR 2019) with the constants of make_cifar_c.py.

Every function takes x [B, C, H, W] in [0, 1], the severity 1..5 and one generator per sample. Two of them work
on 8-bit images, as published: `pixelate` and `jpeg_compression` round x to 256 levels first.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedtta.data.corruptions import _ops
from fedtta.data.corruptions._ops import Generators, draw

BRIGHTNESS = (0.05, 0.1, 0.15, 0.2, 0.3)  # added to the value of HSV
CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)  # factor of the distance to the mean
SATURATE = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))  # factor and offset of the saturation
JPEG_COMPRESSION = (80, 65, 58, 50, 40)  # quality
PIXELATE = (0.95, 0.9, 0.85, 0.75, 0.65)  # factor of the side
ELASTIC_TRANSFORM = (  # height and smoothness of the displacement, shift of the corners; all by the side
    (0.0, 0.0, 0.08),
    (0.05, 0.2, 0.07),
    (0.08, 0.06, 0.06),
    (0.1, 0.04, 0.05),
    (0.1, 0.03, 0.03),
)


def brightness(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Raise the value of HSV by c, up to 1 (make_cifar_c.py, `brightness`).

    With hue and saturation kept, a new value v' scales a pixel by v' / v; a black one becomes grey v'.
    """
    value = images.amax(dim=1, keepdim=True)  # (B, 1, H, W)
    raised = (value + BRIGHTNESS[severity - 1]).clamp(max=1)
    tiny = torch.finfo(images.dtype).tiny
    shape = torch.where(value > tiny, images / value.clamp_min(tiny), torch.ones_like(images))
    return shape * raised


def saturate(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Change the saturation of HSV to s * c0 + c1, clipped to [0, 1] (make_cifar_c.py, `saturate`).

    A grey pixel of an RGB image has hue 0, which is red, so that c1 > 0 tints it red, as published. Images of
    one channel have no hue and no saturation: they come back unchanged.
    """
    if images.shape[1] == 1:
        return images.clone()
    factor, offset = SATURATE[severity - 1]
    value = images.amax(dim=1, keepdim=True)  # (B, 1, H, W)
    spread = value - images.amin(dim=1, keepdim=True)
    tiny = torch.finfo(images.dtype).tiny
    saturation = spread / value.clamp_min(tiny)
    changed = (saturation * factor + offset).clamp(0, 1)
    red = torch.tensor([0.0, 1.0, 1.0]).to(images).reshape(1, 3, 1, 1)  # distance below the value, hue 0
    below = torch.where(spread > 0, (value - images) / spread.clamp_min(tiny), red)  # in [0, 1]
    return value * (1 - changed * below)


def contrast(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Move each channel towards its mean over the image (make_cifar_c.py, `contrast`)."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return (images - mean) * CONTRAST[severity - 1] + mean


def to_levels(images: Tensor) -> Tensor:
    """Return x in [0, 1] as the nearest of the levels 0..255, still floating point."""
    return torch.floor(images * 255 + 0.5)


def pixelate(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Shrink to int(c * side) with a box filter and enlarge again (make_cifar_c.py, `pixelate`).

    Bit for bit Pillow's result on 8-bit images: it shrinks columns, then rows, rounding after each; the
    enlargement copies pixels.
    """
    factor = PIXELATE[severity - 1]
    height, width = images.shape[-2:]
    low = (int(height * factor), int(width * factor))
    levels = to_levels(images)
    levels = torch.floor(_box(levels, 3, low[1]) + 0.5)
    levels = torch.floor(_box(levels, 2, low[0]) + 0.5)
    return _box(_box(levels, 3, width), 2, height) / 255


def _box(images: Tensor, axis: int, size: int) -> Tensor:
    """Resize an axis as Pillow's BOX does: the mean of the pixels whose centres lie in the target's box."""
    scale = images.shape[axis] / size
    centre = (np.arange(size) + 0.5) * scale
    half = 0.5 * max(scale, 1.0)
    first = np.maximum((centre - half + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + half + 0.5).astype(np.int64), images.shape[axis])  # exclusive
    total = torch.zeros_like(images.index_select(axis, torch.from_numpy(first).to(images.device)))
    shape = [-1 if i == axis else 1 for i in range(images.ndim)]
    for step in range(int((last - first).max())):
        index = np.minimum(first + step, images.shape[axis] - 1)
        used = torch.from_numpy(first + step < last).to(images).reshape(shape)
        total += images.index_select(axis, torch.from_numpy(index).to(images.device)) * used
    return total / torch.from_numpy(last - first).to(images).reshape(shape)


def jpeg_compression(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Store as JPEG of quality c and read back, on the CPU (make_cifar_c.py, `jpeg_compression`)."""
    quality = JPEG_COMPRESSION[severity - 1]
    levels = to_levels(images).to(torch.uint8).cpu().permute(0, 2, 3, 1).contiguous().numpy()  # (B, H, W, C)
    stored = np.stack([_jpeg_round_trip(image, quality) for image in levels])
    return torch.from_numpy(stored).permute(0, 3, 1, 2).to(images) / 255


def _jpeg_round_trip(image: np.ndarray, quality: int) -> np.ndarray:
    """Return one 8-bit image [H, W, C] after JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(buffer, "JPEG", quality=quality)
    with Image.open(buffer) as decoded:
        return np.asarray(decoded).reshape(image.shape)


def elastic_transform(images: Tensor, severity: int, rngs: Generators) -> Tensor:
    """Move three corners at random (affine), then every pixel (make_cifar_c.py, `elastic_transform`).

    The published constants are shares of the image's side; here that is the shorter one.
    """
    height, width = images.shape[-2:]
    side = min(height, width)
    strength, smoothness, shift = (side * share for share in ELASTIC_TRANSFORM[severity - 1])
    corner_shift = draw(rngs, images.double(), lambda rng: rng.uniform(-shift, shift, (3, 2)))
    rows, columns = _affine_sources(corner_shift, height, width)
    warped = _ops.resample(images, rows, columns, repeat_edge=False)
    if strength == 0:
        return warped
    field = draw(rngs, images, lambda rng: rng.uniform(-1, 1, (2, height, width)))
    field = strength * _ops.gaussian_blur(field, smoothness, mode="reflect", truncate=3.0)  # (B, 2, H, W)
    row = torch.arange(height).to(images).reshape(1, height, 1)
    column = torch.arange(width).to(images).reshape(1, 1, width)
    return _ops.resample(warped, row + field[:, 1], column + field[:, 0], repeat_edge=True)


def _affine_sources(corner_shift: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where each pixel comes from, rows and columns [B, H, W], under a random affine map.

    The map takes three corners (x, y) of a square in the middle to the corners + `corner_shift` [B, 3, 2].
    """
    middle = torch.tensor([width // 2, height // 2]).to(corner_shift)
    reach = min(height, width) // 3
    square = middle + reach * torch.tensor([[1, 1], [1, -1], [-1, -1]]).to(corner_shift)  # (3, 2)
    moved = square + corner_shift  # (B, 3, 2)
    homogeneous = torch.cat((moved, torch.ones_like(moved[..., :1])), dim=-1)  # (B, 3, 3)
    inverse = torch.linalg.solve(homogeneous, square.expand_as(moved))  # (B, 3, 2): [x, y, 1] @ inverse
    x = torch.arange(width).to(corner_shift).reshape(1, 1, width, 1)
    y = torch.arange(height).to(corner_shift).reshape(1, height, 1, 1)
    sources = x * inverse[:, None, None, 0] + y * inverse[:, None, None, 1] + inverse[:, None, None, 2]
    return sources[..., 1], sources[..., 0]
