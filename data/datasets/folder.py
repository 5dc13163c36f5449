"""Pictures in folders: `<root>/<class>/*.png`, or `<root>/<domain>/<class>/*.png` for data with domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from .raw import Raw, Request, reading
from .shelves import Shelf, join

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def load_folder(request: Request, *, path: str = "", domain: str | None = None) -> Raw:
    """Return every picture of an image folder as RGB, resized bilinearly to `image_size` x `image_size`.

    Parameters
    ----------
    request : Request
        Its root is the folder.
    path : str
        A folder below the root, where the root holds other data too.
    domain : str, optional
        The first level holds domains, the second classes: take this domain, or all of them with
        "*". Label numbers are those of the classes of *all* domains, so that they agree between domains even where
        one lacks a class.

    Raises
    ------
    ValueError
        No root, an unknown domain (lists those there), no classes, a class folder without a picture (unless
        another domain has that class), or a damaged picture (named).
    FileNotFoundError
        The folder is not there.
    """
    if request.root is None:
        raise ValueError("an image folder needs root (or FEDTTA_DATA)")
    top = request.root / path
    if not top.is_dir():
        raise FileNotFoundError(f"there is no folder {top}")
    if domain is None:
        return _read(top, subfolders(top), request.image_size)
    domains = subfolders(top)
    if domain not in (*domains, "*"):
        raise ValueError(f"unknown domain {domain!r}; there are: {', '.join(domains)}")
    classes = sorted({name for one in domains for name in subfolders(top / one)})
    if domain != "*":
        return _read(top / domain, classes, request.image_size)
    read = {one: _read(top / one, classes, request.image_size) for one in domains}
    if not read:
        raise ValueError(f"{top} holds no domain folders")
    shelves = {one: Shelf(raw.labels, raw.pixels.__getitem__) for one, raw in read.items()}
    return join(shelves, tuple(classes), request, per_domain=0, draw=0)


def subfolders(folder: Path) -> list[str]:
    """Return the names of the visible folders in `folder`, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read(folder: Path, classes: list[str], size: int) -> Raw:
    """Read `folder/<class>/*` class by class, files in the order of their names."""
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue  # a class of another domain
        files = sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"{folder / name} holds no picture ({', '.join(SUFFIXES)})")
        pixels.extend(picture(file, size) for file in files)
        labels.extend([label] * len(files))
    if not pixels:
        raise ValueError(f"{folder} holds no class folders")
    return Raw(np.stack(pixels), np.asarray(labels, np.int64), tuple(classes))


def picture(path: Path, size: int) -> np.ndarray:
    """Read one picture as uint8 [3, size, size].

    Raises
    ------
    ValueError
        It is damaged; the message names it.
    """
    with reading(path), Image.open(path) as opened:
        rgb = opened.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(rgb).transpose(2, 0, 1)
