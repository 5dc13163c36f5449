"""Random views of an image: colour jitter, affine map, blur, flip and noise.

They are the test-time views of CoTTA (Wang et al., CVPR 2022), from KATANA (Cohen and Giryes, 2021), that RoTTA
(CVPR 2023), TRIBE (AAAI 2024) and, without blur and noise and with reflection, ROID (WACV 2024) use too:

    clip → brightness, contrast, saturation, hue and gamma in random order → rotate, scale, translate → blur → flip
    → noise → clip

Colours follow torchvision (hue turns in HSV space, in units of the full circle). The affine map is the published one,
which pads the image by half of itself on each side first: whole pixels of translation, up to 1/16 of the padded image,
an eighth of the image itself (4 pixels of 32), and enough margin that nothing black comes in.

Deviations. Every image has its own parameters and its own order of the colour operations; the published code draws one
set for a batch. Gamma maps 0 to 0 (there: 1e-8 first). Images need not be square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample

GREY = (0.2989, 0.587, 0.114)  # ITU-R 601, as torchvision rounds it
RADIUS = 2  # pixels: half width of the 5 x 5 blur
SMALLEST_SIGMA = 0.001  # pixels
TRANSLATION = 1 / 8  # of the image


#: Samples [n, ...] and a CPU generator → one random view of each, of the same shape.
Augment = Callable[[Tensor, Generator], Tensor]


class RandomViews(Protocol):
    """Random views of images, adjustable to a data set."""

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """Return views for images that may be mirrored or not, and of which a crop keeps at least the share `crop`."""

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image of x [n, C, H, W] in [0, 1]."""


def seeded(seed: int, *key: int) -> Generator:
    """Return a CPU generator that depends on the seed and the key (position in the stream, step, ...) only."""
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


def augmented(augment: Augment, x: Tensor, generator: Generator) -> Tensor:
    """Return a view of each of x [n, ...]; raise ValueError if `augment` changes the shape."""
    views = augment(x, generator)
    if views.shape != x.shape:
        raise ValueError(f"augment made {tuple(views.shape)} of a batch of shape {tuple(x.shape)}")
    return views


def grey(x: Tensor) -> Tensor:
    """Return the luma [n, 1, H, W] of x [n, C, H, W], C = 1 or 3."""
    if x.shape[1] == 1:
        return x
    return (x * x.new_tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x [n, C, H, W] by `factor` [n, 1, 1, 1], within [0, 1]."""
    return (x * factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance of x [n, C, H, W] from the image's mean luma by `factor` [n, 1, 1, 1], within [0, 1]."""
    return torch.lerp(grey(x).mean((2, 3), keepdim=True), x, factor).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance of x [n, 3, H, W] from its luma by `factor` [n, 1, 1, 1], within [0, 1]."""
    return torch.lerp(grey(x), x, factor).clamp_(0, 1)


def hue(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of x [n, 3, H, W] in [0, 1] by `turn` [n, 1, 1, 1] circles; value and chroma stay."""
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)  # [n, H, W]
    chroma = value - low
    is_red, is_green = value == red, value == green
    # Sixths of a circle from red: red → yellow → green → ... . Grey pixels have no hue and no chroma: any will do.
    side = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    angle = side / torch.where(chroma > 0, chroma, 1)
    angle += torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0)) + 6 * turn.squeeze(1)
    angle -= 6 * (angle / 6).floor()
    shares = ((angle - 3).abs_() - 1, 2 - (angle - 2).abs_(), 2 - (angle - 4).abs_())
    return torch.stack([low + chroma * share.clamp_(0, 1) for share in shares], 1)


def gamma(x: Tensor, exponent: Tensor) -> Tensor:
    """Raise x [n, C, H, W] in [0, 1] to the power `exponent` [n, 1, 1, 1]."""
    return x**exponent


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur x [n, C, H + 4, W + 4] with a 5 x 5 Gaussian of `sigma` [n] pixels, above 0; returns [n, C, H, W]."""
    taps = torch.arange(RADIUS + 1, dtype=torch.float64)
    weight = torch.exp(-0.5 * (taps / sigma.double().cpu().view(-1, 1)) ** 2)  # [n, RADIUS + 1]
    weight = weight / (2 * weight.sum(1, keepdim=True) - weight[:, :1])
    centre, near, far = weight.to(x).view(-1, RADIUS + 1, 1, 1, 1).unbind(1)
    for dim in (2, 3):
        size = x.shape[dim] - 2 * RADIUS
        part = [x.narrow(dim, shift, size) for shift in range(2 * RADIUS + 1)]
        x = (part[2] * centre).addcmul_(part[1] + part[3], near).addcmul_(part[0] + part[4], far)
    return x


#: The colour operations, and the spread of their parameter: 1 ± it; hue: ± it, in circles.
COLOURS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "brightness": (brightness, 0.4),
    "contrast": (contrast, 0.3),
    "saturation": (saturation, 0.5),
    "hue": (hue, 0.06),
    "gamma": (gamma, 0.3),
}
COLOURED_ONLY = ("saturation", "hue")  # a grey image stays as it is
#: Uniform numbers that describe a view: each colour's parameter, their order, angle, translation 2, scale, blur, flip.
DRAWS = 2 * len(COLOURS) + 6


@dataclass(frozen=True)
class Views:
    """Make one random view of each image: `views(x, generator) -> views`.

    Parameters
    ----------
    soft : bool
        Halve the ranges: rotation ±8° instead of ±15°, scale 0.95 to 1.05 instead of 0.9 to 1.1, blur up to 0.25
        pixels instead of 0.5, colours half as far.
    flip : bool
        Mirror every second view (switch off where left and right matter, as for digits).
    blur : bool
        Blur a little: σ between 0.001 and 0.5 pixels.
    noise : float
        Standard deviation of the Gaussian noise, 0 or more; 0 draws none.
    padding : str
        What comes in from outside: "border", the nearest pixel of the border, or "reflection", the image mirrored.

    Raises
    ------
    ValueError
        `noise` is negative or not finite, or `padding` is unknown.
    """

    soft: bool = False
    flip: bool = True
    blur: bool = True
    noise: float = 0.005
    padding: Literal["border", "reflection"] = "border"

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise={self.noise} must be a finite number, 0 or more")
        if self.padding not in ("border", "reflection"):
            raise ValueError(f"unknown padding={self.padding!r}; there are: border, reflection")

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """See `RandomViews`; nothing is cropped."""
        return cls(flip=flip)

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image; what is drawn depends on the generator and the shape only.

        Parameters
        ----------
        x : Tensor [n, C, H, W]
            Floating-point images in [0, 1], C = 1 or 3; n may be 0.
        generator : Generator
            On the CPU.

        Returns
        -------
        Tensor [n, C, H, W]
            Views in [0, 1], dtype and device of `x`.

        Raises
        ------
        ValueError
            `x` holds no such images.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3) or not x.is_floating_point():
            kind = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"Views needs floating-point images [n, 1 or 3, H, W], got {kind}")
        draws = torch.rand(len(x), DRAWS, generator=generator, dtype=torch.float64)
        # float32 whatever the images are, so that the draws are the same.
        noise = torch.randn(x.shape, generator=generator) if self.noise else None
        colours, order, geometry = draws.split([len(COLOURS), len(COLOURS), 6], 1)
        x = self._recolour(x.clamp(0, 1), 2 * colours - 1, order.argsort(1))
        if len(x):
            x = self._move(x, geometry[:, :4], geometry[:, 5])
            x = blur(x, self._sigma(geometry[:, 4])) if self.blur else x
        if noise is not None:
            x.add_(noise.to(x), alpha=self.noise)
        return x.clamp_(0, 1)

    def _recolour(self, x: Tensor, signed: Tensor, order: Tensor) -> Tensor:
        """Apply the colour operations to x [n, C, H, W], in place, with parameters from `signed` [n, 5] in [-1, 1)."""
        for position in range(len(COLOURS)):
            for code, (name, (function, spread)) in enumerate(COLOURS.items()):
                index = torch.nonzero(order[:, position] == code).flatten()
                if len(index) == 0 or (x.shape[1] == 1 and name in COLOURED_ONLY):
                    continue
                parameter = (name != "hue") + signed[index, code] * (spread / 2 if self.soft else spread)
                index = index.to(x.device)
                x[index] = function(x[index], parameter.to(x).view(-1, 1, 1, 1))
        return x

    def _move(self, x: Tensor, uniform: Tensor, flip: Tensor) -> Tensor:
        """Rotate, scale, translate and mirror x [n, C, H, W], with a margin for the blur around it."""
        margin = RADIUS if self.blur else 0
        height, width = x.shape[2:]
        size = torch.tensor([width, height], dtype=uniform.dtype)
        angle, scale, shift = self._affine(uniform, size)
        cos, sin = angle.cos() / scale, angle.sin() / scale
        # From output to input pixels, both measured from the centre: A (p - shift); mirrored: p has its x negated.
        matrix = torch.stack([cos, sin, -sin, cos], 1).view(-1, 2, 2)
        moved = -(matrix @ shift.unsqueeze(2))  # [n, 2, 1]
        matrix[flip < 0.5, :, 0] *= -1 if self.flip else 1
        # Corners are pixel centres: "reflection" then mirrors without repeating the border, as padding does.
        half_out, half_in = (size + 2 * margin - 1) / 2, (size - 1).clamp_min(1) / 2
        theta = torch.cat([matrix * half_out, moved], 2) / half_in.view(2, 1)
        shape = [len(x), x.shape[1], height + 2 * margin, width + 2 * margin]
        grid = affine_grid(theta.to(x), shape, align_corners=True)
        return grid_sample(x, grid, mode="bilinear", padding_mode=self.padding, align_corners=True)

    def _affine(self, uniform: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return angle [n] in radians, scale [n] and translation [n, 2] in whole pixels (x, y)."""
        degrees, spread = (8, 0.05) if self.soft else (15, 0.1)
        angle, scale = (2 * uniform[:, :2] - 1).unbind(1)
        shift = ((2 * uniform[:, 2:] - 1) * TRANSLATION * size).round()
        return angle * math.radians(degrees), 1 + scale * spread, shift

    def _sigma(self, uniform: Tensor) -> Tensor:
        """Return the blur's σ [n] in pixels."""
        return SMALLEST_SIGMA + uniform * ((0.25 if self.soft else 0.5) - SMALLEST_SIGMA)
