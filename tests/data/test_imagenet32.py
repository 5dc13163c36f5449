"""ImageNet-32 and its natural shifts, from small folders of the same form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import load, load_natural

CLASSES = ("n01", "n02", "n03", "n04")


def folder(root: Path, name: str, classes: tuple[str, ...], count: int = 2, first: int = 0) -> None:
    """Pictures of one colour: red tells the class by its place, green the folder."""
    for one in classes:
        for number in range(count):
            path = root / name / one / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            place = int(one.removeprefix("n")) - first
            Image.new("RGB", (40, 32), (50 * place, len(name), 0)).save(path)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FEDTTA_DATA", raising=False)
    folder(tmp_path, "imagenet32", CLASSES)
    return tmp_path


def test_all_classes_without_a_and_r(root: Path) -> None:
    made = load("imagenet32", root)
    assert (made.classes, made.shape, len(made)) == (CLASSES, (3, 32, 32), 8)
    np.testing.assert_array_equal(made.pixels[:, 0, 5, 5], 50 * (made.labels + 1))
    assert load_natural("imagenet32", root) is None


def test_the_classes_that_a_and_r_share_and_the_same_numbers_everywhere(root: Path) -> None:
    folder(root, "imagenet-a", ("n01", "n02", "n04"), count=3)
    folder(root, "imagenet-r", ("n02", "n03", "n04"), count=1)
    folder(root, "imagenet-v2", ("0", "1", "2", "3"), count=4, first=-1)  # by number, as published
    whole = load("imagenet32", root)
    assert whole.classes == ("n02", "n04")
    for name, count in (("imagenet-a", 3), ("imagenet-r", 1), ("imagenet-v2", 4)):
        found = load_natural("imagenet32", root, natural=name)
        assert found is not None
        assert (found.classes, np.bincount(found.labels).tolist()) == (whole.classes, [count, count])
        np.testing.assert_array_equal(found.pixels[:, 0, 0, 0], np.where(found.labels == 0, 100, 200))
        assert set(found.pixels[:, 1].ravel()) == {len(name)}
    usual = load_natural("imagenet32", root)
    assert usual is not None
    assert usual.pixels[0, 1, 0, 0] == len("imagenet-v2")
    assert len(load("imagenet32", root, natural="imagenet-a")) == len(whole)


def test_what_is_not_there_or_not_right(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"natural = 'cifar10.1': allowed with data set 'imagenet32' are imagenet-v2"):
        load_natural("imagenet32", root, natural="cifar10.1")
    with pytest.raises(FileNotFoundError, match=r"imagenet-a is not there: it needs .*imagenet-a"):
        load("imagenet-a", root)
    with pytest.raises(FileNotFoundError, match="imagenet32 is not there"):
        load("imagenet32")
    folder(root, "imagenet-v2", ("4",))
    with pytest.raises(ValueError, match="imagenet32 has 4 classes; allowed are 0 to 3"):
        load("imagenet-v2", root)
    (root / "imagenet32" / "n05").mkdir()
    with pytest.raises(ValueError, match="n05 holds no picture"):
        load("imagenet32", root)
    folder(root, "imagenet-r", ("n77",))
    folder(root, "imagenet-a", ("n77",))
    with pytest.raises(ValueError, match="holds none of the 0 classes"):
        load("imagenet32", root, image_size=16)
