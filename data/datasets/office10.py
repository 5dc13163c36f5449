"""Office-Caltech-10 and PACS, packed as one mosaic of 64 x 64 tiles a domain.

B. Gong et al., "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012 (Office-10 in FedICON); D. Li et
al., "Deeper, Broader and Artier Domain Generalization", ICCV 2017 (PACS in ATP). Neither comes with a split.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from .mosaics import tiles
from .raw import Request, as_labels, read_arrays
from .shelves import DomainRaw, Shelf, choose, join

_TILE = 64

#: Name → (folder below the root, domains, number of classes).
_FACTS = {
    "office10": ("office_caltech10", ("amazon", "caltech10", "dslr", "webcam"), 10),
    "pacs": ("pacs64", ("photo", "art_painting", "cartoon", "sketch"), 7),
}


def load_mosaics(
    request: Request, *, name: str, domains: str = "", per_domain: int = 0, draw: int = 0, copies: bool = False
) -> DomainRaw:
    """Return the pictures of several domains at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds the folder office_caltech10 or pacs64 with `<domain>.jpg` and `labels.npz`.
    name : str
        "office10" or "pacs".
    domains : str
        Names with commas between them; empty: those at hand, and the images' name says which are not.
    per_domain : int
        Pictures of each domain at most, classes as even as they can be; 0: all.
    draw : int
        Decides which ones.
    copies : bool
        Keep exact copies of a picture. Office-10 has 26 (25 in amazon, 1 in caltech10); with them the counts are the
        published ones, and a client may be tested on a picture that it was trained on.

    Raises
    ------
    ValueError
        An unknown domain, a bad number, or a damaged file.
    FileNotFoundError
        A domain that is asked for is not at hand.
    """
    if type(copies) is not bool:
        raise ValueError(f"copies={copies!r} must be true or false")
    if request.root is None:
        raise FileNotFoundError(f"{name} needs root (or FEDTTA_DATA)")
    below, known, count = _FACTS[name]
    folder = request.root / below
    present = {domain: (folder / f"{domain}.jpg").is_file() for domain in known}
    chosen = choose(domains, present, name, f"{folder}/<domain>.jpg and {folder}/labels.npz")
    label_file = folder / "labels.npz"
    stored = read_arrays(label_file)
    missing = [key for key in (*chosen, "classes") if key not in stored]
    if missing:
        raise ValueError(f"{label_file}: no array {missing[0]!r}; there are: {', '.join(sorted(stored))}")
    classes = tuple(str(one) for one in stored["classes"])
    if len(classes) != count:
        raise ValueError(f"{label_file}: {count} class names are expected, got {len(classes)}")
    absent = () if domains else tuple(domain for domain in known if not present[domain])
    shelves = {domain: _shelf(folder / f"{domain}.jpg", stored[domain], count, label_file, copies) for domain in chosen}
    return join(shelves, classes, request, per_domain, draw, absent)


load_office10 = partial(load_mosaics, name="office10")
load_pacs = partial(load_mosaics, name="pacs")


def _shelf(file: Path, labels: np.ndarray, count: int, label_file: Path, copies: bool) -> Shelf:
    """Return one domain, without copies of a picture in one class unless they are wanted."""
    pixels = tiles(file, _TILE)
    labels = as_labels(labels, len(labels), count, label_file)
    if len(pixels) < len(labels):
        raise ValueError(f"{file}: {len(labels)} labels but only {len(pixels)} tiles")
    if not copies:
        first: dict[tuple[bytes, int], int] = {}
        for number, label in enumerate(labels):
            first.setdefault((pixels[number].tobytes(), int(label)), number)
        kept = np.array(sorted(first.values()))
        pixels, labels = pixels[kept], labels[kept]
    return Shelf(labels, pixels.__getitem__)
