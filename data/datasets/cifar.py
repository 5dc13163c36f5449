"""CIFAR-10 and CIFAR-100, from whichever of three sources is at hand.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The training part (50,000) and
the test part (10,000) are merged, train first, as FedTHE and BTFL do before they deal the pictures out to
clients.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .mosaics import is_packed, load_packed
from .raw import Raw, Request

PARTS = {"all": ("train", "test"), "train": ("train",), "test": ("test",)}
SOURCES = ("auto", "packed", "torchvision", "hub")

#: Name → (torchvision's folder, number of classes, label column of uoft-cs/<name> on the hub).
_FACTS = {
    "cifar10": ("cifar-10-batches-py", 10, "label"),
    "cifar100": ("cifar-100-python", 100, "fine_label"),
}


def load_cifar(request: Request, *, name: str, source: str = "auto", part: str = "all") -> Raw:
    """Return CIFAR's pictures at 32 x 32.

    Parameters
    ----------
    request : Request
        Where to look, and whether a download is allowed.
    name : str
        "cifar10" or "cifar100".
    source : str
        "packed": mosaics in `<root>/<name>/`. "torchvision": its extracted archive in `<root>`. "hub": the
        Hugging Face hub through flwr-datasets (keeps its own cache; needs `download=True`). "auto": the first
        of packed and torchvision that is present; otherwise, with `download=True`, torchvision's download
        into the root, or the hub without a root.
    part : str
        "all" (train, then test), "train" or "test".

    Raises
    ------
    ValueError
        An unknown source or part, or a damaged file.
    FileNotFoundError
        Nothing is there; the message says where it looked and how to allow a download.
    """
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; there are: {', '.join(PARTS)}")
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; there are: {', '.join(SOURCES)}")
    chosen = _choose(request, name) if source == "auto" else source
    if chosen == "packed":
        folder = _root(request, name) / name
        if not is_packed(folder):
            raise _absent(request, name)
        return load_packed(folder, PARTS[part], _FACTS[name][1])
    if chosen == "torchvision":
        return _from_torchvision(request, name, PARTS[part])
    return _from_hub(request, name, PARTS[part])


load_cifar10 = partial(load_cifar, name="cifar10")
load_cifar100 = partial(load_cifar, name="cifar100")


def _choose(request: Request, name: str) -> str:
    """Return the source that "auto" stands for, by what is present."""
    if request.root is not None and is_packed(request.root / name):
        return "packed"
    if request.root is not None and (request.root / _FACTS[name][0]).is_dir():
        return "torchvision"
    if not request.download:
        raise _absent(request, name)
    return "hub" if request.root is None else "torchvision"


def _root(request: Request, name: str) -> Path:
    """Return the root, or say that one is needed."""
    if request.root is None:
        raise _absent(request, name)
    return request.root


def _absent(request: Request, name: str) -> FileNotFoundError:
    """Return the error that says where it looked and what to do."""
    if request.root is None:
        where = "no folder to look in (give root, or set FEDTTA_DATA)"
    else:
        where = f"looked for {request.root / name / 'labels.npz'} and {request.root / _FACTS[name][0]}"
    return FileNotFoundError(f"{name} is not there: {where}; a download is allowed with download=True")


def _from_torchvision(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read torchvision's files (checked by their MD5), downloading them where that is allowed."""
    root = _root(request, name)
    folder = root / _FACTS[name][0]
    if not folder.is_dir() and not request.download:
        raise _absent(request, name)
    from torchvision import datasets  # lazily: it takes seconds to import

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        loaded = [kind(str(root), train=part == "train", download=request.download) for part in parts]
    except RuntimeError as error:
        raise ValueError(f"{folder}: files are missing or damaged ({error})") from error
    pixels = np.concatenate([one.data for one in loaded]).transpose(0, 3, 1, 2)
    labels = np.concatenate([np.asarray(one.targets, np.int64) for one in loaded])
    return Raw(np.ascontiguousarray(pixels), labels, tuple(loaded[0].classes))


def _from_hub(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read uoft-cs/<name> from the Hugging Face hub, through flwr-datasets."""
    if not request.download:
        raise FileNotFoundError(f"{name} from the hub needs download=True (a cached copy is used where there is one)")
    from flwr_datasets import FederatedDataset  # lazily: it takes seconds to import

    hub = FederatedDataset(dataset=f"uoft-cs/{name}", partitioners=dict.fromkeys(parts, 1), shuffle=False)
    column = _FACTS[name][2]
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    classes: tuple[str, ...] = ()
    for part in parts:
        split: Any = hub.load_split(part)
        classes = tuple(split.features[column].names)
        pixels.extend(np.asarray(picture.convert("RGB")) for picture in split["img"])
        labels.extend(split[column])
    return Raw(np.stack(pixels).transpose(0, 3, 1, 2).copy(), np.asarray(labels, np.int64), classes)
