"""Digit-5 from small files of the published forms, and draws with classes as even as they can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import savemat

from data import load
from data.datasets.shelves import balanced
from tests.data.mosaics import flat, mosaic

RNG = np.random.default_rng(0)
PARTS = ("train", "test")
_SIZES = (("train", 20), ("test", 10))


def write_digits(root: Path) -> None:
    """20 + 10 digits of each packed domain; a picture's value is its base, 100 more in the test part, + its number."""
    labels = {f"{name}_{part}": np.arange(n) % 10 for name in ("mnist", "usps", "mnistm") for part, n in _SIZES}
    for name, side, base in (("mnist", 28, 0), ("usps", 16, 30), ("mnistm", 32, 60)):
        for part, count in _SIZES:
            tiles = flat(count, side, base + 100 * (part == "test"), colour=name == "mnistm")
            mosaic(root / "digits" / f"{name}_{part}.{'webp' if name == 'mnistm' else 'png'}", tiles, columns=7)
    np.savez(root / "digits" / "labels.npz", **{key: one.astype(np.uint8) for key, one in labels.items()})


def write_matlab(root: Path, name: str, file: str, labels: Any, **changes: Any) -> np.ndarray:
    """One published file; returns its pictures as [n, 3, 32, 32]."""
    (root / name).mkdir(exist_ok=True)
    pixels = RNG.integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
    content = {"X": pixels, "y": np.asarray(labels)[:, None], **changes}
    savemat(root / name / file, {key: one for key, one in content.items() if one is not None})
    return pixels.transpose(3, 2, 0, 1)


def test_packed_digits_train_then_test(tmp_path: Path) -> None:
    write_digits(tmp_path)
    made = load("digit5", root=tmp_path, per_domain=0)
    assert made.name == "digit5 without svhn, synthdigits"
    assert made.domains == ("mnist", "usps", "mnistm")
    assert made.domain is not None
    assert made.domain.tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert made.labels.tolist() == [*range(10), *range(10), *range(10)] * 3
    values = np.concatenate([[*range(base, base + 20), *range(base + 100, base + 110)] for base in (0, 30, 60)])
    np.testing.assert_array_equal(made.pixels, np.broadcast_to(values[:, None, None, None], (90, 3, 32, 32)))


def test_published_street_numbers_and_synthetic_digits(tmp_path: Path) -> None:
    """A 10 in SVHN is the digit 0; both domains stand where the five are listed."""
    write_digits(tmp_path)
    pixels = {}
    for name, file, labels in (("svhn", "{}_32x32.mat", [1, 10, 3]), ("synthdigits", "synth_{}_32x32.mat", [0, 9])):
        pixels[name] = np.concatenate([write_matlab(tmp_path, name, file.format(part), labels) for part in PARTS])
    made = load("digit5", root=tmp_path, per_domain=0)
    assert (made.name, made.domains) == ("digit5", ("mnist", "svhn", "usps", "synthdigits", "mnistm"))
    for number, name, labels in ((1, "svhn", [1, 0, 3]), (3, "synthdigits", [0, 9])):
        own = made.domain == number
        np.testing.assert_array_equal(made.pixels[own], pixels[name])
        assert made.labels[own].tolist() == labels * 2


def test_a_draw_of_each_domain(tmp_path: Path) -> None:
    write_digits(tmp_path)
    made = load("digit5", root=tmp_path, per_domain=20)
    counts = [np.bincount(made.labels[made.domain == domain]).tolist() for domain in range(3)]
    assert counts == [[2] * 10] * 3
    alone = load("digit5", root=tmp_path, per_domain=20, domains=" usps ")
    assert alone.name == "digit5"
    np.testing.assert_array_equal(alone.pixels, made.pixels[made.domain == 1])  # company does not matter
    other = load("digit5", root=tmp_path, per_domain=20, draw=1)
    assert not np.array_equal(made.pixels, other.pixels)
    assert len(load("digit5", root=tmp_path, domains="mnistm,mnist")) == 60  # of 2,000: all
    assert load("digit5", root=tmp_path, domains="mnistm,mnist").domains == ("mnist", "mnistm")


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 70), st.integers(0, 99))
def test_a_balanced_draw_is_as_even_as_it_can_be(labels: list[int], count: int, seed: int) -> None:
    stock = np.array(labels, np.int64)
    drawn = balanced(stock, count, np.random.default_rng(seed))
    assert len(drawn) == (min(count, len(labels)) or len(labels))
    assert (np.diff(drawn) > 0).all()
    got, there = np.bincount(stock[drawn], minlength=5), np.bincount(stock, minlength=5)
    # Nobody who has more to give gives less than another, beyond the remainder of one.
    short = got < there
    assert not short.any() or got.max() - got[short].min() <= 1


def cut(root: Path) -> None:
    file = root / "digits" / "mnist_test.png"
    file.write_bytes(file.read_bytes()[:80])


def colour(root: Path) -> None:
    mosaic(root / "digits" / "usps_train.png", flat(20, 16, 0, colour=True))


def short(root: Path) -> None:
    mosaic(root / "digits" / "usps_train.png", flat(16, 16, 0))


def no_labels(root: Path) -> None:
    np.savez(root / "digits" / "labels.npz", mnist_train=np.zeros(20, np.uint8))


def no_test_part(root: Path) -> None:
    (root / "digits" / "mnistm_test.webp").unlink()


def matlab(labels: Any, **changes: Any) -> Callable[[Path], Any]:
    return lambda root: write_matlab(root, "svhn", "train_32x32.mat", labels, **changes)


def matlab_text(root: Path) -> None:
    (root / "svhn").mkdir()
    (root / "svhn" / "test_32x32.mat").write_bytes(b"")
    write_matlab(root, "svhn", "train_32x32.mat", [1])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut, ValueError, r"mnist_test\.png is damaged"),
        (colour, ValueError, r"usps_train\.png: a mosaic of 16 x 16 grey tiles is expected, got \(80, 64, 3\)"),
        (short, ValueError, r"usps_train\.png: 20 labels but only 16 tiles"),
        (no_labels, ValueError, r"labels\.npz: no array 'mnist_test'; there are: mnist_train"),
        (no_test_part, FileNotFoundError, r"mnistm_test\.png"),
        (matlab([0, 10]), ValueError, r"train_32x32\.mat: labels 0 and 10 both occur"),
        (matlab([0, 11]), ValueError, r"train_32x32\.mat: label 11 at 1"),
        (matlab([0], X=np.zeros((28, 28, 3, 1), np.uint8)), ValueError, r"X must be uint8 \[32, 32, 3, n\]"),
        (matlab([0], y=None), ValueError, "arrays X and y are expected"),
        (matlab_text, ValueError, r"test_32x32\.mat is damaged"),
    ],
)
def test_damaged_digits_are_named(
    tmp_path: Path, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    write_digits(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        load("digit5", root=tmp_path, per_domain=0)
