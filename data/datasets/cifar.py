"""CIFAR-10 and CIFAR-100 in any of three forms or from the hub, and CIFAR-10.1.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The training part (50,000) and the test
part (10,000) are merged, train first, as FedTHE and BTFL do before they partition the images.

CIFAR-10.1 is a new test set for CIFAR-10, the natural shift of the benchmarks of FedTHE and BTFL: B. Recht, R. Roelofs,
L. Schmidt, V. Shankar, "Do CIFAR-10 Classifiers Generalize to CIFAR-10?", 2018. Its published files are
`cifar10.1_v6_data.npy` [2000, 32, 32, 3] and `cifar10.1_v6_labels.npy` (v4: 2,021 images).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .base import Dataset, Raw, Request
from .files import (
    as_labels,
    class_names,
    labelled_files,
    read_array,
    read_arrays,
    read_images,
    read_pickle,
    read_tiles,
    reading,
    subfolders,
)

PARTS = {"all": ("train", "test"), "train": ("train",), "test": ("test",)}
SOURCES = ("auto", "packed", "torchvision", "folders", "hub")
VERSIONS = ("v6", "v4")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIZE = 32


@dataclass(frozen=True)
class _Facts:
    """What differs between the two: torchvision's folder with its files and keys, classes, the hub's label column."""

    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str
    classes: int
    column: str


_FACTS = {
    "cifar10": _Facts(
        "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",),
        "batches.meta", "labels", "label_names", 10, "label",
    ),
    "cifar100": _Facts(
        "cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names", 100, "fine_label"
    ),
}  # fmt: skip


def load_cifar(request: Request, *, name: str, source: str = "auto", part: str = "all") -> Raw:
    """Return CIFAR's images at 32 x 32.

    Parameters
    ----------
    request : Request
    name : str
        "cifar10" or "cifar100".
    source : str
        "packed": mosaics in `<root>/<name>/`. "torchvision": its extracted archive in `<root>`. "folders": images in
        `<root>/<name>/train/<class>/` and `test/<class>/`, labels in the order of the class names. "hub": the Hugging
        Face hub through flwr-datasets (has its own cache; needs `download=True`). "auto": the one of the first three
        that is present; without any and with `download=True`, torchvision's download into the root, or the hub without
        a root.
    part : str
        "all" (train, then test), "train" or "test".

    Raises
    ------
    ValueError
        Unknown source or part, several forms with "auto", a folder of this name in none of the forms, or a damaged
        file.
    FileNotFoundError
        No data found; the message lists the searched paths and how to allow a download.
    """
    if part not in PARTS:
        raise ValueError(f"unknown part {part!r}; there are: {', '.join(PARTS)}")
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; there are: {', '.join(SOURCES)}")
    chosen = _choose(request, name) if source == "auto" else source
    read = {"packed": _from_mosaics, "torchvision": _from_torchvision, "folders": _from_folders, "hub": _from_hub}[
        chosen
    ]
    return read(request, name, PARTS[part])


def _forms(root: Path, name: str) -> dict[str, Path]:
    """Return what marks each form in a root folder: a file or folder that exists where the form is present."""
    return {
        "packed": root / name / "labels.npz",
        "torchvision": root / _FACTS[name].archive,
        "folders": root / name / "train",
    }


def _choose(request: Request, name: str) -> str:
    """Return the source that "auto" stands for."""
    if request.root is None:
        if not request.download:
            raise _not_found(request, name)
        return "hub"
    forms = _forms(request.root, name)
    found = [form for form, mark in forms.items() if mark.exists()]
    if len(found) > 1:
        there = " and ".join(f"{forms[form]} ({form})" for form in found)
        raise ValueError(
            f"{name} is there in {len(found)} forms, {there}: remove one, or choose with the option source"
        )
    if found:
        return found[0]
    folder = request.root / name
    if folder.is_dir() and (inside := sorted(entry.name for entry in folder.iterdir())):
        listed = ", ".join(inside[:5]) + (", ..." if len(inside) > 5 else "")
        raise ValueError(
            f"{folder} holds {listed}: allowed are mosaics with labels.npz, or images in train/<class> and "
            f"test/<class>; torchvision's files go into {forms['torchvision']}"
        )
    if not request.download:
        raise _not_found(request, name)
    return "torchvision"


def _not_found(request: Request, name: str) -> FileNotFoundError:
    """Return the error that lists the searched paths and how to allow a download."""
    if request.root is None:
        where = "no data folder is set (give root, or set FEDTTA_DATA)"
    else:
        packed, torchvision, folders = _forms(request.root, name).values()
        where = f"looked for {packed}, {torchvision} and {folders}"
    return FileNotFoundError(f"{name} not found: {where}; a download is allowed with download=True")


def _mark(request: Request, name: str, form: str) -> Path:
    """Return what marks a form in the root, which has to be there."""
    if request.root is None or not _forms(request.root, name)[form].exists():
        raise _not_found(request, name)
    return _forms(request.root, name)[form]


def _from_mosaics(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read `train_00.webp`, ..., `test_00.webp`, ... and `labels.npz`; labels are in tile order."""
    label_file, classes = _mark(request, name, "packed"), _FACTS[name].classes
    folder = label_file.parent
    stored = read_arrays(label_file, *parts, "classes")
    names = class_names(stored, classes, label_file)
    pixels = [_part(folder, part, len(stored[part])) for part in parts]
    labels = [as_labels(stored[part], len(stored[part]), classes, label_file) for part in parts]
    return Raw(np.concatenate(pixels), np.concatenate(labels), names)


def _part(folder: Path, part: str, count: int) -> np.ndarray:
    """Return the images [count, 3, 32, 32] of one part; tiles beyond the labels pad the last file."""
    files = sorted(path for path in folder.glob(f"{part}_*") if path.suffix in (".webp", ".png"))
    if not files:
        raise ValueError(f"{folder}: no {part}_*.webp or {part}_*.png beside labels.npz")
    pixels = np.empty((count, 3, SIZE, SIZE), np.uint8)
    filled = 0
    for path in files:
        if filled >= count:
            raise ValueError(f"{path}: more mosaics than the {count} {part} labels of {folder / 'labels.npz'}")
        mosaic = read_tiles(path, SIZE)[: count - filled]
        pixels[filled : filled + len(mosaic)] = mosaic
        filled += len(mosaic)
    if filled < count:
        raise ValueError(f"{folder}: {count} {part} labels but only {filled} images in {len(files)} mosaics")
    return pixels


def _from_torchvision(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read the files that torchvision extracts, downloading them if allowed; no pickled code is run."""
    facts = _FACTS[name]
    needed = (*(file for part in parts for file in getattr(facts, part)), facts.meta)
    if request.root is not None and request.download:
        folder = request.root / facts.archive
        if not all((folder / file).is_file() for file in needed):  # also after an interrupted download
            from torchvision import datasets  # lazily: it takes seconds to import

            (datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100)(str(request.root), download=True)
    folder = _mark(request, name, "torchvision")
    if missing := [file for file in needed if not (folder / file).is_file()]:
        raise ValueError(f"{folder}: files are missing: {', '.join(missing)}")
    names = class_names(
        {"classes": np.asarray(_stored(folder / facts.meta, facts.names))}, facts.classes, folder / facts.meta
    )
    batches = [_batch(folder / file, facts) for file in needed[:-1]]
    return Raw(np.concatenate([one for one, _ in batches]), np.concatenate([one for _, one in batches]), names)


def _stored(path: Path, key: str) -> Any:
    """Return one entry of a pickled dictionary of plain values and arrays."""
    stored = read_pickle(path)
    if not isinstance(stored, dict) or key not in stored:
        there = ", ".join(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__
        raise ValueError(f"{path}: no entry {key!r}; there is: {there}")
    return stored[key]


def _batch(path: Path, facts: _Facts) -> tuple[np.ndarray, np.ndarray]:
    """Return the images [n, 3, 32, 32] and labels [n] of one of torchvision's files."""
    data = np.asarray(_stored(path, "data"))
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * SIZE * SIZE:
        raise ValueError(f"{path}: data must be uint8 [n, 3072], got {data.dtype} {data.shape}")
    labels = as_labels(np.asarray(_stored(path, facts.labels)), len(data), facts.classes, path)
    return data.reshape(-1, 3, SIZE, SIZE), labels


def _from_folders(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read `train/<class>/*.png` and `test/<class>/*.png`; both parts have all classes, every image 32 x 32."""
    top, count = _mark(request, name, "folders").parent, _FACTS[name].classes
    files: list[Path] = []
    labels: list[np.ndarray] = []
    classes = subfolders(top / "train")
    for part in parts:
        folder = top / part
        if not folder.is_dir():
            raise ValueError(f"{top}: there is no folder {part} beside {', '.join(subfolders(top))}")
        if len(own := subfolders(folder)) != count:
            raise ValueError(f"{folder}: {count} class folders are expected, got {len(own)}")
        if odd := sorted(set(own) ^ set(classes)):
            raise ValueError(f"{folder} and {top / 'train'} differ in classes: {', '.join(odd)}")
        found, numbers = labelled_files([folder / one for one in classes])
        files.extend(found)
        labels.append(numbers)
    for path in files:
        with reading(path), Image.open(path) as image:
            if image.size != (SIZE, SIZE):
                raise ValueError(f"{SIZE} x {SIZE} pixels are expected, got {image.width} x {image.height}")
    return Raw(read_images(files, SIZE), np.concatenate(labels), tuple(classes))


def _from_hub(request: Request, name: str, parts: tuple[str, ...]) -> Raw:
    """Read uoft-cs/<name> from the Hugging Face hub, through flwr-datasets."""
    if not request.download:
        raise FileNotFoundError(f"{name} from the hub needs download=True (a cached copy is used if there is one)")
    from flwr_datasets import FederatedDataset  # lazily: it takes seconds to import

    hub = FederatedDataset(dataset=f"uoft-cs/{name}", partitioners=dict.fromkeys(parts, 1), shuffle=False)
    column = _FACTS[name].column
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    classes: tuple[str, ...] = ()
    for part in parts:
        split: Any = hub.load_split(part)
        classes = tuple(split.features[column].names)
        pixels.extend(np.asarray(image.convert("RGB")) for image in split["img"])
        labels.extend(split[column])
    return Raw(np.stack(pixels).transpose(0, 3, 1, 2).copy(), np.asarray(labels, np.int64), classes)


# CIFAR-10.1 ---------------------------------------------------------------------------------------------------------


def _cifar10_1_file(root: Path, version: str, content: str) -> Path:
    return root / "cifar10.1" / f"cifar10.1_{version}_{content}.npy"


def load_cifar10_1(request: Request, *, version: str = "v6") -> Raw:
    """Return CIFAR-10.1 from the two published files in `<root>/cifar10.1/`.

    Raises
    ------
    ValueError
        Unknown version, or a file that is damaged or has the wrong shape.
    FileNotFoundError
        The files do not exist. They are never downloaded: their authors publish them in their repository only.
    """
    if version not in VERSIONS:
        raise ValueError(f"unknown version {version!r}; there are: {', '.join(VERSIONS)}")
    if request.root is None or not _cifar10_1_file(request.root, version, "data").is_file():
        where = "no root is given" if request.root is None else f"looked in {request.root / 'cifar10.1'}"
        raise FileNotFoundError(
            f"CIFAR-10.1 not found: {where}; it needs cifar10.1_{version}_data.npy and "
            f"cifar10.1_{version}_labels.npy, published in the repository modestyachts/CIFAR-10.1"
        )
    data_file, label_file = (_cifar10_1_file(request.root, version, content) for content in ("data", "labels"))
    if not label_file.is_file():
        raise FileNotFoundError(f"{label_file} is missing")
    pixels = read_array(data_file)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (SIZE, SIZE, 3):
        raise ValueError(f"{data_file}: uint8 [N, 32, 32, 3] is expected, got {pixels.dtype} {pixels.shape}")
    labels = as_labels(read_array(label_file), len(pixels), len(CLASSES), label_file)
    return Raw(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels, CLASSES)


CIFAR10 = Dataset(
    "CIFAR-10, 60,000 images (train and test merged)",
    partial(load_cifar, name="cifar10"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=10,
    flip=True,
    natural=("cifar10.1",),
)
CIFAR100 = Dataset(
    "CIFAR-100 with its 100 fine classes, 60,000 images (train and test merged)",
    partial(load_cifar, name="cifar100"),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=100,
    flip=True,
)
CIFAR10_1 = Dataset(
    "CIFAR-10.1, 2,000 new test images for CIFAR-10 (a natural shift)",
    load_cifar10_1,
    mean=CIFAR10.mean,
    std=CIFAR10.std,
    classes=10,
    flip=True,
    present=lambda root: _cifar10_1_file(root, "v6", "data").is_file(),
)
