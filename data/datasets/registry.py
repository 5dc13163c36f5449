"""The data set registry: every data set by name, and `load`."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ..images import Images
from .base import Dataset, Request, to_images
from .cifar import CIFAR10, CIFAR10_1, CIFAR100
from .digit5 import DIGIT5
from .digits import DIGITS
from .domainnet import DOMAINNET, OFFICEHOME
from .folder import FOLDER
from .imagenet32 import IMAGENET32, IMAGENET_A, IMAGENET_R, IMAGENET_V2
from .multi_domain import MultiDomainRaw
from .npz import NPZ
from .office10 import OFFICE10, PACS

#: Environment variable with the default data folder.
ROOT_VARIABLE = "FEDTTA_DATA"

DATASETS: dict[str, Dataset] = {
    "digits": DIGITS,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "cifar10.1": CIFAR10_1,
    "folder": FOLDER,
    "npz": NPZ,
    "digit5": DIGIT5,
    "office10": OFFICE10,
    "pacs": PACS,
    "domainnet": DOMAINNET,
    "officehome": OFFICEHOME,
    "imagenet32": IMAGENET32,
    "imagenet-v2": IMAGENET_V2,
    "imagenet-a": IMAGENET_A,
    "imagenet-r": IMAGENET_R,
}


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
    """Load a data set; the last ones are cached, so clients of one process share one read-only copy.

    Parameters
    ----------
    name : str
        A name in `DATASETS`.
    root : path, optional
        Data folder; None: the environment variable FEDTTA_DATA, if set.
    image_size, channels : int
        Images have `channels` (1 or 3) x `image_size` x `image_size` pixels.
    download : bool
        Allow a download if the data set supports it.
    fraction : float
        Keep this share of every class, in (0, 1], drawn from `seed`.
    seed : int
        Decides only which images `fraction` keeps.
    options
        Options of this data set (`DATASETS[name].options`), typed or as text.

    Raises
    ------
    ValueError
        Unknown data set or option (lists the known ones), a bad value, or a damaged file (named).
    FileNotFoundError
        The data does not exist; the message lists the searched paths.
    """
    described = _described(name)
    unknown = sorted(set(options) - set(described.options))
    if unknown:
        there = ", ".join(described.options) or "none"
        raise ValueError(f"unknown option {unknown[0]!r} of data set {name!r}; there are: {there}")
    typed = {option: described.typed(option, value) for option, value in options.items()}
    found = _root(root)
    # Without a fraction the seed has no effect and must not create a second copy.
    used_seed = 0 if fraction == 1.0 else seed
    return _load(name, found, image_size, channels, download, fraction, used_seed, tuple(sorted(typed.items())))


def load_natural(
    name: str,
    root: str | os.PathLike[str] | None = None,
    image_size: int = 32,
    channels: int = 3,
    natural: Hashable = "",
) -> Images | None:
    """Load a natural shift of data set `name` (CIFAR-10.1 for CIFAR-10); None if there is none or it is not available.

    `natural` is the data set's option of that name; empty: its default. Damaged files raise as in `load`.

    Raises
    ------
    ValueError
        As `load`, or `natural` is not a natural shift of this data set.
    """
    natural_shifts = _described(name).natural
    if natural and natural not in natural_shifts:
        raise ValueError(f"natural = {natural!r}: allowed with data set {name!r} are {', '.join(natural_shifts)}")
    if not natural_shifts:
        return None
    chosen = str(natural or natural_shifts[0])
    folder, present = _root(root), DATASETS[chosen].present
    if folder is None or present is None or not present(folder):
        return None
    return load(chosen, folder, image_size, channels)


def _described(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; there are: {', '.join(DATASETS)}")
    return DATASETS[name]


def _root(root: str | os.PathLike[str] | None) -> Path | None:
    """Return the data folder: the given one, else that of the environment, else None."""
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
    images = to_images(raw, name, image_size, channels)
    if isinstance(raw, MultiDomainRaw):
        complete = f"{name} without {', '.join(raw.absent)}" if raw.absent else name
        images = replace(images, name=complete, domains=raw.domains, domain=raw.domain)
    return images.stratified(fraction, seed)
