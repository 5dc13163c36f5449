"""CIFAR packed as mosaics: `train_00.webp`, ... `test_00.webp`, ... and `labels.npz` in one folder.

A mosaic holds tiles in row-major order: tile k stands at row k // columns, column k % columns. Labels are in
tile order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from .raw import Raw, as_labels, read_arrays, reading

_TILE = 32  # CIFAR's pictures are 32 x 32
_SUFFIXES = (".webp", ".png")


def is_packed(folder: Path) -> bool:
    """Return whether `folder` holds packed mosaics."""
    return (folder / "labels.npz").is_file()


def tiles(path: Path, size: int = _TILE, channels: int = 3) -> np.ndarray:
    """Cut the mosaic at `path` into uint8 [N, channels, size, size], in row-major order of the tiles.

    Raises
    ------
    ValueError
        The file cannot be read, is not RGB (`channels` 3) or grey (1), or its sides are no multiples of `size`; the
        message names it.
    """
    with reading(path), Image.open(path) as picture:
        mosaic = np.asarray(picture)
    height, width = mosaic.shape[:2]
    if mosaic.shape[2:] != ((3,) if channels == 3 else ()) or height % size or width % size:
        kind = "RGB" if channels == 3 else "grey"
        raise ValueError(f"{path}: a mosaic of {size} x {size} {kind} tiles is expected, got {mosaic.shape}")
    rows, columns = height // size, width // size
    cut = mosaic.reshape(rows, size, columns, size, channels).transpose(0, 2, 4, 1, 3)  # [rows, columns, C, size, size]
    return cut.reshape(rows * columns, channels, size, size)


def load_packed(folder: Path, parts: tuple[str, ...], classes: int) -> Raw:
    """Return the pictures of `parts` ("train", "test"), in the order given.

    Raises
    ------
    ValueError
        A file is missing or damaged, or pictures, labels and class names do not fit each other.
    """
    label_file = folder / "labels.npz"
    stored = read_arrays(label_file)
    absent = [name for name in (*parts, "classes") if name not in stored]
    if absent:
        raise ValueError(f"{label_file}: no array {absent[0]!r}; there are: {', '.join(sorted(stored))}")
    names = tuple(str(name) for name in stored["classes"])
    if len(names) != classes:
        raise ValueError(f"{label_file}: {classes} class names are expected, got {len(names)}")
    pixels, labels = [], []
    for part in parts:
        pixels.append(_part(folder, part, len(stored[part])))
        labels.append(as_labels(stored[part], len(pixels[-1]), classes, label_file))
    return Raw(np.concatenate(pixels), np.concatenate(labels), names)


def _part(folder: Path, part: str, count: int) -> np.ndarray:
    """Return the pictures [count, 3, 32, 32] of one part; tiles beyond the labels pad the last file."""
    files = sorted(path for path in folder.glob(f"{part}_*") if path.suffix in _SUFFIXES)
    if not files:
        raise ValueError(f"{folder}: no {part}_*.webp or {part}_*.png beside labels.npz")
    pixels = np.empty((count, 3, _TILE, _TILE), np.uint8)
    filled = 0
    for path in files:
        if filled >= count:
            raise ValueError(f"{path}: more mosaics than the {count} {part} labels of {folder / 'labels.npz'}")
        mosaic = tiles(path)[: count - filled]
        pixels[filled : filled + len(mosaic)] = mosaic
        filled += len(mosaic)
    if filled < count:
        raise ValueError(f"{folder}: {count} {part} labels but only {filled} pictures in {len(files)} mosaics")
    return pixels
