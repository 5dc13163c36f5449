"""What each data set reads from its files: values, labels, and errors of its own format."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional

from fedtta.data import DATASETS, load
from fedtta.data.datasets.domainnet import CLASSES
from tests.data import files


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTTA_DATA", raising=False)


# digits -------------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns() -> None:
    real, made = load_digits(), load("digits")
    wanted = functional.interpolate(
        torch.tensor(real.images[:, None] / 16.0), size=(32, 32), mode="bilinear", align_corners=False
    )
    assert made.pixels.shape == (1797, 3, 32, 32)
    assert made.classes == tuple("0123456789")
    np.testing.assert_array_equal(made.labels, real.target)
    x = made.batch(np.arange(1797)).double()
    assert float((x - wanted).abs().max()) <= 0.5 / 255 + 1e-6  # rounded once
    mean, std = DATASETS["digits"].normalisation(1)
    np.testing.assert_allclose([x.mean(), x.std()], [mean[0], std[0]], atol=1e-3)
    small = load("digits", image_size=8, channels=1)
    np.testing.assert_array_equal(small.pixels[:, 0], np.round(real.images * 255 / 16).astype(np.uint8))
    half = load("digits", fraction=0.5, seed=3)
    assert np.bincount(half.labels).tolist() == [round(n / 2) for n in np.bincount(made.labels)]


# CIFAR --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["webp", "png"])
def test_cifar_from_mosaics(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = files.cifar(tmp_path, suffix=suffix)
    labels = [*(np.arange(24) % 10), *(np.arange(11) % 10)]
    made = load("cifar10", root=tmp_path)
    np.testing.assert_array_equal(made.pixels, pixels)
    assert made.labels.tolist() == labels
    assert made.classes == files.CIFAR10_CLASSES
    np.testing.assert_array_equal(load("cifar10", root=tmp_path, source="packed").pixels, pixels)
    np.testing.assert_array_equal(load("cifar10", root=tmp_path, part="train").pixels, pixels[:24])
    assert load("cifar10", root=tmp_path, part="test").labels.tolist() == labels[24:]
    monkeypatch.setenv("FEDTTA_DATA", str(tmp_path))
    assert load("cifar10") is made


def label_file(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "labels.npz", **({"classes": np.array(files.CIFAR10_CLASSES)} | arrays))


TRAIN, TEST = np.zeros(24, int), np.zeros(11, int)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: label_file(f, train=TRAIN + 10, test=TEST), r"labels\.npz: label 10 at 0 is not an integer from 0"),
        (lambda f: label_file(f, train=TRAIN), r"labels\.npz: no array 'test'; there are: classes, train"),
        (lambda f: label_file(f, train=TRAIN, test=TEST, classes=np.array(["a"])), "10 class names are expected, got"),
        (lambda f: (f / "train_01.webp").unlink(), "24 train labels but only 12 images in 1 mosaics"),
        (lambda f: files.mosaic(f / "train_02.webp", files.noise(4)), r"train_02\.webp: more mosaics than the 24"),
        (lambda f: (f / "test_00.webp").unlink(), r"no test_\*\.webp"),
        (
            lambda f: Image.new("RGB", (64, 40)).save(f / "test_00.webp", lossless=True),
            r"test_00\.webp: a mosaic of 32 x 32 RGB tiles is expected, got \(40, 64, 3\)",
        ),
    ],
)  # fmt: skip
def test_mosaics_that_do_not_match_their_labels(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    files.cifar(tmp_path)
    damage(tmp_path / "cifar10")
    with pytest.raises(ValueError, match=message):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("form", ["packed", "folders"])
def test_more_pixels_than_pillow_reads_are_damage(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "packed":
        files.cifar(tmp_path)
    else:
        files.class_folders(tmp_path, "cifar10", *two_parts(10), files.CIFAR10_CLASSES)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"(webp|png) is damaged or has another format: .* exceeds limit"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("source", ["auto", "packed", "torchvision", "folders"])
def test_missing_cifar_says_how_to_download(tmp_path: Path, source: str) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"looked for .*labels\.npz, .*cifar-10-batches-py and .*train.*download=True"
    ):
        load("cifar10", root=tmp_path, source=source)
    with pytest.raises(FileNotFoundError, match="give root, or set FEDTTA_DATA"):
        load("cifar10", source=source)


HUNDRED = tuple(f"class {k:02d}" for k in range(100))


def two_parts(classes: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Two training images and one test image of every class, in the order of the classes."""
    parts = [(files.noise(n * classes, n).transpose(0, 3, 1, 2), np.repeat(np.arange(classes), n)) for n in (2, 1)]
    return parts[0], parts[1]


@pytest.mark.parametrize("write", [files.archive, files.packed, files.class_folders])
@pytest.mark.parametrize(("name", "classes"), [("cifar10", files.CIFAR10_CLASSES), ("cifar100", HUNDRED)])
def test_all_forms_give_the_same_images(tmp_path: Path, name: str, classes: tuple[str, ...], write: Any) -> None:
    train, test = two_parts(len(classes))
    write(tmp_path, name, train, test, classes)
    made = load(name, root=tmp_path)
    np.testing.assert_array_equal(made.pixels, np.concatenate([train[0], test[0]]))
    np.testing.assert_array_equal(made.labels, np.concatenate([train[1], test[1]]))
    assert made.classes == classes
    np.testing.assert_array_equal(load(name, root=tmp_path, part="test").pixels, test[0])
    source = {files.archive: "torchvision", files.packed: "packed", files.class_folders: "folders"}[write]
    np.testing.assert_array_equal(load(name, root=tmp_path, source=source).pixels, made.pixels)


def test_torchvision_downloads_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = two_parts(100)

    def download(root: str, download: bool) -> None:
        assert download
        files.archive(Path(root), "cifar100", train, test, HUNDRED)

    monkeypatch.setattr("torchvision.datasets.CIFAR100", download)
    assert len(load("cifar100", root=tmp_path, download=True)) == 300
    (tmp_path / "cifar-100-python" / "test").unlink()  # as an interrupted download leaves it
    with pytest.raises(ValueError, match="files are missing: test"):
        load("cifar100", root=tmp_path)
    assert len(load("cifar100", root=tmp_path, part="test", download=True)) == 100


def test_several_forms_or_none_of_them(tmp_path: Path) -> None:
    parts = two_parts(100)
    archive = files.archive(tmp_path, "cifar100", *parts, HUNDRED)
    folder = files.class_folders(tmp_path, "cifar100", *parts, HUNDRED)
    with pytest.raises(ValueError, match=r"in 2 forms, .*cifar-100-python \(torchvision\) and .*train \(folders\)"):
        load("cifar100", root=tmp_path)
    assert len(load("cifar100", root=tmp_path, source="folders")) == 300
    archive.rename(tmp_path / "elsewhere")
    (folder / "train").rename(folder / "training")
    with pytest.raises(ValueError, match=r"cifar100 holds test, training: allowed are mosaics with labels\.npz"):
        load("cifar100", root=tmp_path)


class Harmful:
    """What a pickle must not be able to do."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def entry(file: str, **changes: Any) -> Callable[[Path], Any]:
    return lambda folder: files.python2_pickle(folder / file, changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "test").unlink(), "cifar-100-python: files are missing: test"),
        (lambda f: (f / "meta").write_bytes(b"nonsense"), "meta is damaged or has another format"),
        (lambda f: (f / "train").write_bytes((f / "train").read_bytes()[:-5000]), "train is damaged or has another"),
        (lambda f: (f / "train").write_bytes(pickle.dumps(Harmful())), r"train is damaged .* which is not data"),
        (lambda f: (f / "train").write_bytes(pickle.dumps([1])), "train: no entry 'data'; there is: list"),
        (entry("meta", fine_label_names=["a"]), "meta: 100 class names are expected, got 1"),
        (entry("test", data=np.zeros((1, 3072), np.uint8), labels=[0]), "test: no entry 'fine_labels'; there is: data"),
        (entry("test", data=np.zeros((1, 3072), np.uint8), fine_labels=[100]), "test: label 100 at 0"),
        (entry("test", data=np.zeros((1, 768), np.uint8), fine_labels=[0]), r"must be uint8 \[n, 3072\], got uint8"),
    ],
)  # fmt: skip
def test_bad_torchvision_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(files.archive(tmp_path, "cifar100", *two_parts(100), HUNDRED))
    with pytest.raises(ValueError, match=message):
        load("cifar100", root=tmp_path)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f / "test"), "cifar10: there is no folder test beside train"),
        (lambda f: shutil.rmtree(f / "test" / "cat"), "test: 10 class folders are expected, got 9"),
        (lambda f: (f / "test" / "cat").rename(f / "test" / "lion"), "differ in classes: cat, lion"),
        (lambda f: (f / "test" / "cat" / "0003.png").unlink(), "cat contains no image"),
        (lambda f: (f / "test" / "cat" / "0003.png").write_bytes(b"x"), r"0003\.png is damaged"),
        (lambda f: Image.new("RGB", (64, 32)).save(f / "test" / "cat" / "0003.png"), "32 x 32 pixels are expected"),
    ],
)  # fmt: skip
def test_bad_class_folders(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(files.class_folders(tmp_path, "cifar10", *two_parts(10), files.CIFAR10_CLASSES))
    with pytest.raises(ValueError, match=message):
        load("cifar10", root=tmp_path)


class FakeSplit(dict):  # type: ignore[type-arg]
    """A hub split: columns by name."""

    @property
    def features(self) -> dict[str, Any]:
        return {"fine_label": SimpleNamespace(names=[f"class {k}" for k in range(100)])}


def test_cifar_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class FederatedDataset:
        def __init__(self, dataset: str, partitioners: dict[str, int], shuffle: bool) -> None:
            asked.append((dataset, partitioners, shuffle))

        def load_split(self, name: str) -> FakeSplit:
            number = {"train": 3, "test": 2}[name]
            tiles = [Image.fromarray(tile) for tile in files.noise(number, seed=number)]
            return FakeSplit(img=tiles, fine_label=list(range(number)))

    module = ModuleType("flwr_datasets")
    module.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", module)
    made = load("cifar100", download=True)
    assert asked == [("uoft-cs/cifar100", {"train": 1, "test": 1}, False)]
    expected = np.concatenate([files.noise(3, 3), files.noise(2, 2)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(made.pixels, expected)
    assert made.labels.tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(FileNotFoundError, match="download=True"):
        load("cifar100", source="hub")


@pytest.mark.parametrize("version", ["v6", "v4"])
def test_cifar10_1(tmp_path: Path, version: str) -> None:
    files.cifar10_1(tmp_path, version)
    made = load("cifar10.1", root=tmp_path, version=version)
    np.testing.assert_array_equal(made.pixels, files.noise(20, 9).transpose(0, 3, 1, 2))
    assert made.labels.tolist() == [*range(10), *range(10)]
    folder = tmp_path / "cifar10.1"
    np.save(folder / f"cifar10.1_{version}_data.npy", files.noise(20)[:, :16])
    with pytest.raises(ValueError, match=r"data\.npy: uint8 \[N, 32, 32, 3\] is expected"):
        load("cifar10.1", root=tmp_path, version=version, image_size=16)
    (folder / f"cifar10.1_{version}_labels.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"labels\.npy is missing"):
        load("cifar10.1", root=tmp_path, version=version, image_size=16)


# Image folders and npz ----------------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path: Path) -> None:
    colours = {"blue": (0, 0, 200), "red": (200, 0, 0)}
    for name, colour in colours.items():
        (tmp_path / name).mkdir()
        for number, suffix in enumerate(("png", "webp", "bmp")):
            Image.new("RGB", (5 + number, 9), colour).save(tmp_path / name / f"{number}.{suffix}")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / "red" / "._0.png").write_text("what macOS notes on 0.png")
    (tmp_path / ".hidden").mkdir()
    made = load("folder", root=tmp_path, image_size=8)
    assert made.classes == ("blue", "red")
    assert made.labels.tolist() == [0, 0, 0, 1, 1, 1]
    for label, colour in enumerate(colours.values()):
        for channel in range(3):
            values = made.pixels[made.labels == label][:, channel].astype(int)
            assert abs(values - colour[channel]).max() <= 12  # WebP here is lossy


def test_folder_of_domains(tmp_path: Path) -> None:
    top = tmp_path / "pacs"
    files.folders(top / "photo", ("cat", "dog", "horse"))
    files.folders(top / "sketch", ("dog", "horse"), count=1)
    sketch = load("folder", root=tmp_path, path="pacs", domain="sketch", image_size=8)
    assert sketch.classes == ("cat", "dog", "horse")
    assert sketch.labels.tolist() == [1, 2]  # numbers agree between domains
    every = load("folder", root=tmp_path, path="pacs", domain="*", image_size=8)
    assert (every.name, every.domains) == ("folder", ("photo", "sketch"))
    assert every.domain is not None
    assert np.bincount(every.domain).tolist() == [6, 2]
    np.testing.assert_array_equal(every.pixels[every.domain == 1], sketch.pixels)
    with pytest.raises(ValueError, match="unknown domain 'clipart'; there are: photo, sketch"):
        load("folder", root=tmp_path, path="pacs", domain="clipart")


def test_what_is_no_file_is_named_and_not_read(tmp_path: Path) -> None:
    files.folders(tmp_path, ("cat",))
    os.mkfifo(tmp_path / "cat" / "a.png")  # reading from it would never end
    with pytest.raises(ValueError, match=r"a\.png is not a regular file"):
        load("folder", root=tmp_path)


def test_images_deeper_than_their_class_are_not_passed_over(tmp_path: Path) -> None:
    files.folders(tmp_path / "art", ("cat", "dog"))
    with pytest.raises(ValueError, match=r"art holds folders \(cat\); allowed are .*domain=\*"):
        load("folder", root=tmp_path)
    files.folders(tmp_path / "art" / "cat", ("old",))
    with pytest.raises(ValueError, match=r"art.cat holds folders \(old\)"):
        load("folder", root=tmp_path, domain="*")


def test_folder_errors(tmp_path: Path) -> None:
    files.folders(tmp_path, ("cat",))
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match="dog contains no image"):
        load("folder", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load("folder", root=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="contains no class folders"):
        load("folder", root=tmp_path / "dog")
    with pytest.raises(ValueError, match="dog contains no domain folders"):
        load("folder", root=tmp_path, path="dog", domain="*")


GREY = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
COLOUR = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
NCHW = COLOUR.transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("x", "wanted", "options"),
    [
        (GREY, np.repeat(GREY[:, None], 3, 1), {}),
        (COLOUR, NCHW, {}),
        (NCHW, NCHW, {}),
        (COLOUR, NCHW, {"layout": "nhwc"}),
        (COLOUR / 255.0, NCHW, {}),
    ],
)
def test_npz_layouts_and_dtypes(tmp_path: Path, x: np.ndarray, wanted: np.ndarray, options: dict[str, Any]) -> None:
    files.npz(tmp_path, x=x)
    for root, more in (
        (tmp_path, {}),
        (tmp_path / "data.npz", {}),
        (tmp_path.parent, {"path": f"{tmp_path.name}/data.npz"}),
    ):
        made = load("npz", root=root, image_size=4, **options, **more)
        np.testing.assert_array_equal(made.pixels, wanted)
        assert made.labels.tolist() == [0, 1]
        assert made.classes == ("0", "1")


def test_npz_class_names_grayscale_and_resizing(tmp_path: Path) -> None:
    files.npz(tmp_path, x=COLOUR, classes=np.array(["cat", "dog", "owl"]))
    made = load("npz", root=tmp_path, image_size=4, channels=1)
    assert made.classes == ("cat", "dog", "owl")
    np.testing.assert_array_equal(made.pixels[:, 0], np.round(COLOUR @ [0.299, 0.587, 0.114]))
    np.savez(tmp_path / "flat.npz", x=np.full((1, 64, 64), 77, np.uint8), y=[0])
    assert (load("npz", root=tmp_path / "flat.npz", image_size=10).pixels == 77).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": None}, r"data\.npz: no array 'y'; there are: x"),
        ({"y": np.array([0.0, np.nan])}, r"data\.npz: 1 labels are missing \(not finite\), the first at 1"),
        ({"y": np.array([0, -1])}, r"label -1 at 1 is not an integer from 0 to 0"),
        ({"y": np.array([0, 0.5])}, r"label 0\.5 at 1"),
        ({"y": np.array([0, 3]), "classes": np.array(["a", "b"])}, "label 3 at 1 is not an integer from 0 to 1"),
        ({"y": np.array([0, 1e300])}, "too large to be a class number"),
        ({"y": np.array([0])}, r"2 images but labels of shape \(1,\)"),
        ({"y": np.array(["a", "b"])}, "labels must be integers"),
        ({"x": GREY.astype(np.int32)}, "uint8 or floating point"),
        ({"x": GREY.astype(float)}, r"must lie in \[0, 1\]"),
        ({"x": np.where(GREY == 20, np.nan, 0.5)}, "image 1 has values that are not finite"),
        ({"x": np.zeros((2, 3, 3, 3), np.uint8)}, "give layout nchw or nhwc"),
        ({"x": np.zeros((2, 5, 5, 5), np.uint8)}, "give layout nchw or nhwc"),
        ({"x": np.zeros((2, 5), np.uint8)}, "x must be"),
        ({"x": np.array(0.5)}, r"data\.npz: x must be"),
        ({"x": np.zeros((2, 0, 5), np.uint8)}, r"data\.npz: the images of x \(2, 0, 5\) have no pixels"),
        ({"classes": np.array("a")}, r"data\.npz: classes must be a list of names"),
        ({"x": np.array([None, None])}, r"data\.npz is damaged or has another format"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    files.npz(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message):
        load("npz", root=tmp_path)


def test_class_names_of_an_npz_may_be_bytes(tmp_path: Path) -> None:
    files.npz(tmp_path, classes=np.array([b"cat", "küken".encode()]))
    assert load("npz", root=tmp_path).classes == ("cat", "küken")


def test_what_is_no_npz_archive_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros(2))
    (tmp_path / "data.npy").rename(tmp_path / "data.npz")
    with pytest.raises(ValueError, match=r"data\.npz is damaged or has another format: not an \.npz archive"):
        load("npz", root=tmp_path)


def test_a_header_that_claims_more_than_there_is_memory_is_damage(tmp_path: Path) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (10**9, 10**8)}
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"data\.npz is damaged or has another format"):
        load("npz", root=tmp_path)


# Data sets of several domains ---------------------------------------------------------------------------------------


def test_packed_digits_train_then_test(tmp_path: Path) -> None:
    files.digit5(tmp_path)
    made = load("digit5", root=tmp_path, per_domain=0)
    assert made.name == "digit5 without svhn, synthdigits"
    assert made.domains == ("mnist", "usps", "mnistm")
    assert made.domain is not None
    assert made.domain.tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert made.labels.tolist() == [*range(10), *range(10), *range(10)] * 3
    values = np.concatenate([[*range(base, base + 20), *range(base + 100, base + 110)] for base in (0, 30, 60)])
    np.testing.assert_array_equal(made.pixels, np.broadcast_to(values[:, None, None, None], (90, 3, 32, 32)))
    even = load("digit5", root=tmp_path, per_domain=20)
    assert [np.bincount(even.labels[even.domain == one]).tolist() for one in range(3)] == [[2] * 10] * 3
    assert load("digit5", root=tmp_path, domains="mnistm,mnist").domains == ("mnist", "mnistm")


def test_matlab_digits(tmp_path: Path) -> None:
    """A 10 in SVHN is the digit 0; the domains keep the order of the list of five."""
    files.digit5(tmp_path)
    pixels = {}
    for name, file, labels in (("svhn", "{}_32x32.mat", [1, 10, 3]), ("synthdigits", "synth_{}_32x32.mat", [0, 9])):
        parts = [files.matlab(tmp_path, name, file.format(part), labels) for part in ("train", "test")]
        pixels[name] = np.concatenate(parts)
    made = load("digit5", root=tmp_path, per_domain=0)
    assert (made.name, made.domains) == ("digit5", ("mnist", "svhn", "usps", "synthdigits", "mnistm"))
    for number, name, expected in ((1, "svhn", [1, 0, 3]), (3, "synthdigits", [0, 9])):
        own = made.domain == number
        np.testing.assert_array_equal(made.pixels[own], pixels[name])
        assert made.labels[own].tolist() == expected * 2


def svhn(labels: Any, **changes: Any) -> Callable[[Path], Any]:
    return lambda root: files.matlab(root, "svhn", "train_32x32.mat", labels, **changes)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda root: files.mosaic(root / "digits" / "usps_train.png", files.flat(20, 16, 0, colour=True)),
            ValueError, r"usps_train\.png: a mosaic of 16 x 16 grayscale tiles is expected, got \(80, 64, 3\)",
        ),
        (
            lambda root: files.mosaic(root / "digits" / "usps_train.png", files.flat(16, 16, 0)),
            ValueError, r"usps_train\.png: 20 labels but only 16 tiles",
        ),
        (
            lambda root: np.savez(root / "digits" / "labels.npz", mnist_train=np.zeros(20, np.uint8)),
            ValueError, r"labels\.npz: no array 'mnist_test'; there are: mnist_train",
        ),
        (lambda root: (root / "digits" / "mnistm_test.webp").unlink(), FileNotFoundError, r"mnistm_test\.png"),
        (svhn([0, 10]), ValueError, r"train_32x32\.mat: labels 0 and 10 both occur"),
        (svhn([0, 11]), ValueError, r"train_32x32\.mat: label 11 at 1"),
        (svhn([0], X=np.zeros((28, 28, 3, 1), np.uint8)), ValueError, r"X must be uint8 \[32, 32, 3, n\]"),
        (svhn([0], y=None), ValueError, "arrays X and y are expected"),
    ],
)  # fmt: skip
def test_bad_digits(tmp_path: Path, damage: Callable[[Path], Any], error: type[Exception], message: str) -> None:
    files.digit5(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        load("digit5", root=tmp_path, per_domain=0)


def test_office_with_and_without_copies(tmp_path: Path) -> None:
    tiles = files.office(tmp_path)
    whole = load("office10", root=tmp_path, copies=True, image_size=64)
    assert whole.name == "office10 without caltech10, dslr"
    assert (whole.domains, len(whole), whole.classes) == (("amazon", "webcam"), 17, tuple("abcdefghij"))
    assert abs(whole.pixels[:12].astype(int) - tiles.transpose(0, 3, 1, 2)).max() <= 4  # JPEG
    unique = load("office10", root=tmp_path, image_size=64)
    assert unique.labels.tolist() == [0, 1, 2, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1, 2, 1, 4]
    np.testing.assert_array_equal(unique.pixels[:11], whole.pixels[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]])
    with pytest.raises(ValueError, match="copies=1 must be true or false"):
        load("office10", root=tmp_path, copies=1)


def test_parts_of_office_share_no_image(tmp_path: Path) -> None:
    """Ten and five images without copies, in one class each: a fifth is for testing, whichever domains are loaded."""
    files.office(tmp_path)
    labels = tmp_path / "office_caltech10" / "labels.npz"
    np.savez(labels, amazon=np.zeros(12, np.uint8), webcam=np.ones(5, np.uint8), classes=np.array(list("abcdefghij")))

    def images(part: str, domains: str = "") -> list[bytes]:
        found = load("office10", root=tmp_path, part=part, domains=domains, image_size=64)
        return [one.tobytes() for one in found.pixels]

    for domain, count in (("amazon", 10), ("webcam", 5)):
        everything, training, testing = (set(images(part, domain)) for part in ("all", "train", "test"))
        assert (len(everything), len(training), len(testing)) == (count, 0.8 * count, 0.2 * count)
        assert everything == training | testing
    assert images("test") == images("test", "amazon") + images("test", "webcam")
    with pytest.raises(ValueError, match="unknown part 'tset'; there are: all, train, test"):
        load("office10", root=tmp_path, part="tset")


def test_bad_office_labels(tmp_path: Path) -> None:
    files.office(tmp_path, classes=9)
    with pytest.raises(ValueError, match=r"labels\.npz: 10 class names are expected, got 9"):
        load("office10", root=tmp_path)
    np.savez(tmp_path / "office_caltech10" / "labels.npz", amazon=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz: no array 'webcam'"):
        load("office10", root=tmp_path)


def test_domainnet_decodes_sampled_images_only(tmp_path: Path) -> None:
    for domain in ("clipart", "sketch"):
        files.folders(tmp_path / "domainnet" / domain, CLASSES)
    (tmp_path / "domainnet" / "sketch" / "airplane").mkdir()  # one of the other 335
    made = load("domainnet", root=tmp_path, image_size=8)
    assert made.name == "domainnet without infograph, painting, quickdraw, real"
    assert (made.classes, len(made)) == (CLASSES, 40)
    np.testing.assert_array_equal(made.pixels[:, 0, 0, 0], 10 * made.labels)
    (tmp_path / "domainnet" / "sketch" / "bird" / "0.png").write_bytes(b"no image")
    drawn = load("domainnet", root=tmp_path, image_size=8, per_domain=10, domains="clipart")
    assert np.bincount(drawn.labels).tolist() == [1] * 10


def test_officehome_domains_share_their_classes(tmp_path: Path) -> None:
    files.two_homes(tmp_path)
    made = load("officehome", root=tmp_path, image_size=8)
    assert made.name == "officehome without clipart, product"
    assert (made.domains, made.classes, len(made)) == (("art", "real_world"), ("Alarm_Clock", "Bike"), 8)
    np.testing.assert_array_equal(made.pixels[:, 0, 0, 0], 100 * made.labels)
    files.folders(tmp_path / "officehome" / "Product", ("Alarm_Clock", "Couch"))
    with pytest.raises(ValueError, match=r"Product and .*Art differ in classes: Bike, Couch"):
        load("officehome", root=tmp_path, image_size=4)


# ImageNet-32 --------------------------------------------------------------------------------------------------------


def test_imagenet32_has_all_classes_without_a_and_r(tmp_path: Path) -> None:
    files.folders(tmp_path / "imagenet32", ("n01", "n02"), red=50)
    made = load("imagenet32", tmp_path)
    assert made.classes == ("n01", "n02")
    np.testing.assert_array_equal(made.pixels[:, 0, 5, 5], 50 * made.labels)


def test_imagenet_shifts_have_the_classes_that_a_and_r_share(tmp_path: Path) -> None:
    files.imagenet(tmp_path)
    whole = load("imagenet32", tmp_path)
    assert whole.classes == ("n02", "n04")
    np.testing.assert_array_equal(whole.pixels[:, 0, 0, 0], np.where(whole.labels == 0, 50, 150))
    for name, count, green in (("imagenet-a", 3, 1), ("imagenet-r", 1, 2), ("imagenet-v2", 4, 3)):
        found = load(name, tmp_path)
        assert np.bincount(found.labels).tolist() == [count, count]
        assert set(found.pixels[:, 1].ravel()) == {green}
    v2 = load("imagenet-v2", tmp_path)  # folders are class numbers
    np.testing.assert_array_equal(v2.pixels[:, 0, 0, 0], np.where(v2.labels == 0, 50, 150))
    assert len(load("imagenet32", tmp_path, natural="imagenet-a")) == len(whole)


def test_imagenet_errors(tmp_path: Path) -> None:
    files.folders(tmp_path / "imagenet32", ("n01", "n02", "n03", "n04"))
    with pytest.raises(FileNotFoundError, match=r"imagenet-a not found: it needs .*imagenet-a"):
        load("imagenet-a", tmp_path)
    files.folders(tmp_path / "imagenet-v2", ("4",))
    with pytest.raises(ValueError, match="imagenet32 has 4 classes; allowed are 0 to 3"):
        load("imagenet-v2", tmp_path)
    (tmp_path / "imagenet32" / "n05").mkdir()
    with pytest.raises(ValueError, match="n05 contains no image"):
        load("imagenet32", tmp_path)
    files.folders(tmp_path / "imagenet-r", ("n77",))
    files.folders(tmp_path / "imagenet-a", ("n77",))
    with pytest.raises(ValueError, match="contains none of the 0 classes"):
        load("imagenet32", tmp_path, image_size=16)
