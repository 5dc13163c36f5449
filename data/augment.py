"""Training augmentation: random crop and horizontal flip of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedtta.models.arrays import to_device


def crop_flip(x: Tensor, generator: torch.Generator, padding: int = 4, flip: bool = True) -> Tensor:
    """Shift each image by up to `padding` pixels (filled with zeros) and flip it with probability 1/2.

    The draws come from a CPU generator and their number is always the same, so the crops are equal on every device and
    with or without flips.

    Parameters
    ----------
    x : Tensor [B, C, H, W]
        Images in [0, 1], on any device.
    generator : torch.Generator
        On the CPU.
    padding : int
        Zeros (black) added on each side before cropping back to [H, W].
    flip : bool
        Flip horizontally; False for images that change their meaning (digits).

    Returns
    -------
    Tensor [B, C, H, W]
        A new tensor; `x` is unchanged.

    Raises
    ------
    ValueError
        `x` is not [B, C, H, W], `padding` is negative, or the generator is not on the CPU.
    """
    if x.ndim != 4 or padding < 0:
        raise ValueError(f"x must be [B, C, H, W], got {tuple(x.shape)}, and padding={padding} at least 0")
    if generator.device.type != "cpu":
        raise ValueError(f"the generator must be on the CPU, not on {generator.device}")
    count, _, height, width = x.shape
    offsets = to_device(torch.randint(2 * padding + 1, (2, count), generator=generator), x.device)
    flipped = to_device(torch.rand(count, generator=generator) < 0.5, x.device)
    # All crops as a view [B, C, 2p+1, 2p+1, H, W]; one per sample is copied.
    windows = functional.pad(x, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    out = windows[torch.arange(count, device=x.device), :, offsets[0], offsets[1]]
    return torch.where(flipped[:, None, None, None], out.flip(3), out) if flip else out
