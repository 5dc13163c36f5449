"""Images in one .npz file: `x` and `y`, and optionally the class names `classes`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .base import HALF, Dataset, Raw, Request
from .files import as_labels, class_names, read_arrays

LAYOUTS = ("auto", "nchw", "nhwc")


def load_npz(request: Request, *, path: str = "data.npz", layout: str = "auto") -> Raw:
    """Return the images of an .npz file.

    Parameters
    ----------
    request : Request
        Its root is the file itself, or the folder that holds it.
    path : str
        Name of the file if the root is a folder.
    layout : str
        "nchw", "nhwc", or "auto": decided by which axis has length 1 or 3. `x` may also be [N, H, W], grayscale.

    Notes
    -----
    `x` is uint8 (0 to 255) or floating point in [0, 1]; `y` [N] holds integers from 0; `classes` [K] holds
    names (default: "0" to the largest label).

    Raises
    ------
    ValueError
        No root, unknown layout, a missing array, pixels that are not finite or out of range, labels that are missing or
        out of range, or a damaged file; the message names the file.
    FileNotFoundError
        The file does not exist.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are: {', '.join(LAYOUTS)}")
    if request.root is None:
        raise ValueError("an npz data set needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
    file = request.root / path if request.root.is_dir() else request.root
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    stored = read_arrays(file, "x", "y")
    pixels = _in_bytes(_channels_first(stored["x"], layout, file), file)
    classes = _classes(stored, file)
    return Raw(pixels, as_labels(stored["y"], len(pixels), len(classes), file), classes)


def _classes(stored: dict[str, np.ndarray], file: Path) -> tuple[str, ...]:
    """Return the class names, by default the numbers from 0 to the largest label."""
    if "classes" in stored:
        return class_names(stored, None, file)
    y = stored["y"]
    numeric = y.size > 0 and np.issubdtype(y.dtype, np.number) and bool(np.isfinite(y).all())
    top = float(y.real.max()) if numeric else 0.0
    if top >= 100_000:  # probably ids; the network would get as many outputs
        raise ValueError(f"{file}: label {top:g} is too large to be a class number")
    return tuple(str(label) for label in range(max(0, int(top)) + 1))


def _in_bytes(x: np.ndarray, file: Path) -> np.ndarray:
    """Check the range of x [N, C, H, W] and return it in 0..255 (floats stay floats until they are resized)."""
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"{file}: x must be uint8 or floating point, got {x.dtype}")
    bad = np.flatnonzero(~np.isfinite(x).all((1, 2, 3)))
    if len(bad):
        raise ValueError(f"{file}: image {bad[0]} has values that are not finite")
    if x.size and (x.min() < 0 or x.max() > 1):
        raise ValueError(f"{file}: floating-point x must lie in [0, 1], got {x.min()} to {x.max()}")
    return x.astype(np.float32) * np.float32(255.0)


def _channels_first(x: np.ndarray, layout: str, file: Path) -> np.ndarray:
    """Return x as [N, C, H, W]."""
    if 0 in x.shape[1:]:
        raise ValueError(f"{file}: the images of x {x.shape} have no pixels")
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        raise ValueError(f"{file}: x must be [N, H, W], [N, H, W, C] or [N, C, H, W], got {x.shape}")
    first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
    if layout == "auto" and first == last:
        raise ValueError(f"{file}: the channel axis of x {x.shape} is ambiguous; give layout nchw or nhwc")
    if layout == "nhwc" or (layout == "auto" and last):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


NPZ = Dataset(
    "your own images: an .npz file with x and y (never mirrored: their content is unknown)",
    load_npz,
    mean=HALF,
    std=HALF,
    classes=None,
    flip=False,
)
