"""What a data set declares (`Dataset`), what its loader receives and returns, and the conversion to `Images`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..images import Images

RGB = tuple[float, float, float]

HALF: RGB = (0.5, 0.5, 0.5)  # maps [0, 1] onto [-1, 1]
IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)

#: ITU-R 601 luma, the weights of R, G and B in a grayscale image.
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Request:
    """Arguments of every loader.

    Parameters
    ----------
    root : Path or None
        Folder that holds the data; None if there is none.
    image_size : int
        Side of the images.
    download : bool
        Whether a download is allowed.
    """

    root: Path | None
    image_size: int
    download: bool


@dataclass(frozen=True, eq=False)
class Raw:
    """What a loader returns: pixels [N, C, H, W], uint8 or float in [0, 255], C 1 or 3; labels [N]; class names."""

    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]


#: `loader(request, **options) -> Raw`; its keyword-only parameters are the data set's options.
Loader = Callable[..., Raw]


@dataclass(frozen=True)
class Dataset:
    """A data set before it is loaded.

    Parameters
    ----------
    description : str
        One line for lists of data sets.
    loader : callable
        See `Loader`.
    mean, std : tuple of float
        Normalization constants per channel, for pixels in [0, 1].
    classes : int or None
        Number of classes; None if the files decide.
    flip : bool
        Whether a mirrored image still belongs to its class.
    crop : float
        Smallest share of the area that a contrastive view keeps. The default is that of Khosla et al. for CIFAR. Less
        than 0.6 of a digit may be another digit, and less than 0.6 of Office-10's scenes at 32 x 32 pixels does not
        show their class (a linear probe on corrupted validation images, seed 1, after 10 encoder rounds at learning
        rate 0.05: 58.5 % accuracy with 0.6, 53.1 % with 0.2).
    natural : tuple of str
        Data sets that are natural shifts of this one; the first is the default.
    present : callable, optional
        Of a natural shift: whether its files are in a root folder.
    """

    description: str
    loader: Loader
    mean: RGB
    std: RGB
    classes: int | None
    flip: bool
    crop: float = 0.2
    natural: tuple[str, ...] = ()
    present: Callable[[Path], bool] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the loader's options: its keyword-only parameters that are not bound yet."""
        bound = self.loader.keywords if isinstance(self.loader, partial) else {}
        parameters = signature(self.loader).parameters.values()
        return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in bound)

    def typed(self, option: str, value: Any) -> Any:
        """Return the value of an option, which may be given as text.

        Raises
        ------
        ValueError
            The text is no value of the option's type.
        """
        kind = type(signature(self.loader).parameters[option].default)
        if kind not in (bool, int) or not isinstance(value, str):
            return value
        try:
            return {"true": True, "false": False}[value] if kind is bool else int(value)
        except (KeyError, ValueError) as error:
            allowed = "true or false" if kind is bool else "a whole number"
            raise ValueError(f"{option}={value!r}: allowed is {allowed}") from error

    def normalisation(self, channels: int = 3) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) for 3 channels, or their averages for grayscale images."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,), (sum(self.std) / 3,)


def to_images(raw: Raw, name: str, image_size: int, channels: int) -> Images:
    """Convert loaded data to bytes [N, `channels`, `image_size`, `image_size`], rounded once at the end.

    Images are resized bilinearly (with antialiasing when they shrink). Grayscale becomes colour by repetition, colour
    becomes grayscale by ITU-R 601 luma.

    Raises
    ------
    ValueError
        `image_size` is not positive, or the number of channels asked for or loaded is neither 1 nor 3.
    """
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    if channels not in (1, 3) or raw.pixels.shape[1] not in (1, 3):
        raise ValueError(f"{name}: channels must be 1 or 3, asked {channels}, the source has {raw.pixels.shape[1]}")
    wanted = (channels, image_size, image_size)
    if raw.pixels.dtype == np.uint8 and raw.pixels.shape[1:] == wanted:
        return Images(name, raw.pixels, raw.labels, raw.classes)
    pixels = np.empty((len(raw.pixels), *wanted), np.uint8)
    for start in range(0, len(pixels), 1000):  # bounds memory: a thousand float images at a time
        part = slice(start, start + 1000)
        floats = torch.from_numpy(raw.pixels[part].astype(np.float32))
        pixels[part] = _convert(floats, image_size, channels).numpy()
    return Images(name, pixels, raw.labels, raw.classes)


def _convert(x: Tensor, image_size: int, channels: int) -> Tensor:
    """Convert x [n, C, H, W], float in [0, 255], to uint8 [n, channels, image_size, image_size]."""
    if x.shape[1] == 3 and channels == 1:
        x = torch.einsum("nchw,c->nhw", x, torch.tensor(LUMA))[:, None]
    if x.shape[2:] != (image_size, image_size):
        x = functional.interpolate(
            x, size=(image_size, image_size), mode="bilinear", align_corners=False, antialias=True
        )
    return x.round_().clamp_(0, 255).to(torch.uint8).expand(-1, channels, -1, -1)
