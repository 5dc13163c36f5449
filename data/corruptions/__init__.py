"""Common corruptions: 15 of the benchmark and 4 extra ones, seeded, for whole batches on any device.

D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019, with the constants of CIFAR-10-C (make_cifar_c.py). `noise`, `blur`, `weather`, `digital` and
`spatter` hold one function per corruption; `corrupt` is the public function.

Differences from the published files: frost is procedural (no photographs); results stay floating point
where CIFAR-10-C cuts them to 8 bits; motion blur (also in snow) follows ImageMagick's definition without its
8-bit steps; affine resampling is exact where older versions of OpenCV work in steps of 1/32 pixel. Constants in
pixels are meant for 32 x 32 images and are used as they are for other sizes (`elastic_transform` scales with
the side, as its constants are published).

With these constants a higher severity does not always mean a larger distance from the clean image: `elastic_transform`
moves less at higher severity, `frost` darkens the image as the ice grows, `glass_blur` trades blur for rounds,
`spatter` turns from water to mud at 4 and `saturate` from grey to garish at 3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedtta.data.corruptions import blur, digital, noise, spatter, weather
from fedtta.data.corruptions._ops import Generators

_FUNCTIONS: dict[str, Callable[[Tensor, int, Generators], Tensor]] = {
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
    "spatter": spatter.spatter,
    "saturate": digital.saturate,
}

#: The 15 corruptions of CIFAR-10-C, in its order.
CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)[:15]
#: The 4 extra corruptions, held out for tuning.
EXTRA_CORRUPTIONS: tuple[str, ...] = tuple(_FUNCTIONS)[15:]

#: Values processed at a time: bounds memory use and fits a CPU's caches.
_CHUNK_VALUES = 2**20
#: Smallest accepted height and width: below it the kernels are wider than the image.
_MIN_SIDE = 8

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
        [B, C, H, W], floating point in [0, 1], C 1 or 3, H and W at least 8; B may be 0. Not changed.
    name : str
        One of `CORRUPTIONS` or `EXTRA_CORRUPTIONS`.
    severity : int
        1 (light) to 5 (heavy).
    seed : int or sequence of int
        An int: sample i depends on (seed, i), so corrupting the first k images gives the first k results. A sequence:
        sample i depends on seed[i] only. Random numbers are drawn on the CPU and are equal on all devices.

    Returns
    -------
    Tensor or np.ndarray
        Same type, shape, dtype and device, in [0, 1], without gradient; computed in float64 for float64, else in
        float32.

    Raises
    ------
    ValueError
        Unknown name, severity not an int in 1..5, a seed that is negative or not an int, a wrong number of seeds,
        images of another shape or type, or a value that is not finite or outside [0, 1] (the sample is named).
    """
    if name not in _FUNCTIONS:
        raise ValueError(f"unknown corruption {name!r}; there are: {', '.join(_FUNCTIONS)}")
    if isinstance(images, np.ndarray):
        array = np.ascontiguousarray(images)
        return corrupt(torch.tensor(array), name, severity, seed).numpy()
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a Tensor or a numpy array, got {type(images).__name__}")
    _check_images(images)
    level = _check_severity(severity)
    rngs = sample_generators(seed, len(images))
    size = max(1, _CHUNK_VALUES // max(1, images[:1].numel()))
    result = torch.empty_like(images, requires_grad=False)
    with torch.no_grad():
        for start in range(0, len(images), size):
            part = images[start : start + size].to(torch.promote_types(images.dtype, torch.float32))
            changed = _FUNCTIONS[name](part, level, rngs[start : start + size])
            result[start : start + size] = changed.clamp(0, 1).to(images.dtype)
    return result


def sample_generators(seed: int | Sequence[int], count: int) -> list[np.random.Generator]:
    """Return one generator per sample.

    Parameters
    ----------
    seed : int or sequence of int
        An int: the generator of sample i depends on (seed, i). A sequence: it depends on seed[i] only.
    count : int
        Number of samples.

    Raises
    ------
    ValueError
        A seed is negative or not an integer, or the sequence does not have `count` entries.
    """
    if np.ndim(seed) == 0:
        root = _checked_seed(seed)
        sequences = [np.random.SeedSequence(root, spawn_key=(i,)) for i in range(count)]
    else:
        seeds = [_checked_seed(one) for one in seed]  # type: ignore[union-attr]
        if len(seeds) != count:
            raise ValueError(f"{len(seeds)} seeds for {count} images: give one per image, or a single int")
        sequences = [np.random.SeedSequence(one) for one in seeds]
    return [np.random.Generator(np.random.PCG64(sequence)) for sequence in sequences]


def _checked_seed(seed: object) -> int:
    """Return a seed as an int >= 0 (numpy and torch integers are allowed, bools are not)."""
    value = None if _is_bool(seed) else _as_int(seed)
    if value is None or value < 0:
        raise ValueError(f"seed must be an int >= 0 or a sequence of them, got {seed!r}")
    return value


def _check_severity(severity: object) -> int:
    """Return the severity as an int in 1..5 or raise ValueError (also for bools and floats)."""
    value = None if _is_bool(severity) else _as_int(severity)
    if value is None or not 1 <= value <= 5:
        raise ValueError(f"severity must be an int in 1..5, got {severity!r}")
    return value


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def _as_int(value: object) -> int | None:
    """Return an integer of any library as an int, or None for other values."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _check_images(images: Tensor) -> None:
    """Raise ValueError unless `images` is [B, 1 or 3, H, W] float, H, W >= 8, finite and in [0, 1].

    The error for a value that is out of range or not finite names the index of its sample.
    """
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point in [0, 1], got dtype {images.dtype}")
    if images.ndim != 4:
        raise ValueError(f"images must be [B, C, H, W], got shape {tuple(images.shape)}")
    _, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {channels}")
    if min(height, width) < _MIN_SIDE:
        raise ValueError(f"images must be at least {_MIN_SIDE} x {_MIN_SIDE}, got {height} x {width}")
    finite = torch.isfinite(images).flatten(1).all(dim=1)  # (B,)
    inside = ((images >= 0) & (images <= 1)).flatten(1).all(dim=1)  # (B,)
    for good, problem in ((finite, "a value that is not finite"), (inside, "a value outside [0, 1]")):
        if not bool(good.all()):
            raise ValueError(f"sample {int((~good).nonzero()[0])} has {problem}")
