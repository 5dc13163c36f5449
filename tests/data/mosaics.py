"""Mosaics as the packed data sets have them, written tile by tile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def mosaic(path: Path, tiles: np.ndarray, columns: int = 4) -> None:
    """Put tiles [n, side, side(, 3)] one by one at row k // columns, column k % columns; black tiles pad the end."""
    side = tiles.shape[1]
    canvas = np.zeros((-(-len(tiles) // columns) * side, columns * side, *tiles.shape[3:]), np.uint8)
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        canvas[row * side : row * side + side, column * side : column * side + side] = tile
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(canvas).save(path, **({"lossless": True} if path.suffix == ".webp" else {}))


def flat(count: int, side: int, base: int, colour: bool = False) -> np.ndarray:
    """Tiles of one value each, base + number: they survive any resizing, and JPEG nearly."""
    shape = (count, side, side, 3) if colour else (count, side, side)
    return np.broadcast_to((base + np.arange(count)).reshape(-1, *[1] * (len(shape) - 1)), shape).astype(np.uint8)
