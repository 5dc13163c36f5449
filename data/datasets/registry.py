"""The data sets by name: what they are, how they are normalised, and one function that loads any of them."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..images import Images
from . import imagenet32
from .cifar import load_cifar10, load_cifar100
from .cifar10_1 import is_present, load_cifar10_1
from .digit5 import load_digit5
from .digits import load_digits
from .domainnet import load_domainnet, load_officehome
from .folder import load_folder
from .imagenet32 import load_imagenet32, load_imagenet_a, load_imagenet_r, load_imagenet_v2
from .npz import load_npz
from .office10 import load_office10, load_pacs
from .raw import Loader, Request, finish
from .shelves import DomainRaw

#: Where data is looked for when no root is given.
ROOT_VARIABLE = "FEDTTA_DATA"

RGB = tuple[float, float, float]
_CIFAR10_MEAN, _CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR100_MEAN, _CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
_HALF: RGB = (0.5, 0.5, 0.5)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SEVERAL = ("domains", "per_domain", "draw")


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set before it is loaded.

    `mean` and `std` are per channel, of pixels in [0, 1]; `classes` is None where the files decide; `flip`
    says whether a mirrored picture still belongs to its class; `options` are the names that its loader takes;
    `natural` names the data sets that are its natural shifts, the usual one first; of a contrastive view at least
    `crop` of the area is left. The default is Khosla et al.'s for CIFAR; less than six tenths of a digit may be another
    digit, and of Office-10's scenes at 32 x 32 pixels nothing that tells its class (a linear probe on corrupted
    validation images, seed 1, after 10 encoder rounds at learning rate 0.05: 58.5 % right with 0.6, 53.1 % with 0.2).
    """

    description: str
    loader: Loader
    mean: RGB
    std: RGB
    classes: int | None
    flip: bool
    options: tuple[str, ...] = ()
    natural: tuple[str, ...] = ()
    crop: float = 0.2

    def normalisation(self, channels: int = 3) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) for 3 channels, or their averages for grey pictures."""
        if channels == 3:
            return self.mean, self.std
        return (sum(self.mean) / 3,), (sum(self.std) / 3,)


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(
        "scikit-learn's 1,797 handwritten digits, 8 x 8 grey, embedded: no download",
        load_digits, (0.3053, 0.3053, 0.3053), (0.3236, 0.3236, 0.3236), 10, flip=False, crop=0.6,
    ),
    "cifar10": Dataset(
        "CIFAR-10, 60,000 pictures (train and test merged)",
        load_cifar10, _CIFAR10_MEAN, _CIFAR10_STD, 10, flip=True,
        options=("source", "part"), natural=("cifar10.1",),
    ),
    "cifar100": Dataset(
        "CIFAR-100 with its 100 fine classes, 60,000 pictures (train and test merged)",
        load_cifar100, _CIFAR100_MEAN, _CIFAR100_STD, 100, flip=True, options=("source", "part"),
    ),
    "cifar10.1": Dataset(
        "CIFAR-10.1, 2,000 new test pictures for CIFAR-10 (a natural shift)",
        load_cifar10_1, _CIFAR10_MEAN, _CIFAR10_STD, 10, flip=True, options=("version",),
    ),
    "folder": Dataset(
        "pictures of your own: root/<class>/*.png, or root/<domain>/<class>/*.png",
        load_folder, _HALF, _HALF, None, flip=True, options=("path", "domain"),
    ),
    "npz": Dataset(
        "pictures of your own: an .npz file with x and y (never mirrored: what they show is not known)",
        load_npz, _HALF, _HALF, None, flip=False, options=("path", "layout"),
    ),
    "digit5": Dataset(
        "Digit-5: MNIST, SVHN, USPS, SynthDigits and MNIST-M, those at hand, 2,000 pictures a domain",
        load_digit5, _HALF, _HALF, 10, flip=False, options=_SEVERAL, crop=0.6,
    ),
    "office10": Dataset(
        "Office-Caltech-10: amazon, caltech10, dslr and webcam",
        load_office10, _HALF, _HALF, 10, flip=True, options=(*_SEVERAL, "copies"), crop=0.6,
    ),
    "pacs": Dataset(
        "PACS: photo, art_painting, cartoon and sketch",
        load_pacs, _IMAGENET_MEAN, _IMAGENET_STD, 7, flip=True, options=(*_SEVERAL, "copies"),
    ),
    "domainnet": Dataset(
        "DomainNet's ten most common classes in its six domains, 2,000 pictures a domain",
        load_domainnet, _IMAGENET_MEAN, _IMAGENET_STD, 10, flip=True, options=_SEVERAL,
    ),
    "officehome": Dataset(
        "OfficeHome: art, clipart, product and real_world, from its folders",
        load_officehome, _IMAGENET_MEAN, _IMAGENET_STD, None, flip=True, options=_SEVERAL,
    ),
    "imagenet32": Dataset(
        "ImageNet at 32 x 32, from folders, the classes that ImageNet-A and -R have too",
        load_imagenet32, _IMAGENET_MEAN, _IMAGENET_STD, None, flip=True, options=("natural",),
        natural=("imagenet-v2", "imagenet-a", "imagenet-r"),
    ),
    **{
        name: Dataset(f"{name}, a natural shift of imagenet32", loader, _IMAGENET_MEAN, _IMAGENET_STD, None, flip=True)
        for name, loader in (
            ("imagenet-v2", load_imagenet_v2), ("imagenet-a", load_imagenet_a), ("imagenet-r", load_imagenet_r),
        )
    },
}  # fmt: skip


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    image_size: int = 32,
    channels: int = 3,
    download: bool = False,
    fraction: float = 1.0,
    seed: int = 0,
    **options: Hashable,
) -> Images:
    """Load a data set; what was loaded last is kept, so clients in one process share one (read-only) copy.

    Parameters
    ----------
    name : str
        A name in `DATASETS`.
    root : path, optional
        Where to look; None means the environment variable FEDTTA_DATA, and nowhere if that is not set.
    image_size, channels : int
        Pictures come out as `channels` (1 or 3) x `image_size` x `image_size`.
    download : bool
        Allow a download where the source has one.
    fraction : float
        Keep this share of every class, in (0, 1], drawn from `seed`.
    seed : int
        Decides which pictures `fraction` keeps, nothing else.
    options
        What this data set's loader takes besides (`DATASETS[name].options`).

    Raises
    ------
    ValueError
        An unknown data set or option (lists what there is), a bad value, or a damaged file (named).
    FileNotFoundError
        The data is not there; the message says where it looked.
    """
    described = _described(name)
    unknown = sorted(set(options) - set(described.options))
    if unknown:
        there = ", ".join(described.options) or "none"
        raise ValueError(f"unknown option {unknown[0]!r} of data set {name!r}; there are: {there}")
    found = _root(root)
    # A seed that decides nothing must not make a second copy.
    used_seed = 0 if fraction == 1.0 else seed
    return _load(name, found, image_size, channels, download, fraction, used_seed, tuple(sorted(options.items())))


def load_natural(
    name: str,
    root: str | os.PathLike[str] | None = None,
    image_size: int = 32,
    channels: int = 3,
    natural: Hashable = "",
) -> Images | None:
    """Load a natural shift of data set `name` (CIFAR-10.1 for CIFAR-10); None if it is not at hand, or there is none.

    `natural` is the data set's option of that name; empty: the usual one. Files that are damaged raise as in `load`.

    Raises
    ------
    ValueError
        As `load`, or `natural` is none of this data set's.
    """
    known = _described(name).natural
    if natural and natural not in known:
        raise ValueError(f"natural = {natural!r}: allowed with data set {name!r} are {', '.join(known)}")
    if not known:
        return None
    chosen = str(natural or known[0])
    there = is_present(_root(root)) if chosen == "cifar10.1" else imagenet32.is_present(_root(root), chosen)
    return load(chosen, root, image_size, channels) if there else None


def _described(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; there are: {', '.join(DATASETS)}")
    return DATASETS[name]


def _root(root: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder to look in: what was given, else the environment's, else None."""
    given = os.environ.get(ROOT_VARIABLE) if root is None else root
    return Path(given).expanduser() if given else None


@lru_cache(maxsize=4)
def _load(
    name: str,
    root: Path | None,
    image_size: int,
    channels: int,
    download: bool,
    fraction: float,
    seed: int,
    options: tuple[tuple[str, Hashable], ...],
) -> Images:
    raw = DATASETS[name].loader(Request(root, image_size, download), **dict(options))
    images = finish(raw, name, image_size, channels)
    if isinstance(raw, DomainRaw):
        known = f"{name} without {', '.join(raw.absent)}" if raw.absent else name
        images = replace(images, name=known, domains=raw.domains, domain=raw.domain)
    return images.stratified(fraction, seed)
