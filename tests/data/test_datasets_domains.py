"""Office-10, PACS and DomainNet, from small files of the same form; the real ones where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data import DATASETS, load
from data.datasets.domainnet import CLASSES, DOMAINS
from tests.data.mosaics import flat, mosaic


@pytest.fixture(autouse=True)
def _no_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.delenv("FEDTTA_DATA", raising=False)


def office(root: Path, name: str = "office_caltech10", classes: int = 10) -> np.ndarray:
    """Two of the domains, amazon with a copy: picture 3 is picture 1 again, picture 5 too but of another class."""
    tiles = flat(12, 64, 0, colour=True) * 10
    tiles[[3, 5]] = tiles[1]
    labels = np.array([0, 1, 2, 1, 4, 5, 6, 0, 1, 2, 3, 4], np.uint8)
    mosaic(root / name / "amazon.jpg", tiles)
    mosaic(root / name / "webcam.jpg", tiles[::-1][:5])
    np.savez(
        root / name / "labels.npz", amazon=labels, webcam=labels[:5], classes=np.array(list("abcdefghij"[:classes]))
    )
    return tiles


def test_office_without_and_with_copies(tmp_path: Path) -> None:
    tiles = office(tmp_path)
    whole = load("office10", root=tmp_path, copies=True, image_size=64)
    assert whole.name == "office10 without caltech10, dslr"
    assert (whole.domains, len(whole), whole.classes) == (("amazon", "webcam"), 17, tuple("abcdefghij"))
    difference = whole.pixels[:12].astype(int) - tiles.transpose(0, 3, 1, 2)
    assert abs(difference).max() <= 4  # JPEG
    unique = load("office10", root=tmp_path, image_size=64)
    assert unique.labels.tolist() == [0, 1, 2, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1, 2, 1, 4]
    np.testing.assert_array_equal(unique.pixels[:11], whole.pixels[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]])
    assert load("office10", root=tmp_path, per_domain=3).shape == (3, 32, 32)
    assert len(load("office10", root=tmp_path, per_domain=3)) == 6


def domainnet(root: Path, domain: str, count: int = 2) -> None:
    for label, name in enumerate(CLASSES):
        for number in range(count):
            path = root / "domainnet" / domain / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 5), (10 * label, number, 0)).save(path)


def test_domainnet_decodes_what_is_drawn(tmp_path: Path) -> None:
    domainnet(tmp_path, "sketch")
    domainnet(tmp_path, "clipart")
    (tmp_path / "domainnet" / "sketch" / "airplane").mkdir()  # one of the other 335
    made = load("domainnet", root=tmp_path, image_size=8)
    assert made.name == "domainnet without infograph, painting, quickdraw, real"
    assert (made.domains, made.classes, len(made)) == (("clipart", "sketch"), CLASSES, 40)
    np.testing.assert_array_equal(made.pixels[:, 0, 0, 0], 10 * made.labels)
    (tmp_path / "domainnet" / "sketch" / "bird" / "0.png").write_bytes(b"no picture")
    drawn = load("domainnet", root=tmp_path, image_size=8, per_domain=10, domains="clipart")
    assert np.bincount(drawn.labels).tolist() == [1] * 10
    with pytest.raises(ValueError, match=r"0\.png is damaged"):
        load("domainnet", root=tmp_path, image_size=8, domains="sketch")


def officehome(root: Path, folder: str, names: tuple[str, ...] = ("Alarm_Clock", "Bike"), count: int = 2) -> None:
    for label, name in enumerate(names):
        for number in range(count):
            path = root / "officehome" / folder / name / f"{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 5), (100 * label, 0, 0)).save(path, quality=100)


def test_officehome_from_its_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="officehome: art, clipart, product, real_world not at hand"):
        load("officehome", root=tmp_path)
    officehome(tmp_path, "Art")
    officehome(tmp_path, "Real World", count=5)
    made = load("officehome", root=tmp_path, image_size=8)
    assert made.name == "officehome without clipart, product"
    assert (made.domains, made.classes, len(made)) == (("art", "real_world"), ("Alarm_Clock", "Bike"), 14)
    assert abs(made.pixels[:, 0, 0, 0].astype(int) - 100 * made.labels).max() <= 2  # JPEG
    few = load("officehome", root=tmp_path, image_size=8, per_domain=4)
    assert np.bincount(few.labels).tolist() == [4, 4]
    officehome(tmp_path, "Product", ("Alarm_Clock", "Couch"))
    with pytest.raises(ValueError, match=r"Product and .*Art differ in classes: Bike, Couch"):
        load("officehome", root=tmp_path, image_size=4)


def test_a_folder_of_all_domains(tmp_path: Path) -> None:
    domainnet(tmp_path, "sketch")
    domainnet(tmp_path, "real", count=1)
    made = load("folder", root=tmp_path, path="domainnet", domain="*", image_size=8)
    assert (made.name, made.domains) == ("folder", ("real", "sketch"))
    assert made.domain is not None
    assert np.bincount(made.domain).tolist() == [10, 20]
    one = load("folder", root=tmp_path, path="domainnet", domain="sketch", image_size=8)
    np.testing.assert_array_equal(made.pixels[made.domain == 1], one.pixels)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no domain folders"):
        load("folder", root=tmp_path, path="empty", domain="*")


ALL = {"digit5": "mnist, svhn, usps, synthdigits, mnistm", "office10": "amazon, caltech10, dslr, webcam",
       "pacs": "photo, art_painting, cartoon, sketch", "domainnet": ", ".join(DOMAINS)}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_at_hand_says_where_it_is_expected(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name}: {ALL[name]} not at hand; expected: {tmp_path}/"):
        load(name, root=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name} needs root"):
        load(name)
    with pytest.raises(ValueError, match=f"unknown domain 'oil' of {name}; there are: {ALL[name]}"):
        load(name, root=tmp_path, domains="oil")
    with pytest.raises(ValueError, match="there are: domains, per_domain, draw"):
        load(name, root=tmp_path, size=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_domain": -1}, "per_domain=-1 must be an integer from 0 on"),
        ({"per_domain": 2.5}, "per_domain=2.5"),
        ({"draw": -1}, "draw=-1"),
        ({"copies": 1}, "copies=1 must be true or false"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    office(tmp_path)
    with pytest.raises(ValueError, match=message):
        load("office10", root=tmp_path, **options)


def test_damaged_office_files_are_named(tmp_path: Path) -> None:
    office(tmp_path, classes=9)
    with pytest.raises(ValueError, match=r"labels\.npz: 10 class names are expected, got 9"):
        load("office10", root=tmp_path)
    np.savez(tmp_path / "office_caltech10" / "labels.npz", amazon=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz: no array 'webcam'"):
        load("office10", root=tmp_path)


ROOT = Path(os.environ.get("FEDTTA_DATA", "nowhere"))


@pytest.mark.parametrize(
    ("name", "folder", "options", "counts"),
    [
        ("digit5", "digits", {"per_domain": 0, "domains": "mnist,usps"}, [9438, 9291]),
        ("office10", "office_caltech10", {"copies": True}, [958, 1123, 157, 295]),
        ("office10", "office_caltech10", {}, [933, 1122, 157, 295]),
        ("pacs", "pacs64", {"domains": "photo"}, [1670]),
    ],
)
def test_real_counts(name: str, folder: str, options: dict[str, Any], counts: list[int]) -> None:
    if not (ROOT / folder).is_dir():
        pytest.skip("the data are not at hand")
    made = load(name, **options)
    assert made.domain is not None
    assert np.bincount(made.domain).tolist() == counts
    assert made.num_classes == DATASETS[name].classes
