"""Labelled pictures: what is refused, what is shared, what a batch is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Images


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
        (PIXELS, LABELS[:1], ("a",), ValueError, "2 pictures but labels"),
        (PIXELS, LABELS + 1, ("a",), ValueError, "labels run from 1 to 1"),
        (PIXELS, LABELS - 1, ("a",), ValueError, "labels run from -1"),
        (PIXELS, LABELS, (), ValueError, "class names"),
        (PIXELS, LABELS, ("a", "a"), ValueError, "class names"),
    ],
)
def test_what_does_not_fit_is_refused(pixels, labels, classes, error, message):
    with pytest.raises(error, match=message):
        Images("made", pixels, labels, classes)
