"""DomainNet cut to ten classes, as FedICON takes it from FedBN, and OfficeHome: folders of domains and classes.

X. Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019: six domains of 345 classes. X. Li et
al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021: the ten most common
classes, named in the published code of FedBN. FedICON and FedBN do not give a number of images that every domain has;
2,000 is our choice. H. Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation", CVPR 2017:
OfficeHome, 15,588 images of 65 classes in four domains (BTFL).
"""

from __future__ import annotations

from pathlib import Path

from .base import IMAGENET_MEAN, IMAGENET_STD, Dataset, Request
from .files import labelled_files, read_images, subfolders
from .multi_domain import DomainSource, MultiDomainRaw, combine_domains, select_domains

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CLASSES = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip
#: OfficeHome: domain → its folder in the published archive.
HOMES = {"art": "Art", "clipart": "Clipart", "product": "Product", "real_world": "Real World"}


def load_domainnet(request: Request, *, domains: str = "", per_domain: int = 2000, draw: int = 0) -> MultiDomainRaw:
    """Return the images of several domains at `image_size`; only sampled images are decoded.

    Parameters
    ----------
    request : Request
        Its root holds `domainnet/<domain>/<class>/*.jpg`, as the published archives unpack.
    domains, per_domain, draw
        See `select_domains` and `combine_domains`.

    Raises
    ------
    ValueError
        Unknown domain, a bad number, a class folder without an image, or a damaged image.
    FileNotFoundError
        A requested domain is not available.
    """
    if request.root is None:
        raise FileNotFoundError("domainnet needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
    top = request.root / "domainnet"
    available = {domain: (top / domain).is_dir() for domain in DOMAINS}
    expected = f"{top}/<domain>/<class>/*.jpg, class one of {', '.join(CLASSES)}"
    chosen, absent = select_domains(domains, available, "domainnet", expected)
    sources = {domain: _source(top / domain, CLASSES, request.image_size) for domain in chosen}
    return combine_domains(sources, CLASSES, request, per_domain, draw, absent)


def load_officehome(request: Request, *, domains: str = "", per_domain: int = 0, draw: int = 0) -> MultiDomainRaw:
    """Return OfficeHome's images of several domains at `image_size`.

    Parameters
    ----------
    request : Request
        Its root holds `officehome/<domain>/<class>/*.jpg`, with the domain folders of the published archive (`HOMES`).
    domains, per_domain, draw
        See `select_domains` and `combine_domains`.

    Raises
    ------
    ValueError, FileNotFoundError
        As `load_domainnet`, or the domains have different classes.
    """
    if request.root is None:
        raise FileNotFoundError("officehome needs a data folder: data-dir, or the environment variable FEDTTA_DATA")
    top = request.root / "officehome"
    folders = {domain: top / name for domain, name in HOMES.items()}
    available = {domain: folder.is_dir() for domain, folder in folders.items()}
    expected = f"{top}/<{', '.join(HOMES.values())}>/<class>/*.jpg"
    chosen, absent = select_domains(domains, available, "officehome", expected)
    classes = {domain: tuple(subfolders(folders[domain])) for domain in chosen}
    first = classes[chosen[0]]
    for domain, own in classes.items():
        if different := sorted(set(own) ^ set(first)):
            raise ValueError(f"{folders[domain]} and {folders[chosen[0]]} differ in classes: {', '.join(different)}")
    sources = {domain: _source(folders[domain], first, request.image_size) for domain in chosen}
    return combine_domains(sources, first, request, per_domain, draw, absent)


def _source(folder: Path, classes: tuple[str, ...], size: int) -> DomainSource:
    """Return one domain from its class folders."""
    files, labels = labelled_files([folder / name for name in classes])
    return DomainSource(labels, lambda chosen: read_images([files[one] for one in chosen], size))


DOMAINNET = Dataset(
    "DomainNet's ten most common classes in its six domains, 2,000 images per domain",
    load_domainnet,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    classes=len(CLASSES),
    flip=True,
)
OFFICEHOME = Dataset(
    "OfficeHome: art, clipart, product and real_world, from its folders",
    load_officehome,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    classes=None,
    flip=True,
)
