"""Contrastive learning: supervised and self-supervised losses on features, and the random views they compare.

Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning (Tan, Chen, Zhuang, Dong, Lyu, Long, 2023;
FedICON), eq. 2 and 5:

    L_sup = mean_x  -1/|P(x)| Σ_{p ∈ P(x)} ln( exp(z_x·z_p/τ) / Σ_{a ∈ A(x)} exp(z_x·z_a/τ) )

    L_us = mean_x  -ln( exp(z_x·z'_x/τ) / Σ_{a ∈ A(x)} exp(z_x·z_a/τ) )

x runs over the rows of a batch of views (the anchors), A(x) are all its other rows, P(x) those with x's label, z'_x is
the other view of x's image. They are L_out of Supervised Contrastive Learning (Khosla et al., NeurIPS 2020, eq. 2) and
NT-Xent of SimCLR (Chen et al., ICML 2020). Eq. 5 is eq. 2 where every image is a class of its own; that is how it is
computed.

Decisions and deviations:

- The paper prints sums over a data set, with A(x) all of it; computed is a mean over a batch, A(x) the rest of it.
- The paper generates "two random augmented views for each sample" and does not say how. `ContrastiveViews` are those of
  Khosla et al. as published for CIFAR; but for the smallest crop they are SimCLR's (appendix B.9; there from 8 % of the
  area), with colour strength s = 0.5 and without blur, as for small images. Every step is torchvision's
  (RandomResizedCrop, RandomHorizontalFlip, ColorJitter, RandomGrayscale), with its own parameters for each image.
- z is divided by its length here, as in both sources. A row shorter than 1e-19 (float32) has no direction: its products
  with every row are 0, and it gets no gradient.
- An anchor without a positive is left out, and the mean runs over those that have one; where no anchor has one the loss
  is 0. With two views of each image there is always one.
- The published code of Khosla et al., and of FedICON's authors (COALA), multiplies the loss by τ/τ_base, τ_base = 0.07
  whatever τ is: `base_temperature`. By default there is no such factor, as in eq. 2.
- The paper does not tell τ. COALA takes 0.1 for both losses. Without labels 0.5 is SimCLR's for CIFAR-10. With labels
  0.1 is Khosla et al.'s; with 0.5 the encoder learns several times more slowly (Digit-5, two rounds, a linear probe on
  validation images: 70.6 % right against 84.5 %; 0.05: 85.8, 0.2: 83.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import grid_sample

from fedtta.models.arrays import to_device
from fedtta.tta.checks import check_number
from fedtta.tta.views import grey, recolour

#: The colour operations of the jitter, and the spread of their parameter at strength 1.
JITTER = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
TRIES = 10  # boxes that are drawn before the middle of the image is taken
#: Uniform numbers that describe a view: area and ratio of each box, position 2, mirror, jitter, colours, order, grey.
DRAWS = 2 * TRIES + 2 + 1 + 1 + 2 * len(JITTER) + 1


def supervised_contrastive(
    z: Tensor, labels: Tensor, temperature: float = 0.1, base_temperature: float | None = None
) -> Tensor:
    """Return L_sup (see the module), a scalar of the dtype of `z`, 0 or more.

    Parameters
    ----------
    z : Tensor [n, d]
        Features of n views, floating point, of any length; n = 2B where each of B images has two.
    labels : Tensor [n]
        Integer labels of the rows.
    temperature : float
        τ, finite, above 0.
    base_temperature : float or None
        τ_base, finite, above 0; None: τ, a factor of 1.

    Raises
    ------
    ValueError
        A temperature is out of range, or a shape or type is another.
    """
    check_number("temperature", temperature, 0, math.inf, open_low=True)
    if base_temperature is not None:
        check_number("base_temperature", base_temperature, 0, math.inf, open_low=True)
    if z.ndim != 2 or not z.is_floating_point():
        raise ValueError(f"z must be floating-point features [n, d], got {z.dtype} of shape {tuple(z.shape)}")
    if labels.shape != z.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be {len(z)} integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    direction = unit(z)
    if len(z) < 2:
        return (direction * 0).sum()  # 0, with a gradient, which is 0 too
    positive = (labels[:, None] == labels[None]).fill_diagonal_(False)  # [n, n], P(x)
    products = direction @ direction.T / temperature  # [n, n]
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    log_p = products - products.masked_fill(itself, -math.inf).logsumexp(1, keepdim=True)
    losses = log_p.masked_fill(~positive, 0).sum(1) / positive.sum(1).clamp(min=1)  # [n]; 0 without a positive
    loss = -(losses.sum() / positive.any(1).sum().clamp(min=1))
    return loss if base_temperature is None else loss * (temperature / base_temperature)


def self_contrastive(
    first: Tensor, second: Tensor, temperature: float = 0.5, base_temperature: float | None = None
) -> Tensor:
    """Return L_us (see the module): of two views of each image, either is the positive of the other.

    One image alone has no negatives: its loss is 0, and so is the gradient.

    Parameters
    ----------
    first, second : Tensor [B, d]
        Features of one view of each image, and of another, in the same order.
    temperature, base_temperature : float
        See `supervised_contrastive`.

    Returns
    -------
    Tensor []
        The mean over the 2B views, 0 or more.

    Raises
    ------
    ValueError
        A temperature is out of range, or the views differ in shape or are no features.
    """
    if first.shape != second.shape:
        raise ValueError(f"views differ in shape: {tuple(first.shape)} and {tuple(second.shape)}")
    images = torch.arange(len(first), device=first.device).repeat(2)
    return supervised_contrastive(torch.cat((first, second)), images, temperature, base_temperature)


def unit(z: Tensor) -> Tensor:
    """Return the rows of z [n, d] at length 1; a row of (nearly) zero length as zeros, without a gradient."""
    largest = z.detach().abs().amax(1, keepdim=True) if z.numel() else z.new_zeros(len(z), 1)
    nothing = largest < math.sqrt(torch.finfo(z.dtype).tiny)  # [n, 1]
    # Divided by the largest entry first, so that no square overflows or vanishes.
    scaled = (z / largest.masked_fill(nothing, 1)).masked_fill(nothing, 0)
    length = scaled.square().sum(1, keepdim=True).masked_fill(nothing, 1).sqrt()
    return scaled / length


@dataclass(frozen=True)
class ContrastiveViews:
    """Make one random view of each image: `views(x, generator) -> views`; call it twice for a pair.

        crop 20 to 100 % of the area, sides 3:4 to 4:3, resized → mirror (1/2) → jitter (0.8) → grey (0.2)

        jitter: brightness, contrast, saturation by 1 ± 0.8 s, hue by ± 0.2 s circles, in random order

    Parameters
    ----------
    crop_scale : (float, float)
        Smallest and largest share of the area that is kept, 0 < smallest ≤ largest ≤ 1.
    crop_ratio : (float, float)
        Smallest and largest width / height of the crop, above 0.
    flip : bool
        Mirror every second view (switch off where left and right matter, as for digits).
    jitter : float
        Probability of the colour jitter, in [0, 1].
    strength : float
        s of the jitter, in [0, 1.25].
    grayscale : float
        Probability of a grey view, in [0, 1].

    Raises
    ------
    ValueError
        An option is out of range; the message names it.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    jitter: float = 0.8
    strength: float = 0.5
    grayscale: float = 0.2

    def __post_init__(self) -> None:
        for name, (low, high), top in (("crop_scale", self.crop_scale, 1), ("crop_ratio", self.crop_ratio, math.inf)):
            if not (0 < low <= high <= top and high < math.inf):
                raise ValueError(f"{name}=({low}, {high}) must be 0 < smallest <= largest <= {top}, finite")
        for name, value, top in (
            ("jitter", self.jitter, 1),
            ("strength", self.strength, 1.25),
            ("grayscale", self.grayscale, 1),
        ):
            check_number(name, value, 0, top)

    @classmethod
    def for_data(cls, *, flip: bool, crop: float) -> Self:
        """See `fedtta.tta.views.RandomViews`."""
        return cls(crop_scale=(crop, 1.0), flip=flip)

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return one view of each image; what is drawn depends on the generator and on how many images there are.

        Parameters
        ----------
        x : Tensor [n, C, H, W]
            Floating-point images in [0, 1], C = 1 or 3; n may be 0. A grey image keeps its one channel.
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
        return self.apply(x, self.draw(generator, len(x)))

    def together(self, x: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return what calls for G equal parts of x [G n, C, H, W], each with its generator, would return together."""
        parts = zip(x.chunk(len(generators)), generators, strict=True)
        return self.apply(x, torch.cat([self.draw(generator, len(part)) for part, generator in parts]))

    def draw(self, generator: Generator, n: int) -> Tensor:
        """Return the random numbers of n views: uniform [n, DRAWS], float64, CPU."""
        return torch.rand(n, DRAWS, generator=generator, dtype=torch.float64)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return the view of each image that its row of `draws` [n, DRAWS] describes; see `__call__`."""
        if x.ndim != 4 or x.shape[1] not in (1, 3) or not x.is_floating_point():
            kind = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"ContrastiveViews needs floating-point images [n, 1 or 3, H, W], got {kind}")
        if len(x) == 0:
            return x.clone()
        box, mirror, jitter, colours, order, gray = draws.split([2 * TRIES + 2, 1, 1, len(JITTER), len(JITTER), 1], 1)
        x = self._crop(x, box, mirror.flatten() < (0.5 if self.flip else 0))
        order = torch.where(jitter < self.jitter, order.argsort(1), -1)
        recolour(x, list(JITTER), self._factors(2 * colours - 1), order)
        turned = torch.nonzero(gray.flatten() < self.grayscale).flatten()
        if x.shape[1] == 3 and len(turned):
            turned = to_device(turned, x.device)
            x[turned] = grey(x[turned]).expand(-1, 3, -1, -1)
        return x

    def _factors(self, signed: Tensor) -> Tensor:
        """Return the parameters of the jitter's operations from `signed` [n, 4] in [-1, 1)."""
        middle = signed.new_tensor([name != "hue" for name in JITTER])
        return middle + signed * signed.new_tensor(list(JITTER.values())) * self.strength

    def _crop(self, x: Tensor, uniform: Tensor, mirrored: Tensor) -> Tensor:
        """Return a random box of each image [n, C, H, W], bilinearly resized to the image, where `mirrored` turned."""
        height, width = x.shape[2:]
        boxes = self.boxes(uniform, height, width)
        rows, columns = (
            _positions(boxes[:, i], boxes[:, 2 + i], size) for i, size in ((0, height), (1, width))
        )  # [n, H], [n, W]
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        # From pixels to the corners at -1 and 1 that `grid_sample` measures from.
        rows, columns = (
            to_device((2 * (at + 0.5) / size - 1).to(x.dtype), x.device)
            for at, size in ((rows, height), (columns, width))
        )
        grid = torch.stack(
            (columns[:, None].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)), 3
        )  # [n, H, W, 2]
        return grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp_(0, 1)

    def boxes(self, uniform: Tensor, height: int, width: int) -> Tensor:
        """Return boxes [n, 4] in whole pixels: top, left, height, width, from `uniform` [n, 2 TRIES + 2] in [0, 1)."""
        area, ratio = uniform[:, :TRIES], uniform[:, TRIES : 2 * TRIES]
        low, high = self.crop_scale
        area = height * width * (low + (high - low) * area)
        narrow, wide = (math.log(ratio) for ratio in self.crop_ratio)
        ratio = (narrow + (wide - narrow) * ratio).exp()
        widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()  # [n, TRIES]
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)
        size = torch.stack((heights.gather(1, first), widths.gather(1, first)), 1).squeeze(2)  # [n, 2]
        space = torch.tensor([height, width], dtype=uniform.dtype)
        corner = (uniform[:, 2 * TRIES :] * (space - size + 1)).floor()
        middle = torch.tensor(self._middle(height, width), dtype=uniform.dtype)
        return torch.where(fits.any(1, keepdim=True), torch.cat((corner, size), 1), middle)

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the box where none of those drawn fits: the largest in the middle whose ratio is allowed."""
        narrow, wide = self.crop_ratio
        tall = max(1, round(width / narrow)) if width / height < narrow else height
        broad = max(1, round(height * wide)) if width / height > wide else width
        return (height - tall) // 2, (width - broad) // 2, tall, broad


def _positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return where the `size` pixels of a resized side read the image, [n, size], never outside start..start+length."""
    at = (torch.arange(size, dtype=start.dtype) + 0.5) * (length / size)[:, None] - 0.5
    return start[:, None] + torch.minimum(at.clamp_min(0), length[:, None] - 1)
