"""What a source hands over, how it becomes `Images`, and how files are read so that a broken one is named."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..images import Images

#: ITU-R 601 luma, the weights of R, G and B in a grey picture.
LUMA = (0.299, 0.587, 0.114)

#: What numpy, zipfile and Pillow raise for files that are cut short or overwritten.
_BROKEN = (OSError, ValueError, EOFError, SyntaxError, KeyError, struct.error, zlib.error, zipfile.BadZipFile)


@dataclass(frozen=True, eq=False)
class Raw:
    """What a source has: pixels [N, C, H, W], uint8 or float in [0, 255], C 1 or 3; labels [N]; classes."""

    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What every source is asked: where to look (None: nowhere), picture size, may it download."""

    root: Path | None
    image_size: int
    download: bool


#: A source: `loader(request, **options) -> Raw`.
Loader = Callable[..., Raw]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a broken file makes its reader raise into a ValueError that names the file.

    Raises
    ------
    FileNotFoundError
        There is no such file (as from the reader).
    ValueError
        The file is there and cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        raise ValueError(f"{path} is damaged or not what it should be: {error or type(error).__name__}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read an .npz file, every array of it; pickled objects are refused."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("not an .npz archive")
        return {name: archive[name] for name in archive.files}


def read_array(path: Path) -> np.ndarray:
    """Read an .npy file; pickled objects are refused."""
    with reading(path):
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("not an .npy array")
        return array


def read_picture(path: Path) -> np.ndarray:
    """Read a picture as uint8 RGB [H, W, 3]."""
    with reading(path), Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def as_labels(values: np.ndarray, count: int, num_classes: int, path: Path) -> np.ndarray:
    """Check `count` labels of `num_classes` classes and return them as int64 [count].

    Raises
    ------
    ValueError
        Wrong number, not integers (a missing label is often NaN), or out of range; the message names `path`.
    """
    if values.shape != (count,):
        raise ValueError(f"{path}: {count} pictures but labels of shape {values.shape}")
    if not np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.complexfloating):
        raise ValueError(f"{path}: labels must be integers, got {values.dtype}")
    missing = np.flatnonzero(~np.isfinite(values))
    if len(missing):
        raise ValueError(f"{path}: {len(missing)} labels are missing (not finite), the first at {missing[0]}")
    wrong = np.flatnonzero((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if len(wrong):
        raise ValueError(
            f"{path}: label {values[wrong[0]]} at {wrong[0]} is not an integer from 0 to {num_classes - 1}"
        )
    return values.astype(np.int64)


def finish(raw: Raw, name: str, image_size: int, channels: int) -> Images:
    """Bring pictures to `channels` x `image_size` x `image_size` and bytes; rounded once, at the end.

    Sizes change bilinearly (with antialiasing where they shrink). Grey becomes colour by repetition, colour
    becomes grey by ITU-R 601 luma.

    Raises
    ------
    ValueError
        `image_size` is not positive, or `channels` or the source's channels are neither 1 nor 3.
    """
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1")
    if channels not in (1, 3) or raw.pixels.shape[1] not in (1, 3):
        raise ValueError(f"{name}: channels must be 1 or 3, asked {channels}, the source has {raw.pixels.shape[1]}")
    wanted = (channels, image_size, image_size)
    if raw.pixels.dtype == np.uint8 and raw.pixels.shape[1:] == wanted:
        return Images(name, raw.pixels, raw.labels, raw.classes)
    pixels = np.empty((len(raw.pixels), *wanted), np.uint8)
    for start in range(0, len(pixels), 1000):  # bounded memory: a thousand float pictures at a time
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
