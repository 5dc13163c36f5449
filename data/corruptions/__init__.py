"""The common corruptions: 15 of the benchmark and 4 extra ones, seeded, for whole batches on any device.

D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, with the constants of CIFAR-10-C (make_cifar_c.py). One function a corruption in
`noise`, `blur`, `weather` and `digital`; `corrupt` is the way in.

What differs from the published files: frost is procedural (no photographs); results stay floating point
where CIFAR-10-C cuts them to 8 bits; motion blur (also in snow) follows ImageMagick's definition without its
8-bit steps; affine resampling is exact where older versions of OpenCV work in steps of 1/32 pixel. Constants in
pixels are meant for 32 x 32 images and are used as they are for other sizes (`elastic_transform` scales with
the side, as its constants are published).

By these constants heavier does not always mean further from the clean image, pixel by pixel: `elastic_transform`
moves less at higher severity, `frost` darkens the image as the ice grows, `glass_blur` trades blur for rounds,
`spatter` turns from water to mud at 4 and `saturate` from grey to garish at 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from data.corruptions import blur, digital, noise, weather
from data.corruptions._common import Streams, check_images, check_severity, make_streams

_FUNCTIONS: dict[str, Callable[[Tensor, int, Streams], Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": digital.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}

#: The 15 corruptions of CIFAR-10-C, in its order.
CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)[:15]
#: The 4 held out for tuning.
EXTRA_CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)[15:]

#: Values worked on at a time: bounds the memory and keeps a CPU's caches warm.
_CHUNK_VALUES = 2**20

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "corrupt"]


@overload
def corrupt(images: Tensor, name: str, severity: int, seed: int | Sequence[int]) -> Tensor: ...
@overload
def corrupt(images: np.ndarray, name: str, severity: int, seed: int | Sequence[int]) -> np.ndarray: ...
def corrupt(images: Tensor | np.ndarray, name: str, severity: int, seed: int | Sequence[int]) -> Tensor | np.ndarray:
    """Return the images under one corruption.

    Parameters
    ----------
    images : Tensor or np.ndarray
        [B, C, H, W], floating point in [0, 1], C 1 or 3, H and W at least 8; B may be 0. Left as it is.
    name : str
        One of `CORRUPTIONS` or `EXTRA_CORRUPTIONS`.
    severity : int
        1 (light) to 5 (heavy).
    seed : int or sequence of int
        An int: sample i depends on (seed, i), so that corrupting the first k gives the first k. A sequence:
        sample i depends on seed[i] alone. Random numbers are drawn on the CPU, so each device gets the same.

    Returns
    -------
    Tensor or np.ndarray
        Same kind, shape, dtype and device, in [0, 1], without gradient. Computed in float64 for float64, else
        in float32.

    Raises
    ------
    ValueError
        Unknown name, severity not an int in 1..5, a seed that is negative or not an int, a wrong number of
        seeds, images of another shape or type, or a value not finite or outside [0, 1] (naming its sample).
    """
    if name not in _FUNCTIONS:
        raise ValueError(f"unknown corruption {name!r}; there are: {', '.join(_FUNCTIONS)}")
    if isinstance(images, np.ndarray):
        array = np.ascontiguousarray(images)
        return corrupt(torch.tensor(array), name, severity, seed).numpy()
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a Tensor or a numpy array, got {type(images).__name__}")
    check_images(images)
    level = check_severity(severity)
    streams = make_streams(seed, len(images))
    size = max(1, _CHUNK_VALUES // max(1, images[:1].numel()))
    result = torch.empty_like(images, requires_grad=False)
    with torch.no_grad():
        for start in range(0, len(images), size):
            part = images[start : start + size].to(torch.promote_types(images.dtype, torch.float32))
            changed = _FUNCTIONS[name](part, level, streams[start : start + size])
            result[start : start + size] = changed.clamp(0, 1).to(images.dtype)
    return result
