"""Office-Caltech-10 and PACS, packed as one mosaic of 64 x 64 tiles per domain.

B. Gong et al., "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012 (Office-10 in FedICON); D. Li et
al., "Deeper, Broader and Artier Domain Generalization", ICCV 2017 (PACS in ATP). Neither comes with a split.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from ..rng import generator
from .base import HALF, IMAGENET_MEAN, IMAGENET_STD, Dataset, Request
from .files import as_labels, class_names, read_arrays, read_labelled_tiles
from .multi_domain import DomainSource, MultiDomainRaw, combine_domains, select_domains

TILE = 64
PARTS = ("all", "train", "test")
TESTED = 0.2  # of each class and domain

#: Name → (folder below the root, domains, number of classes).
_FACTS = {
    "office10": ("office_caltech10", ("amazon", "caltech10", "dslr", "webcam"), 10),
    "pacs": ("pacs64", ("photo", "art_painting", "cartoon", "sketch"), 7),
}


def load_mosaics(
    request: Request,
    *,
    name: str,
    domains: str = "",
    per_domain: int = 0,
    draw: int = 0,
    copies: bool = False,
    part: str = "all",
) -> MultiDomainRaw:
    """Return the images of several domains at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds the folder office_caltech10 or pacs64 with `<domain>.jpg` and `labels.npz`.
    name : str
        "office10" or "pacs".
    domains, per_domain, draw
        See `select_domains` and `combine_domains`.
    copies : bool
        Keep exact copies of an image. Office-10 has 26 (25 in amazon, 1 in caltech10); with them the counts are the
        published ones, but a client may be tested on an image that it was trained on.
    part : {"all", "train", "test"}
        "test": a fifth of each class and domain, always the same; "train": the others. Without copies the two share no
        image.

    Raises
    ------
    ValueError
        Unknown domain or part, a bad number, or a damaged file.
    FileNotFoundError
        A requested domain is not available.
    """
    if type(copies) is not bool:
        raise ValueError(f"copies={copies!r} must be true or false")
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; there are: {', '.join(PARTS)}")
    if request.root is None:
        raise FileNotFoundError(f"{name} needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
    below, all_domains, count = _FACTS[name]
    folder = request.root / below
    label_file = folder / "labels.npz"
    available = {domain: (folder / f"{domain}.jpg").is_file() for domain in all_domains}
    chosen, absent = select_domains(domains, available, name, f"{folder}/<domain>.jpg and {label_file}")
    stored = read_arrays(label_file, *chosen, "classes")
    classes = class_names(stored, count, label_file)
    labels = {domain: as_labels(stored[domain], len(stored[domain]), count, label_file) for domain in chosen}
    sources = {domain: _source(folder / f"{domain}.jpg", labels[domain], copies) for domain in chosen}
    if part != "all":
        sources = {domain: _part(one, part, domain) for domain, one in sources.items()}
    return combine_domains(sources, classes, request, per_domain, draw, absent)


def _source(file: Path, labels: np.ndarray, copies: bool) -> DomainSource:
    """Return one domain, without exact copies of an image within a class unless `copies`."""
    pixels = read_labelled_tiles(file, labels, TILE)
    if not copies:
        first: dict[tuple[bytes, int], int] = {}
        for number, label in enumerate(labels):
            first.setdefault((pixels[number].tobytes(), int(label)), number)
        kept = np.array(sorted(first.values()))
        pixels, labels = pixels[kept], labels[kept]
    return DomainSource(labels, pixels.__getitem__)


def _part(source: DomainSource, part: str, domain: str) -> DomainSource:
    """Return the images of one domain that are, or are not, for testing."""
    rng = generator("part", domain)
    tested = np.zeros(len(source.labels), dtype=bool)
    for label in np.unique(source.labels):
        own = np.flatnonzero(source.labels == label)
        tested[rng.permutation(own)[: round(TESTED * len(own))]] = True
    kept = np.flatnonzero(tested if part == "test" else ~tested)
    return DomainSource(source.labels[kept], lambda index: source.read(kept[index]))


OFFICE10 = Dataset(
    "Office-Caltech-10: amazon, caltech10, dslr and webcam",
    partial(load_mosaics, name="office10"),
    mean=HALF,
    std=HALF,
    classes=10,
    flip=True,
    crop=0.6,
)
PACS = Dataset(
    "PACS: photo, art_painting, cartoon and sketch",
    partial(load_mosaics, name="pacs"),
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    classes=7,
    flip=True,
)
