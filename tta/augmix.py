"""Random views of an image: crop, flip and AugMix, as MEMO uses them for CIFAR.

AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty (Hendrycks et al., ICLR 2020),
with the operations, levels and mixing of MEMO: Test Time Robustness via Adaptation and Augmentation (Zhang et
al., NeurIPS 2022).

    v = m x' + (1 - m) Σ_i w_i chain_i(x'),   w ~ Dir(1, 1, 1),   m ~ Beta(1, 1),   x' = flip(crop(pad(x)))

An integer parameter (degrees, pixels, levels, bits) is rounded down, as there; at severity 1 most
translations are therefore by 0 pixels and posterize always keeps 4 bits. Geometric operations interpolate
bilinearly.

Deviations. Images stay floating point between operations; the ones defined on 8-bit levels (equalize,
solarize, posterize) round to the nearest level, so on 8-bit images they equal Pillow's, and the others equal
Pillow's up to its rounding. What comes in from outside is mid-grey in every channel (MEMO passes Pillow a
bare 128, which is mid-grey for grey images but dark red for coloured ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from fedtta.models.arrays import to_device

WIDTH = 3  # chains that are mixed
DEPTH = 3  # most operations in a chain
#: Uniform numbers that describe one view: crop 2, flip 1, m 1, w and length a chain, 3 an operation.
DRAWS = 4 + 2 * WIDTH + 3 * WIDTH * DEPTH


def levels_of_8bit(x: Tensor) -> Tensor:
    """Return the nearest of the levels 0..255 for values in [0, 1], still floating point."""
    return (x * 255).round()


def autocontrast(x: Tensor) -> Tensor:
    """Stretch every channel of x [N, C, H, W] to [0, 1]; a constant channel stays as it is."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1), x).clamp(0, 1)


def equalize(x: Tensor) -> Tensor:
    """Equalise the 256-bin histogram of every channel of x [N, C, H, W], by Pillow's integer rule.

    With the bin counts h and the last occupied bin L: step = (Σ h - h_L) // 255, level i becomes
    (step // 2 + Σ_{j<i} h_j) // step, at most 255. A channel with step 0 (nearly constant) stays as it is.
    """
    level = levels_of_8bit(x).long().flatten(2)  # [N, C, HW]
    counts = level.new_zeros(*level.shape[:2], 256).scatter_add_(2, level, torch.ones_like(level))
    last = counts.gather(2, level.amax(2, keepdim=True))  # [N, C, 1]
    step = (level.shape[2] - last) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp_min(1)  # [N, C, 256]
    mapped = table.clamp_max_(255).gather(2, level).to(x.dtype) / 255
    return torch.where(step > 0, mapped, x.flatten(2)).view_as(x)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels of x [N, C, H, W] whose 8-bit level is at least `threshold` [N]."""
    return torch.where(levels_of_8bit(x) < threshold.view(-1, 1, 1, 1), x, 1 - x)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` [N], each in 0..8, of the 8-bit levels of x [N, C, H, W]."""
    width = torch.exp2(8 - bits).view(-1, 1, 1, 1)
    return (levels_of_8bit(x) / width).floor() * width / 255


def affine(x: Tensor, matrix: Tensor, fill: float) -> Tensor:
    """Resample x [N, C, H, W] bilinearly under one affine map an image.

    Parameters
    ----------
    x : Tensor [N, C, H, W]
        Images.
    matrix : Tensor [N, 2, 3]
        On the CPU. Maps output to input positions in pixels from the centre of the image, (x, y) order, as Pillow's
        `Image.transform` does from the corner.
    fill : float
        Value of pixels that come from outside; inside, the border pixel continues to the image's edge.
    """
    height, width = x.shape[2:]
    ratio = height / width  # affine_grid measures in half widths and half heights
    scale = matrix.new_tensor([[1, ratio, 2 / width], [1 / ratio, 1, 2 / height]])
    maps = to_device((matrix * scale).to(x.dtype), x.device)
    grid = affine_grid(maps, list(x.shape), align_corners=False)  # [N, H, W, 2]
    moved = grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (grid.abs().amax(3) <= 1).unsqueeze(1)
    return torch.where(inside, moved, fill)


#: Operations on positions; at level 10: 30° of rotation, 0.3 of shear, a third of the size of translation.
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
#: Operations on values, given images [N, C, H, W] and their levels [N] on the CPU.
PHOTOMETRIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda x, level: autocontrast(x),
    "equalize": lambda x, level: equalize(x),
    "solarize": lambda x, level: solarize(x, _beside(x, 256 - (level * 256 / 10).floor())),
    "posterize": lambda x, level: posterize(x, _beside(x, 4 - (level * 4 / 10).floor())),
}
OPERATIONS = (*GEOMETRIC, *PHOTOMETRIC)


@dataclass(frozen=True)
class Plan:
    """The operations of n views: decoded draws, on the CPU; operations in OPERATIONS' order, -1 for none."""

    corner: Tensor  # [n, 2], crop's upper left corner in the padded image (row, column)
    flip: Tensor  # [n]
    mix: Tensor  # [n], m
    weights: Tensor  # [n, WIDTH], w
    operation: Tensor  # [n * WIDTH, DEPTH]
    level: Tensor  # [n * WIDTH, DEPTH]
    sign: Tensor  # [n * WIDTH, DEPTH], -1 or 1


class AugMix:
    """Views of images, all views and chains at once, on whatever device the images are.

    `augment(x, generator)` draws and applies; `draw` and `apply` do it in two steps, so that the views of
    many samples, each with its own generator, are made in one call.

    Parameters
    ----------
    flip : bool
        Mirror every second view (switch off where left and right matter, as for digits).
    padding : int
        Pixels of black added on each side before the random crop.
    severity : float
        Upper end of an operation's level ~ U(0.1, severity), in (0.1, 10]. A unit of it is 3° of rotation,
        0.03 of shear, 1/30 of the size of translation, 25.6 levels under 256 (solarize), 0.4 under 4 bits.
    fill : float
        What geometric operations bring in from outside, in [0, 1].
    """

    def __init__(self, flip: bool = True, padding: int = 4, severity: float = 1.0, fill: float = 128 / 255) -> None:
        if not 0.1 < severity <= 10:
            raise ValueError(f"severity={severity} must be in (0.1, 10]")
        if padding < 0 or not 0 <= fill <= 1:
            raise ValueError(f"padding={padding} must be at least 0 and fill={fill} in [0, 1]")
        self.flip = flip
        self.padding = padding
        self.severity = severity
        self.fill = fill

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """See `fedtta.tta.views.RandomViews`; the crop shifts the image and keeps its size."""
        return cls(flip=flip)

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image x [V, C, H, W] in [0, 1], drawn independently (CPU generator)."""
        return self.together(x, [generator])

    def together(self, x: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return what calls for G equal parts of x [G n, C, H, W], each with its generator, would return together."""
        parts = zip(x.chunk(len(generators)), generators, strict=True)
        return self.apply(x, torch.cat([self.draw(generator, len(part)) for part, generator in parts]))

    def draw(self, generator: Generator, n: int) -> Tensor:
        """Return the random numbers of n views: uniform [n, DRAWS], float64, CPU; rows can be concatenated."""
        return torch.rand(n, DRAWS, generator=generator, dtype=torch.float64)

    def plan(self, draws: Tensor) -> Plan:
        """Decode `draws` [n, DRAWS] into a plan."""
        sizes = [2, 1, 1, WIDTH, WIDTH] + 3 * [WIDTH * DEPTH]
        corner, flip, mix, weights, length, operation, level, sign = draws.split(sizes, 1)
        exponential = -torch.log1p(-weights)  # Dir(1, 1, 1): exponentials over their sum
        present = torch.arange(DEPTH) <= _integer(length, DEPTH).view(-1, 1)  # chain lengths 1..DEPTH
        return Plan(
            corner=_integer(corner, 2 * self.padding + 1),
            flip=(flip[:, 0] < 0.5) & self.flip,
            mix=mix[:, 0],
            weights=exponential / exponential.sum(1, keepdim=True),
            operation=torch.where(present, _integer(operation, len(OPERATIONS)).view(-1, DEPTH), -1),
            level=(0.1 + (self.severity - 0.1) * level).view(-1, DEPTH),
            sign=torch.where(sign < 0.5, -1.0, 1.0).to(draws.dtype).view(-1, DEPTH),
        )

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Make the views that `draws` describe.

        Parameters
        ----------
        x : Tensor [n, C, H, W]
            Floating-point images in [0, 1].
        draws : Tensor [n, DRAWS]
            Rows of `draw`.

        Returns
        -------
        Tensor [n, C, H, W]
            Views in [0, 1], dtype and device of `x`.

        Raises
        ------
        ValueError
            `x` holds no images, or not as many as there are rows of draws.
        """
        if x.ndim != 4:
            raise ValueError(f"AugMix makes views of images [n, C, H, W], got the shape {tuple(x.shape)}")
        if draws.shape != (len(x), DRAWS):
            raise ValueError(f"{len(x)} images need draws {(len(x), DRAWS)}, got {tuple(draws.shape)}")
        plan = self.plan(draws)
        x = self._crop_and_flip(x, plan)
        chains = x.repeat_interleave(WIDTH, 0)  # [n * WIDTH, C, H, W]
        for depth in range(DEPTH):
            self._operate(chains, plan.operation[:, depth], plan.level[:, depth], plan.sign[:, depth])
        mix = _beside(x, plan.mix).view(-1, 1, 1, 1)
        weights = _beside(x, (1 - plan.mix)[:, None] * plan.weights)  # [n, WIDTH]
        mixed = torch.einsum("nk,nkchw->nchw", weights, chains.view(len(x), WIDTH, *x.shape[1:]))
        return mixed.addcmul_(mix, x).clamp_(0, 1)

    def _crop_and_flip(self, x: Tensor, plan: Plan) -> Tensor:
        """Return x [n, C, H, W] cropped out of its padded self and mirrored, as planned."""
        n, _, height, width = x.shape
        windows = pad(x, 4 * [self.padding]).unfold(2, height, 1).unfold(3, width, 1)
        row, column = to_device(plan.corner, x.device).unbind(1)
        x = windows[torch.arange(n, device=x.device), :, row, column]  # [n, C, H, W]
        return torch.where(to_device(plan.flip, x.device).view(-1, 1, 1, 1), x.flip(3), x)

    def _operate(self, x: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> None:
        """Apply to each image of x [n, C, H, W], in place, its operation at its level and sign, all [n]."""
        matrix = self._matrices(operation, level, sign, x.shape[2], x.shape[3])
        moves = (matrix != torch.eye(2, 3, dtype=matrix.dtype)).flatten(1).any(1)
        if bool(moves.any()):
            index = to_device(torch.nonzero(moves).flatten(), x.device)
            x[index] = affine(x[index], matrix[moves].to(x.dtype), self.fill)
        for name, function in PHOTOMETRIC.items():
            chosen = operation == OPERATIONS.index(name)
            if bool(chosen.any()):
                index = to_device(torch.nonzero(chosen).flatten(), x.device)
                x[index] = function(x[index], level[chosen])

    @staticmethod
    def _matrices(operation: Tensor, level: Tensor, sign: Tensor, height: int, width: int) -> Tensor:
        """Return the maps [n, 2, 3] that `affine` takes; of other operations, the identity."""
        is_rotate, is_shear_x, is_shear_y, is_move_x, is_move_y = (
            operation == OPERATIONS.index(name) for name in GEOMETRIC
        )
        angle = torch.where(is_rotate, sign * (level * 30 / 10).floor(), 0) * (math.pi / 180)
        shear_x = torch.where(is_shear_x, sign * level * 0.3 / 10, 0)
        shear_y = torch.where(is_shear_y, sign * level * 0.3 / 10, 0)
        move_x = torch.where(is_move_x, sign * (level * (width / 3) / 10).floor(), 0)
        move_y = torch.where(is_move_y, sign * (level * (height / 3) / 10).floor(), 0)
        # Pillow shears about the upper left corner: measured from the centre, that adds half an image.
        rows = [angle.cos(), shear_x - angle.sin(), move_x + shear_x * (height / 2)]
        rows += [shear_y + angle.sin(), angle.cos(), move_y + shear_y * (width / 2)]
        return torch.stack(rows, 1).view(-1, 2, 3)


def _beside(x: Tensor, values: Tensor) -> Tensor:
    """Return `values`, which are on the CPU, in the dtype and on the device of x."""
    return to_device(values.to(x.dtype), x.device)


def _integer(uniform: Tensor, n: int) -> Tensor:
    """Return integers 0..n-1 from uniform numbers in [0, 1)."""
    return (uniform * n).long().clamp_max_(n - 1)
