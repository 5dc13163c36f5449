"""Random views for contrastive learning: crop and resize, mirror, colour jitter, grey.

FedICON (Tan et al., 2023, section 3) generates "two random augmented views for each sample" and does not say how. These
are the views of the loss that it takes over, Supervised Contrastive Learning (Khosla et al., NeurIPS 2020), as
published for CIFAR. But for the smallest crop they are those of SimCLR (Chen et al., ICML 2020, appendix B.9): there a
crop has from 8 % of the area on, colours have the strength s = 0.5, and small images are not blurred.

    crop 20 to 100 % of the area, sides 3:4 to 4:3, resized → mirror (1/2) → jitter (0.8) → grey (0.2)

    jitter: brightness, contrast, saturation by 1 ± 0.8 s, hue by ± 0.2 s circles, in random order

Every step is torchvision's: RandomResizedCrop (ten draws of a box, the first that fits), RandomHorizontalFlip,
ColorJitter and RandomGrayscale, with parameters of its own for every image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import grid_sample

from tta.heads import check_number
from tta.views import COLOURED_ONLY, COLOURS, grey

#: The colour operations of the jitter, and the spread of their parameter at strength 1.
JITTER = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
TRIES = 10  # boxes that are drawn before the middle of the image is taken
#: Uniform numbers that describe a view: area and ratio of each box, position 2, mirror, jitter, colours, order, grey.
DRAWS = 2 * TRIES + 2 + 1 + 1 + 2 * len(JITTER) + 1


@dataclass(frozen=True)
class ContrastiveViews:
    """Make one random view of each image: `views(x, generator) -> views`; call it twice for a pair.

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
        if x.ndim != 4 or x.shape[1] not in (1, 3) or not x.is_floating_point():
            kind = f"{tuple(x.shape)} {x.dtype}"
            raise ValueError(f"ContrastiveViews needs floating-point images [n, 1 or 3, H, W], got {kind}")
        draws = torch.rand(len(x), DRAWS, generator=generator, dtype=torch.float64)
        if len(x) == 0:
            return x.clone()
        box, mirror, jitter, colours, order, gray = draws.split([2 * TRIES + 2, 1, 1, len(JITTER), len(JITTER), 1], 1)
        x = self._crop(x, box, mirror.flatten() < (0.5 if self.flip else 0))
        self._recolour(x, 2 * colours - 1, order.argsort(1), jitter.flatten() < self.jitter)
        turned = torch.nonzero(gray.flatten() < self.grayscale).flatten().to(x.device)
        if x.shape[1] == 3 and len(turned):
            x[turned] = grey(x[turned]).expand(-1, 3, -1, -1)
        return x

    def _crop(self, x: Tensor, uniform: Tensor, mirrored: Tensor) -> Tensor:
        """Return a random box of each image [n, C, H, W], bilinearly resized to the image, where `mirrored` turned."""
        height, width = x.shape[2:]
        boxes = self.boxes(uniform, height, width)
        rows, columns = (
            _positions(boxes[:, i], boxes[:, 2 + i], size) for i, size in ((0, height), (1, width))
        )  # [n, H], [n, W]
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        # From pixels to the corners at -1 and 1 that `grid_sample` measures from.
        rows, columns = (2 * (at + 0.5) / size - 1 for at, size in ((rows, height), (columns, width)))
        grid = torch.stack(
            (columns[:, None].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)), 3
        )  # [n, H, W, 2]
        return grid_sample(x, grid.to(x), mode="bilinear", padding_mode="border", align_corners=False).clamp_(0, 1)

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

    def _recolour(self, x: Tensor, signed: Tensor, order: Tensor, jittered: Tensor) -> None:
        """Apply the jitter in place to those of x [n, C, H, W] with `jittered` [n]; `signed` [n, 4] is in [-1, 1)."""
        for place in range(len(JITTER)):
            for code, (name, spread) in enumerate(JITTER.items()):
                index = torch.nonzero(jittered & (order[:, place] == code)).flatten()
                if len(index) == 0 or (x.shape[1] == 1 and name in COLOURED_ONLY):
                    continue
                parameter = (name != "hue") + signed[index, code] * spread * self.strength
                index = index.to(x.device)
                x[index] = COLOURS[name][0](x[index], parameter.to(x).view(-1, 1, 1, 1))


def _positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return where the `size` pixels of a resized side read the image, [n, size], never outside start..start+length."""
    at = (torch.arange(size, dtype=start.dtype) + 0.5) * (length / size)[:, None] - 0.5
    return start[:, None] + torch.minimum(at.clamp_min(0), length[:, None] - 1)
