"""What every corruption shares: checked input, one random stream a sample, luminance."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

#: One generator a sample, in the order of the batch.
Streams = Sequence[np.random.Generator]
#: Smallest height and width accepted: below it the kernels are wider than the image.
MIN_SIDE = 8
#: Weights of red, green and blue in the luminance (ITU-R BT.601).
LUMINANCE = (0.299, 0.587, 0.114)


def make_streams(seed: int | Sequence[int], count: int) -> list[np.random.Generator]:
    """Return one generator for each of `count` samples.

    Parameters
    ----------
    seed : int or sequence of int
        An int: sample i draws from the stream of (seed, i). A sequence: sample i draws from the
        stream of seed[i] alone, wherever in the batch it stands.
    count : int
        Number of samples.

    Raises
    ------
    ValueError
        If a seed is negative or not an integer, or a sequence has not `count` entries.
    """
    if np.ndim(seed) == 0:
        root = _checked_seed(seed)
        sequences = [np.random.SeedSequence(root, spawn_key=(i,)) for i in range(count)]
    else:
        seeds = [_checked_seed(one) for one in seed]  # type: ignore[union-attr]
        if len(seeds) != count:
            raise ValueError(f"{len(seeds)} seeds for {count} images: give one for each, or a single int")
        sequences = [np.random.SeedSequence(one) for one in seeds]
    return [np.random.Generator(np.random.PCG64(sequence)) for sequence in sequences]


def _checked_seed(seed: object) -> int:
    """Return a seed as an int >= 0 (numpy and torch integers are welcome, bools are not)."""
    value = None if _is_bool(seed) else _as_int(seed)
    if value is None or value < 0:
        raise ValueError(f"seed must be an int >= 0 or a sequence of them, got {seed!r}")
    return value


def check_severity(severity: object) -> int:
    """Return the severity as an int in 1..5 or raise ValueError; bools and floats are refused."""
    value = None if _is_bool(severity) else _as_int(severity)
    if value is None or not 1 <= value <= 5:
        raise ValueError(f"severity must be an int in 1..5, got {severity!r}")
    return value


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def _as_int(value: object) -> int | None:
    """Return an integer of any library as an int, None for everything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_images(images: Tensor) -> None:
    """Raise ValueError unless `images` is [B, 1 or 3, H, W] float, H, W >= 8, finite and in [0, 1].

    A value that is out of range or not finite is reported with the index of its sample.
    """
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point in [0, 1], got dtype {images.dtype}")
    if images.ndim != 4:
        raise ValueError(f"images must be [B, C, H, W], got shape {tuple(images.shape)}")
    _, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images must have 1 or 3 channels, got {channels}")
    if min(height, width) < MIN_SIDE:
        raise ValueError(f"images must be at least {MIN_SIDE} x {MIN_SIDE}, got {height} x {width}")
    finite = torch.isfinite(images).flatten(1).all(dim=1)  # (B,)
    inside = ((images >= 0) & (images <= 1)).flatten(1).all(dim=1)  # (B,)
    for good, problem in ((finite, "a value that is not finite"), (inside, "a value outside [0, 1]")):
        if not bool(good.all()):
            raise ValueError(f"sample {int((~good).nonzero()[0])} has {problem}")


def draw(streams: Streams, like: Tensor, sample: Callable[[np.random.Generator], np.ndarray]) -> Tensor:
    """Draw once from every stream, always on the CPU and in float64, so that every device gets the same.

    Returns the draws stacked to [B, ...] with the dtype and on the device of `like`.
    """
    return torch.from_numpy(np.stack([sample(stream) for stream in streams])).to(like)


def luminance(images: Tensor) -> Tensor:
    """Return the BT.601 luminance [B, 1, H, W] of RGB images; grey ones are their own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = LUMINANCE
    return red * images[:, 0:1] + green * images[:, 1:2] + blue * images[:, 2:3]


def colour_like(colour: tuple[float, float, float], images: Tensor) -> Tensor:
    """Return an RGB colour as [1, C, 1, 1] for the channels of `images` (its luminance for grey ones)."""
    rgb = torch.tensor(colour, dtype=torch.float64).to(images).reshape(1, 3, 1, 1)
    return rgb if images.shape[1] == 3 else luminance(rgb)
