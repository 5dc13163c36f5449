"""Folders of domains and classes: DomainNet cut to ten classes, as FedICON takes it from FedBN, and OfficeHome.

X. Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019: six domains of 345 classes. X. Li et
al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021: the ten most common
classes, which the published code of FedBN names. FedICON and FedBN give no number of pictures that every domain has;
2,000 is ours. H. Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation", CVPR 2017: OfficeHome,
15,588 pictures of 65 classes in four domains (BTFL).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .folder import SUFFIXES, picture, subfolders
from .raw import Request
from .shelves import DomainRaw, Shelf, choose, join

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
#: OfficeHome: domain → its folder in the published archive.
HOMES = {"art": "Art", "clipart": "Clipart", "product": "Product", "real_world": "Real World"}


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
    shelves = {domain: _shelf(top / domain, CLASSES, request.image_size) for domain in chosen}
    return join(shelves, CLASSES, request, per_domain, draw, absent)


def load_officehome(request: Request, *, domains: str = "", per_domain: int = 0, draw: int = 0) -> DomainRaw:
    """Return OfficeHome's pictures of several domains at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds `officehome/<domain>/<class>/*.jpg`, domains as the published archive names them (HOMES).
    domains, per_domain, draw
        As in `load_domainnet`; all pictures are taken unless `per_domain` says otherwise.

    Raises
    ------
    ValueError, FileNotFoundError
        As in `load_domainnet`, or the domains do not have the same classes.
    """
    if request.root is None:
        raise FileNotFoundError("officehome needs root (or FEDTTA_DATA)")
    folders = {domain: request.root / "officehome" / name for domain, name in HOMES.items()}
    present = {domain: folder.is_dir() for domain, folder in folders.items()}
    where = f"{request.root / 'officehome'}/<{', '.join(HOMES.values())}>/<class>/*.jpg"
    chosen = choose(domains, present, "officehome", where)
    absent = () if domains else tuple(domain for domain in HOMES if not present[domain])
    classes = {domain: tuple(subfolders(folders[domain])) for domain in chosen}
    first = classes[chosen[0]]
    for domain, own in classes.items():
        if different := sorted(set(own) ^ set(first)):
            raise ValueError(f"{folders[domain]} and {folders[chosen[0]]} differ in classes: {', '.join(different)}")
    shelves = {domain: _shelf(folders[domain], first, request.image_size) for domain in chosen}
    return join(shelves, first, request, per_domain, draw, absent)


def _shelf(folder: Path, classes: tuple[str, ...], size: int) -> Shelf:
    """List one domain's files, class by class in the order of their names."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = folder / name
        found = sorted(one for one in inside.glob("*") if one.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{inside} holds no picture ({', '.join(SUFFIXES)})")
        files.extend(found)
        labels.extend([label] * len(found))
    return Shelf(np.array(labels), lambda chosen: np.stack([picture(files[one], size) for one in chosen]))
