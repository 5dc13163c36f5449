"""Small files in the published form of every data set."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from fedtta.data.datasets.domainnet import CLASSES as DOMAINNET_CLASSES

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def noise(count: int, seed: int = 0) -> np.ndarray:
    """Random images [count, 32, 32, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def flat(count: int, side: int, base: int, colour: bool = False) -> np.ndarray:
    """Tiles of one value each, base + number: they survive any resizing, and JPEG nearly."""
    shape = (count, side, side, 3) if colour else (count, side, side)
    return np.broadcast_to((base + np.arange(count)).reshape(-1, *[1] * (len(shape) - 1)), shape).astype(np.uint8)


def mosaic(path: Path, tiles: np.ndarray, columns: int = 4) -> None:
    """Write tiles [n, side, side(, 3)] at row k // columns, column k % columns; black tiles pad the end."""
    side = tiles.shape[1]
    canvas = np.zeros((-(-len(tiles) // columns) * side, columns * side, *tiles.shape[3:]), np.uint8)
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        canvas[row * side : row * side + side, column * side : column * side + side] = tile
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(canvas).save(path, **({"lossless": True} if path.suffix == ".webp" else {}))


def folders(root: Path, names: tuple[str, ...], count: int = 2, red: int = 10, green: int = 0) -> None:
    """Write folders of images of one colour; red is the class's index times `red`."""
    for label, name in enumerate(names):
        for number in range(count):
            path = root / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 8), (red * label, green, number)).save(path)


def cifar(root: Path, name: str = "cifar10", classes: Any = CIFAR10_CLASSES, suffix: str = "webp") -> np.ndarray:
    """Write 24 training images in two mosaics and 11 test images in one; return them, [35, 3, 32, 32]."""
    train, test = noise(24, 1), noise(11, 2)
    for number in range(2):
        mosaic(root / name / f"train_{number:02d}.{suffix}", train[12 * number : 12 * number + 12])
    mosaic(root / name / f"test_00.{suffix}", test)
    labels = {"train": np.arange(24, dtype=np.uint8) % 10, "test": np.arange(11, dtype=np.uint8) % 10}
    np.savez(root / name / "labels.npz", **labels, classes=np.array(classes))
    return np.concatenate([train, test]).transpose(0, 3, 1, 2)


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes text and bytes as Python 2 wrote its `str`, in which CIFAR's archives are published (protocol 2)."""

    dispatch = pickle._Pickler.dispatch.copy()  # type: ignore[attr-defined]

    def _save_str2(self, value: str | bytes) -> None:
        plain = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(plain)) + plain)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = _save_str2


def python2_pickle(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)


def archive(root: Path, name: str, train: tuple[Any, Any], test: tuple[Any, Any], classes: Any) -> Path:
    """Write images [n, 3, 32, 32] and labels as torchvision's archive of `name`; return its folder."""
    small = name == "cifar10"
    folder = root / ("cifar-10-batches-py" if small else "cifar-100-python")
    files = {**{f"data_batch_{i + 1}": i for i in range(5)}, "test_batch": -1} if small else {"train": 0, "test": -1}
    for file, number in files.items():
        x, y = train if number >= 0 else test
        if small and number >= 0:
            x, y = np.array_split(x, 5)[number], np.array_split(y, 5)[number]
        content = {"data": x.reshape(len(x), 3072), "labels" if small else "fine_labels": [int(one) for one in y]}
        python2_pickle(folder / file, content if small else {**content, "coarse_labels": [0] * len(y)})
    python2_pickle(
        folder / ("batches.meta" if small else "meta"), {"label_names" if small else "fine_label_names": [*classes]}
    )
    return folder


def class_folders(root: Path, name: str, train: tuple[Any, Any], test: tuple[Any, Any], classes: Any) -> Path:
    """Write images [n, 3, 32, 32] and labels as `<root>/<name>/<part>/<class>/<number>.png`."""
    for part, (x, y) in (("train", train), ("test", test)):
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            path = root / name / part / str(classes[label]) / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(path)
    return root / name


def packed(root: Path, name: str, train: tuple[Any, Any], test: tuple[Any, Any], classes: Any) -> Path:
    """Write images [n, 3, 32, 32] and labels as mosaics."""
    for part, (x, _) in (("train", train), ("test", test)):
        mosaic(root / name / f"{part}_00.webp", x.transpose(0, 2, 3, 1))
    np.savez(root / name / "labels.npz", train=train[1], test=test[1], classes=np.array(classes))
    return root / name


def cifar10_1(root: Path, version: str = "v6", count: int = 20) -> None:
    folder = root / "cifar10.1"
    folder.mkdir(exist_ok=True)
    np.save(folder / f"cifar10.1_{version}_data.npy", noise(count, 9))
    np.save(folder / f"cifar10.1_{version}_labels.npy", np.arange(count, dtype=np.int32) % 10)


def npz(root: Path, **changes: Any) -> None:
    arrays = {"x": np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4), "y": np.array([0, 1])} | changes
    np.savez(root / "data.npz", **{name: array for name, array in arrays.items() if array is not None})


def digit5(root: Path) -> None:
    """Write 20 + 10 digits of each packed domain; their value is the base, 100 more in the test part, + the number."""
    sizes = (("train", 20), ("test", 10))
    for name, side, base in (("mnist", 28, 0), ("usps", 16, 30), ("mnistm", 32, 60)):
        for part, count in sizes:
            tiles = flat(count, side, base + 100 * (part == "test"), colour=name == "mnistm")
            mosaic(root / "digits" / f"{name}_{part}.{'webp' if name == 'mnistm' else 'png'}", tiles, columns=7)
    labels = {f"{name}_{part}": np.arange(n) % 10 for name in ("mnist", "usps", "mnistm") for part, n in sizes}
    np.savez(root / "digits" / "labels.npz", **{key: one.astype(np.uint8) for key, one in labels.items()})


def matlab(root: Path, name: str, file: str, labels: Any, **changes: Any) -> np.ndarray:
    """Write one MATLAB file of Digit-5; return its images as [n, 3, 32, 32]."""
    (root / name).mkdir(exist_ok=True)
    pixels = noise(len(labels), len(labels)).transpose(1, 2, 3, 0)
    content = {"X": pixels, "y": np.asarray(labels)[:, None], **changes}
    savemat(root / name / file, {key: one for key, one in content.items() if one is not None})
    return pixels.transpose(3, 2, 0, 1)


def all_digit5(root: Path) -> None:
    digit5(root)
    for part in ("train", "test"):
        matlab(root, "svhn", f"{part}_32x32.mat", [1, 10, 3])
        matlab(root, "synthdigits", f"synth_{part}_32x32.mat", [0, 9])


def office(root: Path, folder: str = "office_caltech10", classes: int = 10, domains: Any = ("amazon", "webcam")) -> Any:
    """Write two domains; in the first image 3 is a copy of image 1, image 5 too but of another class."""
    tiles = flat(12, 64, 0, colour=True) * 10
    tiles[[3, 5]] = tiles[1]
    labels = np.array([0, 1, 2, 1, 4, 5, 6, 0, 1, 2, 3, 4], np.uint8)
    first, second = domains
    mosaic(root / folder / f"{first}.jpg", tiles)
    mosaic(root / folder / f"{second}.jpg", tiles[::-1][:5])
    arrays = {first: labels, second: labels[:5], "classes": np.array(list("abcdefghij"[:classes]))}
    np.savez(root / folder / "labels.npz", **arrays)
    return tiles


def imagenet(root: Path) -> None:
    """Write four classes, of which A and R share two; the class folders of V2 are numbers."""
    folders(root / "imagenet32", ("n01", "n02", "n03", "n04"), red=50)
    folders(root / "imagenet-a", ("n01", "n02", "n04"), count=3, green=1)
    folders(root / "imagenet-r", ("n02", "n03", "n04"), count=1, green=2)
    folders(root / "imagenet-v2", ("0", "1", "2", "3"), count=4, red=50, green=3)


def two_homes(root: Path) -> None:
    for home in ("Art", "Real World"):
        folders(root / "officehome" / home, ("Alarm_Clock", "Bike"), red=100)


#: Data set → function that writes its files into a root folder.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "digits": lambda root: None,
    "cifar10": cifar,
    "cifar100": lambda root: cifar(root, "cifar100", [f"class {k}" for k in range(100)]),
    "cifar10.1": cifar10_1,
    "folder": lambda root: folders(root, ("blue", "red")),
    "npz": npz,
    "digit5": all_digit5,
    "office10": office,
    "pacs": lambda root: office(root, "pacs64", 7, ("photo", "sketch")),
    "domainnet": lambda root: [folders(root / "domainnet" / one, DOMAINNET_CLASSES) for one in ("clipart", "sketch")],
    "officehome": two_homes,
    "imagenet32": imagenet,
    "imagenet-v2": imagenet,
    "imagenet-a": imagenet,
    "imagenet-r": imagenet,
}
