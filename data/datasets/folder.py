"""Image folders: `<root>/<class>/*.png`, or `<root>/<domain>/<class>/*.png` for data with domains."""

from __future__ import annotations

from pathlib import Path

from .base import HALF, Dataset, Raw, Request
from .files import labelled_files, read_images, subfolders
from .multi_domain import DomainSource, combine_domains


def load_folder(request: Request, *, path: str = "", domain: str | None = None) -> Raw:
    """Return all images of a folder as RGB, resized bilinearly to `image_size` x `image_size`.

    Parameters
    ----------
    request : Request
        Its root is the folder.
    path : str
        Path of the folder below the root.
    domain : str, optional
        The first level holds domains, the second classes: load this domain, or all of them with "*". Labels number the
        classes of *all* domains, so they agree between domains even if a domain lacks a class.

    Raises
    ------
    ValueError
        No root, unknown domain (lists the known ones), no classes, a class folder without an image (a domain may lack
        the folder of a class that another domain has) or with folders in it, or a damaged image (named).
    FileNotFoundError
        The folder does not exist.
    """
    if request.root is None:
        raise ValueError("an image folder needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
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
        raise ValueError(f"{top} contains no domain folders")
    sources = {one: DomainSource(raw.labels, raw.pixels.__getitem__) for one, raw in read.items()}
    return combine_domains(sources, tuple(classes), request, per_domain=0, draw=0)


def _read(folder: Path, classes: list[str], size: int) -> Raw:
    """Read `folder/<class>/*` in the order of classes and file names; classes without a folder are skipped."""
    for place in (folder / name for name in classes if (folder / name).is_dir()):
        if deeper := subfolders(place):
            layouts = "<class>/*.png, or with domain=* <domain>/<class>/*.png"
            raise ValueError(f"{place} holds folders ({deeper[0]}); allowed are {layouts}")
    files, labels = labelled_files([folder / name if (folder / name).is_dir() else None for name in classes])
    if not files:
        raise ValueError(f"{folder} contains no class folders")
    return Raw(read_images(files, size), labels, tuple(classes))


FOLDER = Dataset(
    "your own images: root/<class>/*.png, or root/<domain>/<class>/*.png",
    load_folder,
    mean=HALF,
    std=HALF,
    classes=None,
    flip=True,
)
