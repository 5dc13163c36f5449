"""Labelled images: validation, sharing, batches, subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data import Images


def images(count=12, classes=3):
    pixels = np.arange(count * 3 * 2 * 2, dtype=np.uint8).reshape(count, 3, 2, 2)
    return Images("made", pixels, np.arange(count, dtype=np.int64) % classes, tuple("abcde"[:classes]))


def test_a_batch_is_bytes_over_255():
    made = images()
    x = made.batch([3, 0])
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), made.pixels[[3, 0]] / np.float32(255), rtol=1e-7)
    assert made.batch(np.empty(0, np.int64)).shape == (0, 3, 2, 2)
    assert (len(made), made.num_classes, made.shape) == (12, 3, (3, 2, 2))


def test_arrays_are_read_only_and_the_callers_stay_writable():
    pixels, labels = np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2, np.int64)
    made = Images("made", pixels, labels, ("a",))
    with pytest.raises(ValueError, match="read-only"):
        made.pixels[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        made.labels[0] = 1
    pixels[0] = 1
    made.batch([0]).zero_()
    assert pixels[0].all()


def test_subset_keeps_the_order_asked_for():
    made = images().subset([5, 1])
    assert made.labels.tolist() == [2, 1]
    np.testing.assert_array_equal(made.pixels, images().pixels[[5, 1]])


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), max_size=60),
    fraction=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
)
def test_stratified_keeps_the_class_mix(labels, fraction, seed):
    numbers = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    made = Images("made", numbers, np.array(labels, np.int64), tuple("abcd"))
    part = made.stratified(fraction, seed)
    kept = part.pixels.ravel()
    for label in range(4):
        whole = labels.count(label)
        expected = min(whole, max(1, round(fraction * whole)))
        assert int((part.labels == label).sum()) == expected
    assert (np.diff(kept.astype(int)) > 0).all()
    np.testing.assert_array_equal(part.labels, made.labels[kept])
    np.testing.assert_array_equal(made.stratified(fraction, seed).pixels, part.pixels)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01, float("nan")])
def test_bad_fraction(fraction):
    with pytest.raises(ValueError, match="fraction="):
        images().stratified(fraction, 0)


PIXELS, LABELS = np.zeros((2, 3, 4, 4), np.uint8), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("pixels", "labels", "classes", "error", "message"),
    [
        (PIXELS.astype(float), LABELS, ("a",), TypeError, "uint8"),
        (PIXELS, LABELS.astype(np.int32), ("a",), TypeError, "int64"),
        (PIXELS[0], LABELS, ("a",), ValueError, r"\[N, C, H, W\]"),
        (PIXELS, LABELS[:1], ("a",), ValueError, "2 images but labels"),
        (PIXELS, LABELS + 1, ("a",), ValueError, "labels run from 1 to 1"),
        (PIXELS, LABELS - 1, ("a",), ValueError, "labels run from -1"),
        (PIXELS, LABELS, (), ValueError, "class names"),
        (PIXELS, LABELS, ("a", "a"), ValueError, "class names"),
    ],
)
def test_inconsistent_arrays_are_rejected(pixels, labels, classes, error, message):
    with pytest.raises(error, match=message):
        Images("made", pixels, labels, classes)


# Domains ------------------------------------------------------------------------------------------------------------

NAMES = ("ink", "paint", "photo")


def with_domains(domain: Any, labels: Any) -> Images:
    """Images of one pixel, their number."""
    pixels = np.arange(len(labels)).astype(np.uint8).reshape(-1, 1, 1, 1)
    return Images("made", pixels, np.asarray(labels, np.int64), tuple("abcde"), NAMES, np.asarray(domain, np.int64))


def test_a_part_of_the_images_keeps_its_domains() -> None:
    part = with_domains([0, 1, 2, 0, 1, 2], [0] * 6).subset([5, 4, 0])
    assert part.domains == NAMES
    assert part.domain is not None
    assert part.domain.tolist() == [2, 1, 0]
    assert not part.domain.flags.writeable


def test_a_fraction_keeps_every_class_of_every_domain() -> None:
    sizes = {(0, 0): 20, (0, 1): 7, (2, 0): 3, (2, 4): 1}
    images = with_domains(
        [domain for (domain, _), n in sizes.items() for _ in range(n)],
        [label for (_, label), n in sizes.items() for _ in range(n)],
    )
    part = images.stratified(0.25, 3)
    assert part.domain is not None
    got = {key: int(((part.domain == key[0]) & (part.labels == key[1])).sum()) for key in sizes}
    assert got == {(0, 0): 5, (0, 1): 2, (2, 0): 1, (2, 4): 1}
    assert (np.diff(part.pixels.ravel().astype(int)) > 0).all()


@pytest.mark.parametrize(
    ("domains", "domain", "error", "message"),
    [
        (("a",), None, ValueError, "no domain of each image"),
        ((), np.zeros(2, np.int64), ValueError, "domain names must be present"),
        (("a", "a"), np.zeros(2, np.int64), ValueError, "present and different"),
        (("a",), np.zeros(3, np.int64), ValueError, "2 images but domain"),
        (("a",), np.array([0, 1]), ValueError, "domain runs from 0 to 1, but there are 1"),
        (("a",), np.array([0, -1]), ValueError, "domain runs from -1"),
        (("a",), np.zeros(2), TypeError, "domain must be int64, got float64"),
    ],
)
def test_inconsistent_domains_are_rejected(
    domains: tuple[str, ...], domain: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Images("made", np.zeros((2, 1, 1, 1), np.uint8), np.zeros(2, np.int64), ("x",), domains, domain)


def test_images_without_labels() -> None:
    made = Images("made", PIXELS, LABELS - 1, ("a", "b"), labelled=False)
    assert made.subset([1]).labels.tolist() == [-1]
    assert not made.subset([1]).labelled
    with pytest.raises(ValueError, match="labels of images without labels must be -1"):
        Images("made", PIXELS, LABELS, ("a", "b"), labelled=False)
