"""DomainNet cut to ten classes, as FedICON takes it from FedBN.

X. Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019: six domains of 345 classes. X. Li et
al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021: the ten most common
classes, which the published code of FedBN names. FedICON and FedBN give no number of pictures that every domain has;
2,000 is ours.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .folder import SUFFIXES, picture
from .raw import Request
from .shelves import DomainRaw, Shelf, choose, join

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip


def load_domainnet(request: Request, *, domains: str = "", per_domain: int = 2000, draw: int = 0) -> DomainRaw:
    """Return the pictures of several domains at `image_size`; only those drawn are decoded.

    Parameters
    ----------
    request : Request
        Its root holds `domainnet/<domain>/<class>/*.jpg`, as the published archives unpack.
    domains : str
        Names with commas between them; empty: those at hand, and the images' name says which are not.
    per_domain : int
        Pictures of each domain, classes as even as they can be; 0: all.
    draw : int
        Decides which ones.

    Raises
    ------
    ValueError
        An unknown domain, a bad number, a class folder without a picture, or a damaged picture.
    FileNotFoundError
        A domain that is asked for is not at hand.
    """
    if request.root is None:
        raise FileNotFoundError("domainnet needs root (or FEDTTA_DATA)")
    top = request.root / "domainnet"
    present = {domain: (top / domain).is_dir() for domain in DOMAINS}
    chosen = choose(domains, present, "domainnet", f"{top}/<domain>/<class>/*.jpg, class one of {', '.join(CLASSES)}")
    absent = () if domains else tuple(domain for domain in DOMAINS if not present[domain])
    shelves = {domain: _shelf(top / domain, request.image_size) for domain in chosen}
    return join(shelves, CLASSES, request, per_domain, draw, absent)


def _shelf(folder: Path, size: int) -> Shelf:
    """List one domain's files, class by class in the order of their names."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(CLASSES):
        inside = folder / name
        found = sorted(one for one in inside.glob("*") if one.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{inside} holds no picture ({', '.join(SUFFIXES)})")
        files.extend(found)
        labels.extend([label] * len(found))
    return Shelf(np.array(labels), lambda chosen: np.stack([picture(files[one], size) for one in chosen]))
