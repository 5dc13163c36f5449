"""CIFAR from its three sources and CIFAR-10.1, on small files of the same form; the real one where it is at hand."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from data import load, load_natural

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(autouse=True)
def _no_environment(request, monkeypatch):
    if "real" not in request.node.name:
        monkeypatch.delenv("FEDTTA_DATA", raising=False)


def pictures(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def write_mosaic(path, tiles, columns):
    """Put tiles one by one where the rule says: row k // columns, column k % columns."""
    rows = -(-len(tiles) // columns)
    mosaic = np.zeros((rows * 32, columns * 32, 3), np.uint8)
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        mosaic[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32] = tile
    Image.fromarray(mosaic).save(path, **({"lossless": True} if path.suffix == ".webp" else {}))


def write_packed(root, name="cifar10", suffix="webp", classes=NAMES):
    """24 training pictures in two mosaics and 11 test pictures in one (with one tile of padding)."""
    folder = root / name
    folder.mkdir()
    train, test = pictures(24, 1), pictures(11, 2)
    for number in range(2):
        write_mosaic(folder / f"train_{number:02d}.{suffix}", train[12 * number : 12 * number + 12], columns=4)
    write_mosaic(folder / f"test_00.{suffix}", test, columns=4)
    labels = {"train": np.arange(24, dtype=np.uint8) % 10, "test": np.arange(11, dtype=np.uint8) % 10}
    np.savez(folder / "labels.npz", **labels, classes=np.array(classes))
    return folder, np.concatenate([train, test]).transpose(0, 3, 1, 2), np.concatenate(list(labels.values()))


@pytest.mark.parametrize("suffix", ["webp", "png"])
def test_packed_mosaics(tmp_path, suffix, monkeypatch):
    _, pixels, labels = write_packed(tmp_path, suffix=suffix)
    made = load("cifar10", root=tmp_path)
    np.testing.assert_array_equal(made.pixels, pixels)
    np.testing.assert_array_equal(made.labels, labels)
    assert made.classes == NAMES
    np.testing.assert_array_equal(load("cifar10", root=tmp_path, source="packed").pixels, pixels)
    np.testing.assert_array_equal(load("cifar10", root=tmp_path, part="train").pixels, pixels[:24])
    np.testing.assert_array_equal(load("cifar10", root=tmp_path, part="test").labels, labels[24:])
    monkeypatch.setenv("FEDTTA_DATA", str(tmp_path))
    assert load("cifar10") is made


def test_cifar100_in_the_same_form(tmp_path):
    _, pixels, _ = write_packed(tmp_path, "cifar100", classes=[f"class {k}" for k in range(100)])
    made = load("cifar100", root=tmp_path)
    np.testing.assert_array_equal(made.pixels, pixels)
    assert made.num_classes == 100


def damage_cut(folder):
    file = folder / "train_01.webp"
    file.write_bytes(file.read_bytes()[:2000])


def damage_text(folder):
    (folder / "test_00.webp").write_text("not a picture")


def damage_labels(folder):
    file = folder / "labels.npz"
    file.write_bytes(file.read_bytes()[:100])


def damage_range(folder):
    np.savez(folder / "labels.npz", train=np.full(24, 10), test=np.zeros(11, int), classes=np.array(NAMES))


def damage_no_test(folder):
    np.savez(folder / "labels.npz", train=np.zeros(24, int), classes=np.array(NAMES))


def damage_missing_mosaic(folder):
    (folder / "train_01.webp").unlink()


def damage_extra_mosaic(folder):
    write_mosaic(folder / "train_02.webp", pictures(4), columns=2)


def damage_no_mosaic(folder):
    (folder / "test_00.webp").unlink()


def damage_shape(folder):
    Image.fromarray(np.zeros((40, 64, 3), np.uint8)).save(folder / "test_00.webp", lossless=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, r"train_01\.webp is damaged"),
        (damage_text, r"test_00\.webp is damaged"),
        (damage_labels, r"labels\.npz is damaged"),
        (damage_range, r"labels\.npz: label 10 at 0 is not an integer from 0 to 9"),
        (damage_no_test, r"labels\.npz: no array 'test'; there are: classes, train"),
        (damage_missing_mosaic, "24 train labels but only 12 pictures in 1 mosaics"),
        (damage_extra_mosaic, r"train_02\.webp: more mosaics than the 24 train labels"),
        (damage_no_mosaic, r"no test_\*\.webp"),
        (damage_shape, r"test_00\.webp: a mosaic of 32 x 32 RGB tiles is expected, got \(40, 64, 3\)"),
    ],
)
def test_damaged_packed_files_are_named(tmp_path, damage, message):
    folder, *_ = write_packed(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load("cifar10", root=tmp_path)


def test_wrong_number_of_class_names(tmp_path):
    write_packed(tmp_path, classes=NAMES[:9])
    with pytest.raises(ValueError, match=r"labels\.npz: 10 class names are expected, got 9"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("source", ["auto", "packed", "torchvision"])
def test_nothing_there(tmp_path, source):
    with pytest.raises(FileNotFoundError, match=r"looked for .*labels\.npz and .*cifar-10-batches-py.*download=True"):
        load("cifar10", root=tmp_path, source=source)
    with pytest.raises(FileNotFoundError, match="give root, or set FEDTTA_DATA"):
        load("cifar10", source=source)


class FakeCIFAR:
    """What torchvision's data sets offer; the folder holds one number of training and one of test pictures."""

    classes = NAMES

    def __init__(self, root, train, download):
        self.asked = (root, download)
        self.data = pictures(6 if train else 4, seed=int(train))
        self.targets = list(range(len(self.data)))


def test_torchvision_files(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", FakeCIFAR)
    (tmp_path / "cifar-10-batches-py").mkdir()
    made = load("cifar10", root=tmp_path)
    np.testing.assert_array_equal(made.pixels, np.concatenate([pictures(6, 1), pictures(4, 0)]).transpose(0, 3, 1, 2))
    assert made.labels.tolist() == [*range(6), *range(4)]
    assert made.classes == NAMES


def test_damaged_torchvision_files(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cifar-10-batches-py: files are missing or damaged"):
        load("cifar10", root=tmp_path)


def test_a_download_goes_to_torchvision_with_a_root(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", FakeCIFAR)
    assert len(load("cifar10", root=tmp_path, download=True)) == 10


class FakeSplit(dict):
    """Columns by name, and what is known of them."""

    @property
    def features(self):
        return {"fine_label": SimpleNamespace(names=[f"class {k}" for k in range(100)])}


def fake_hub(asked):
    class FederatedDataset:
        def __init__(self, dataset, partitioners, shuffle):
            asked.append((dataset, partitioners, shuffle))

        def load_split(self, name):
            number = {"train": 3, "test": 2}[name]

            tiles = [Image.fromarray(tile) for tile in pictures(number, seed=number)]
            return FakeSplit(img=tiles, fine_label=list(range(number)))

    module = ModuleType("flwr_datasets")
    module.FederatedDataset = FederatedDataset
    return module


def test_a_download_goes_to_the_hub_without_a_root(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "flwr_datasets", fake_hub(asked))
    made = load("cifar100", download=True)
    assert asked == [("uoft-cs/cifar100", {"train": 1, "test": 1}, False)]
    np.testing.assert_array_equal(made.pixels, np.concatenate([pictures(3, 3), pictures(2, 2)]).transpose(0, 3, 1, 2))
    assert made.labels.tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(FileNotFoundError, match="download=True"):
        load("cifar100", source="hub")


# CIFAR-10.1 ---------------------------------------------------------------------------------------------------------


def write_cifar10_1(root, version="v6", count=20):
    folder = root / "cifar10.1"
    folder.mkdir()
    x, y = pictures(count, 9), np.arange(count, dtype=np.int32) % 10
    np.save(folder / f"cifar10.1_{version}_data.npy", x)
    np.save(folder / f"cifar10.1_{version}_labels.npy", y)
    return folder, x, y


@pytest.mark.parametrize("version", ["v6", "v4"])
def test_cifar10_1(tmp_path, version):
    _, x, y = write_cifar10_1(tmp_path, version)
    made = load("cifar10.1", root=tmp_path, version=version)
    np.testing.assert_array_equal(made.pixels, x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(made.labels, y)
    assert made.classes == NAMES


def test_the_natural_shift_of_cifar10_where_it_is(tmp_path):
    assert load_natural("cifar10", tmp_path) is None
    assert load_natural("cifar10") is None
    write_cifar10_1(tmp_path)
    found = load_natural("cifar10", tmp_path, image_size=16, channels=1)
    assert found is not None
    assert found.shape == (1, 16, 16)
    assert load_natural("cifar100", tmp_path) is None


def test_cifar10_1_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"looked in .*cifar10\.1; it needs cifar10\.1_v6_data\.npy"):
        load("cifar10.1", root=tmp_path)
    folder, x, _ = write_cifar10_1(tmp_path)
    data, labels = folder / "cifar10.1_v6_data.npy", folder / "cifar10.1_v6_labels.npy"
    np.save(labels, np.arange(5))
    with pytest.raises(ValueError, match=r"labels\.npy: 20 pictures but labels of shape \(5,\)"):
        load("cifar10.1", root=tmp_path)
    labels.write_bytes(b"")
    with pytest.raises(ValueError, match=r"labels\.npy is damaged"):
        load("cifar10.1", root=tmp_path)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=r"labels\.npy is missing"):
        load("cifar10.1", root=tmp_path)
    np.save(labels, np.arange(20))
    data.write_bytes(data.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"data\.npy is damaged"):
        load_natural("cifar10", tmp_path)
    np.save(data, x[:, :16])
    with pytest.raises(ValueError, match=r"data\.npy: uint8 \[N, 32, 32, 3\] is expected"):
        load("cifar10.1", root=tmp_path)


if os.environ.get("FEDTTA_DATA"):

    def test_real_cifar10():
        made = load("cifar10")
        assert made.pixels.shape == (60_000, 3, 32, 32)
        assert made.classes == NAMES
        assert np.bincount(made.labels).tolist() == [6000] * 10
        assert np.bincount(made.labels[:50_000]).tolist() == [5000] * 10
        train = made.pixels[:50_000]
        means = [train[:, channel].mean() / 255 for channel in range(3)]
        deviations = [train[:, channel].std() / 255 for channel in range(3)]
        np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
        np.testing.assert_allclose(deviations, [0.2470, 0.2435, 0.2616], atol=5e-5)
