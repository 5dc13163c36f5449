"""Images in one .npz file, as a device's own data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.data.datasets.files import as_name, class_names, read_arrays

from .base import stated_split
from .files import stamp_of


class NpzSource:
    """The samples of an .npz file, held in memory.

    Parameters
    ----------
    file : Path
        Arrays `x` [N, H, W], [N, H, W, C] or [N, C, H, W], C 1 or 3, uint8, uint16 or float (in [0, 1] unless the run
        sets a window); and where there are any `y` [N], class names or numbers from 0, with `classes` [K] the names of
        the numbers; `group` [N], text or numbers, NaN for none; and `split` [N], text.

    Raises
    ------
    ValueError
        There is no such file, it is damaged, its arrays do not fit each other, or C may be either axis of `x`.
    """

    def __init__(self, file: Path) -> None:
        if not file.is_file():  # neither a folder nor a FIFO, which would block
            raise ValueError(f"there is no file {file}")
        self._stamp = stamp_of(file.stat())
        stored = read_arrays(file, "x")
        self._pixels = _channels_last(stored["x"], file)
        for name in {"y", "group", "split"} & set(stored):
            if stored[name].shape != (len(self),):
                raise ValueError(f"{file}: {len(self)} images but {name} of shape {stored[name].shape}")
        self._labels = _names(stored, file) if "y" in stored else [None] * len(self)
        groups = stored["group"] if "group" in stored else [""] * len(self)
        self._groups = ["" if one != one else as_name(one) for one in groups]  # NaN is not equal to itself
        splits = stored["split"] if "split" in stored else [""] * len(self)
        self._splits = [stated_split(as_name(one), f"{file}: image {i}") for i, one in enumerate(splits)]
        self.classes = tuple(sorted({one for one in self._labels if one is not None}))
        unused = sorted(set(stored) - {"x", "y", "classes", "group", "split"})
        self.notes = (f"arrays not used: {', '.join(unused)}",) if unused else ()

    def __len__(self) -> int:
        return len(self._pixels)

    def name(self, i: int) -> str:
        """Return the number of the image in the file."""
        return str(i)

    def image(self, i: int) -> NDArray[Any]:
        """Return the image [H, W] or [H, W, 3]."""
        return self._pixels[i]

    def label(self, i: int) -> str | None:
        """Return the class name."""
        return self._labels[i]

    def group(self, i: int) -> str:
        """Return the group."""
        return self._groups[i]

    def split(self, i: int) -> str:
        """Return the stated split."""
        return self._splits[i]

    def stamp(self, i: int) -> list[int]:
        """Return the file's `stamp_of`."""
        return self._stamp


def _channels_last(x: NDArray[Any], file: Path) -> NDArray[Any]:
    """Return x as [N, H, W] or [N, H, W, 3]."""
    if x.ndim == 4 and x.shape[1] in (1, 3):
        if x.shape[3] in (1, 3):
            raise ValueError(
                f"{os.fspath(file)}: x {x.shape} is [N, H, W, C] or [N, C, H, W]; store grayscale as [N, H, W]"
            )
        x = x.transpose(0, 2, 3, 1)
    if x.ndim == 4 and x.shape[3] == 1:
        x = x[..., 0]
    if x.ndim != 3 and x.shape[3:] != (3,):
        raise ValueError(f"{os.fspath(file)}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W], got {x.shape}")
    return x


def _names(stored: dict[str, NDArray[Any]], file: Path) -> list[str | None]:
    """Return each image's class name."""
    y = stored["y"]
    if not np.issubdtype(y.dtype, np.number):
        return [as_name(one) or None for one in y]
    wrong = y[~(np.isfinite(y) & (y == np.floor(y)) & (y >= 0))] if not np.iscomplexobj(y) else y
    if len(wrong):
        raise ValueError(f"{file}: y holds {wrong[0]}; allowed are class names, or whole numbers from 0")
    numbers = y.astype(np.int64)
    if "classes" not in stored:
        return [str(one) for one in numbers]
    names = class_names(stored, None, file)
    if numbers.max(initial=-1) >= len(names):
        raise ValueError(f"{file}: label {numbers.max()}, but there are {len(names)} class names")
    return [names[one] for one in numbers]
