"""Training augmentation of a whole batch: what one is, and random crop and horizontal flip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedtta.models.arrays import to_device


class Augmentation(Protocol):
    """Random views of images, in two steps: what is drawn at once is applied part by part, with the same bits."""

    def draw(self, generator: torch.Generator, n: int) -> Tensor:
        """Return the random numbers of n views, [n, ...] on the CPU; the generator is on the CPU."""

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return the view of each image of x [B, C, H, W] in [0, 1] that `draws` [B, ...] describes."""


@dataclass(frozen=True)
class CropFlip:
    """Shift each image by up to `padding` pixels (filled with zeros) and flip it with probability 1/2.

    The number of draws is always the same, so the crops are equal on every device and with or without flips.

    Parameters
    ----------
    padding : int
        Zeros (black) added on each side before cropping back to [H, W].
    flip : bool
        Flip horizontally; False for images that change their meaning (digits).

    Raises
    ------
    ValueError
        `padding` is negative.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding={self.padding} must be at least 0")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draw and apply: return a new tensor like x [B, C, H, W], on any device; raises as the two steps do."""
        return self.apply(x, self.draw(generator, len(x)))

    def draw(self, generator: torch.Generator, n: int) -> Tensor:
        """Return the row and the column of each crop, and whether it is flipped (0 or 1), int64 [n, 3].

        Raises
        ------
        ValueError
            The generator is not on the CPU.
        """
        if generator.device.type != "cpu":
            raise ValueError(f"the generator must be on the CPU, not on {generator.device}")
        offsets = torch.randint(2 * self.padding + 1, (2, n), generator=generator)
        flipped = torch.rand(n, generator=generator) < 0.5
        return torch.stack([*offsets, flipped.long()], 1)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """See `Augmentation`.

        Raises
        ------
        ValueError
            `x` is not [B, C, H, W].
        """
        if x.ndim != 4:
            raise ValueError(f"x must be [B, C, H, W], got {tuple(x.shape)}")
        row, column, flipped = to_device(draws, x.device).unbind(1)
        height, width = x.shape[2:]
        # All crops as a view [B, C, 2p+1, 2p+1, H, W]; one per sample is copied.
        windows = functional.pad(x, (self.padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        out = windows[torch.arange(len(x), device=x.device), :, row, column]
        return torch.where(flipped.bool()[:, None, None, None], out.flip(3), out) if self.flip else out
