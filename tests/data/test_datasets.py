"""Data sets: embedded, registry, image folder and npz files; every file is written by the test itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional

from data import DATASETS, load, load_natural


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("FEDTTA_DATA", raising=False)


def write_png(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_digits_are_scikit_learns():
    real = load_digits()
    made = load("digits")
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


def test_digits_at_their_own_size_and_in_grey():
    made = load("digits", image_size=8, channels=1)
    np.testing.assert_array_equal(made.pixels[:, 0], np.round(load_digits().images * 255 / 16).astype(np.uint8))


def test_clients_of_one_process_share_one_read_only_copy():
    assert load("digits", seed=1) is load("digits", seed=2)
    assert load("digits", fraction=0.5, seed=1) is not load("digits", fraction=0.5, seed=2)
    assert not load("digits").pixels.flags.writeable


def test_fraction_keeps_the_class_mix():
    whole, half = load("digits"), load("digits", fraction=0.5, seed=3)
    wanted = [round(n / 2) for n in np.bincount(whole.labels)]
    assert np.bincount(half.labels).tolist() == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mnits"}, "unknown data set 'mnits'; there are: digits, cifar10, cifar100, cifar10.1, folder, npz"),
        ({"name": "digits", "domain": "a"}, "unknown option 'domain' of data set 'digits'; there are: none"),
        ({"name": "cifar10", "sorce": "hub"}, "unknown option 'sorce' .* there are: source, part"),
        ({"name": "cifar10", "source": "web"}, "unknown source 'web'; there are: auto, packed, torchvision, hub"),
        ({"name": "cifar10", "part": "val"}, "unknown part 'val'; there are: all, train, test"),
        ({"name": "cifar10.1", "version": "v5"}, "unknown version 'v5'; there are: v6, v4"),
        ({"name": "npz", "layout": "hwcn"}, "unknown layout 'hwcn'; there are: auto, nchw, nhwc"),
        ({"name": "npz"}, "needs root"),
        ({"name": "folder"}, "needs root"),
        ({"name": "digits", "channels": 2}, "channels must be 1 or 3"),
        ({"name": "digits", "image_size": 0}, "image_size=0"),
        ({"name": "digits", "fraction": 2.0}, "fraction=2.0"),
    ],
)
def test_bad_settings_say_what_there_is(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_the_table_is_whole():
    for name, described in DATASETS.items():
        assert described.description, name
        assert len(described.mean) == len(described.std) == 3
        assert min(described.std) > 0
    assert not DATASETS["digits"].flip
    assert DATASETS["cifar10"].flip
    assert load_natural("digits") is None


# Image folder -------------------------------------------------------------------------------------------------------


def test_folder_of_classes(tmp_path):
    colours = {"blue": (0, 0, 200), "red": (200, 0, 0)}
    for name, colour in colours.items():
        for number, suffix in enumerate(("png", "webp", "bmp")):
            write_png(tmp_path / name / f"{number}.{suffix}", np.full((9, 5 + number, 3), colour, np.uint8))
    (tmp_path / "red" / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden").mkdir()
    made = load("folder", root=tmp_path, image_size=8)
    assert made.classes == ("blue", "red")
    assert made.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert made.shape == (3, 8, 8)
    for label, colour in enumerate(colours.values()):
        for channel in range(3):
            values = made.pixels[made.labels == label][:, channel].astype(int)
            assert abs(values - colour[channel]).max() <= 12  # WebP here is lossy


def test_domains_agree_on_the_label_numbers(tmp_path):
    for domain, names in {"photo": ("cat", "dog", "horse"), "sketch": ("dog", "horse")}.items():
        for name in names:
            write_png(tmp_path / "pacs" / domain / name / "0.png", np.zeros((4, 4), np.uint8))
    made = load("folder", root=tmp_path, path="pacs", domain="sketch", image_size=4, channels=1)
    assert made.classes == ("cat", "dog", "horse")
    assert made.labels.tolist() == [1, 2]
    with pytest.raises(ValueError, match="unknown domain 'clipart'; there are: photo, sketch"):
        load("folder", root=tmp_path, path="pacs", domain="clipart")


def test_folder_errors_name_the_culprit(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    write_png(tmp_path / "cat" / "fine.png", noise)
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match="dog holds no picture"):
        load("folder", root=tmp_path)
    broken = tmp_path / "dog" / "broken.png"
    broken.write_bytes((tmp_path / "cat" / "fine.png").read_bytes()[:1500])
    with pytest.raises(ValueError, match=r"broken\.png is damaged"):
        load("folder", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load("folder", root=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no class folders"):
        load("folder", root=tmp_path / "empty")


# npz ----------------------------------------------------------------------------------------------------------------

GREY = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
COLOUR = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
Y = np.array([0, 1])


@pytest.mark.parametrize(
    ("x", "wanted", "options"),
    [
        (GREY, np.repeat(GREY[:, None], 3, 1), {}),
        (COLOUR, COLOUR.transpose(0, 3, 1, 2), {}),
        (COLOUR.transpose(0, 3, 1, 2), COLOUR.transpose(0, 3, 1, 2), {}),
        (COLOUR, COLOUR.transpose(0, 3, 1, 2), {"layout": "nhwc"}),
        (COLOUR / 255.0, COLOUR.transpose(0, 3, 1, 2), {}),
    ],
)
def test_npz_layouts_and_dtypes(tmp_path, x, wanted, options):
    np.savez(tmp_path / "data.npz", x=x, y=Y)
    for root, more in (
        (tmp_path, {}),
        (tmp_path / "data.npz", {}),
        (tmp_path.parent, {"path": f"{tmp_path.name}/data.npz"}),
    ):
        made = load("npz", root=root, image_size=4, **options, **more)
        np.testing.assert_array_equal(made.pixels, wanted)
        assert made.labels.tolist() == [0, 1]
        assert made.classes == ("0", "1")


def test_npz_class_names_and_grey_from_colour(tmp_path):
    np.savez(tmp_path / "data.npz", x=COLOUR, y=Y, classes=np.array(["cat", "dog", "owl"]))
    made = load("npz", root=tmp_path, image_size=4, channels=1)
    assert made.classes == ("cat", "dog", "owl")
    np.testing.assert_array_equal(made.pixels[:, 0], np.round(COLOUR @ [0.299, 0.587, 0.114]))


def test_npz_resizing_averages(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.full((1, 64, 64), 77, np.uint8), y=[0])
    assert (load("npz", root=tmp_path, image_size=10).pixels == 77).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GREY}, r"data\.npz: no array 'y'; there are: x"),
        ({"x": GREY, "y": np.array([0.0, np.nan])}, r"data\.npz: 1 labels are missing \(not finite\), the first at 1"),
        ({"x": GREY, "y": np.array([0, -1])}, r"label -1 at 1 is not an integer from 0 to 0"),
        ({"x": GREY, "y": np.array([0, 0.5])}, r"label 0\.5 at 1"),
        (
            {"x": GREY, "y": np.array([0, 3]), "classes": np.array(["a", "b"])},
            "label 3 at 1 is not an integer from 0 to 1",
        ),
        ({"x": GREY, "y": np.array([0, 1e300])}, "too large to be a class number"),
        ({"x": GREY, "y": np.array([0])}, r"2 pictures but labels of shape \(1,\)"),
        ({"x": GREY, "y": np.array(["a", "b"])}, "labels must be integers"),
        ({"x": GREY.astype(np.int32), "y": Y}, "uint8 or floating point"),
        ({"x": GREY.astype(float), "y": Y}, r"must lie in \[0, 1\]"),
        ({"x": np.where(GREY == 20, np.nan, 0.5), "y": Y}, "picture 1 holds values that are not finite"),
        ({"x": np.zeros((2, 3, 3, 3), np.uint8), "y": Y}, "give layout nchw or nhwc"),
        ({"x": np.zeros((2, 5, 5, 5), np.uint8), "y": Y}, "give layout nchw or nhwc"),
        ({"x": np.zeros((2, 5), np.uint8), "y": Y}, "x must be"),
        ({"x": np.array([None, None]), "y": Y}, r"data\.npz is damaged or not what it should be"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load("npz", root=tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_truncated_npz_is_named(tmp_path, keep):
    file = tmp_path / "data.npz"
    np.savez(file, x=GREY, y=Y)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"data\.npz is damaged"):
        load("npz", root=tmp_path)


def test_missing_npz(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*data\.npz"):
        load("npz", root=tmp_path)
