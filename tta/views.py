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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedtta.models.arrays import to_device

GREY = (0.2989, 0.587, 0.114)  # ITU-R 601, as torchvision rounds it
RADIUS = 2  # pixels: half width of the 5 x 5 blur
SMALLEST_SIGMA = 0.001  # pixels
TRANSLATION = 1 / 8  # of the image


#: Samples [n, ...] and a CPU generator → one random view of each, of the same shape. It may have a method `together`,
#: see `RandomViews`.
Augment = Callable[[Tensor, Generator], Tensor]


class RandomViews(Protocol):
    """Random views of images, adjustable to a data set."""

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """Return views for images that may be mirrored or not, and of which a crop keeps at least the share `crop`."""

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image of x [n, C, H, W] in [0, 1]."""

    def together(self, x: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return what calls for G equal parts of x [G n, C, H, W], each with its generator, would return together."""


def seeded(seed: int, *key: int) -> Generator:
    """Return a CPU generator that depends on the seed and the key (position in the stream, step, ...) only."""
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


def augmented(augment: Augment, x: Tensor, *generators: Generator) -> Tensor:
    """Return a view of each of x [G n, ...], which consists of G equal parts, each with a generator of its own.

    Raises
    ------
    ValueError
        `augment` changes the shape.
    """
    together = getattr(augment, "together", None)
    parts = [x] if together else x.chunk(len(generators))
    made = [together(x, generators)] if together else list(map(augment, parts, generators))
    for views, part in zip(made, parts, strict=True):
        if views.shape != part.shape:
            raise ValueError(f"augment made {tuple(views.shape)} of a batch of shape {tuple(part.shape)}")
    return made[0] if len(made) == 1 else torch.cat(made)


def grey(x: Tensor) -> Tensor:
    """Return the luma [n, 1, H, W] of x [n, C, H, W], C = 1 or 3."""
    if x.shape[1] == 1:
        return x
    weights = to_device(torch.tensor(GREY, dtype=x.dtype), x.device)
    return (x * weights.view(1, 3, 1, 1)).sum(1, keepdim=True)


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
    weight = to_device(weight.to(x.dtype), x.device)
    centre, near, far = weight.view(-1, RADIUS + 1, 1, 1, 1).unbind(1)
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


def recolour(x: Tensor, names: Sequence[str], parameters: Tensor, order: Tensor) -> None:
    """Apply colour operations to x [n, C, H, W], in place, to each image with its own parameters in its own order.

    Parameters
    ----------
    x : Tensor [n, C, H, W]
        C = 1 or 3.
    names : sequence of str
        M keys of `COLOURS`.
    parameters : Tensor [n, M]
        Of each operation, on the CPU.
    order : Tensor [n, M]
        Which operation comes first, second, ..., on the CPU; -1: none.
    """
    used = [code for code, name in enumerate(names) if x.shape[1] == 3 or name not in COLOURED_ONLY]
    groups = [(code, torch.nonzero(place == code).flatten()) for place in order.unbind(1) for code in used]
    # All groups' indices and parameters reach the device in one copy.
    sizes = [len(index) for _, index in groups]
    factors = torch.cat([parameters[index, code] for code, index in groups]).to(x.dtype)
    indices = to_device(torch.cat([index for _, index in groups]), x.device).split(sizes)
    values = to_device(factors, x.device).view(-1, 1, 1, 1).split(sizes)
    for (code, _), index, value in zip(groups, indices, values, strict=True):
        if len(index):
            x[index] = COLOURS[names[code]][0](x[index], value)


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
        return self.together(x, [generator])

    def together(self, x: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return what calls for G equal parts of x [G n, C, H, W], each with its generator, would return together."""
        if x.ndim != 4 or x.shape[1] not in (1, 3) or not x.is_floating_point():
            kind = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"Views needs floating-point images [n, 1 or 3, H, W], got {kind}")
        parts = zip(x.chunk(len(generators)), generators, strict=True)
        drawn = [self._draw(part.shape, generator) for part, generator in parts]
        draws, noises = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        colours, order, geometry = draws.split([len(COLOURS), len(COLOURS), 6], 1)
        x = x.clamp(0, 1)
        recolour(x, list(COLOURS), self._factors(2 * colours - 1), order.argsort(1))
        if len(x):
            x = self._move(x, geometry[:, :4], geometry[:, 5])
            x = blur(x, self._sigma(geometry[:, 4])) if self.blur else x
        if self.noise:
            x.add_(to_device(noises.to(x.dtype), x.device), alpha=self.noise)
        return x.clamp_(0, 1)

    def _draw(self, shape: torch.Size, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return uniform numbers [n, DRAWS] and Gaussian noise [n, C, H, W], of no image where there is none."""
        uniform = torch.rand(shape[0], DRAWS, generator=generator, dtype=torch.float64)
        # float32 whatever the images are, so that the draws are the same.
        return uniform, torch.randn(shape if self.noise else 0, generator=generator)

    def _factors(self, signed: Tensor) -> Tensor:
        """Return the parameters of the colour operations from `signed` [n, 5] in [-1, 1)."""
        spread = signed.new_tensor([spread / 2 if self.soft else spread for _, spread in COLOURS.values()])
        return signed.new_tensor([name != "hue" for name in COLOURS]) + signed * spread

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
        grid = affine_grid(to_device(theta.to(x.dtype), x.device), shape, align_corners=True)
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
