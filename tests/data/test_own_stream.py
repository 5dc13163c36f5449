"""Streams of a device with data of its own, and what depends on its name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtta.data import Federation, Images, LazyRows, OwnStream, Split, client_number, resolve, stream
from fedtta.data.rng import generator
from fedtta.data.sources.pixels import LazyPixels

COUNT = 30


def device(name: str = "site-a", seed: int = 1, lazy: bool = False) -> Federation:
    """A device with 30 images, the last 12 for testing."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 16, 16)).astype(np.uint8)
    labels = np.arange(COUNT) % 3
    images = Images("own", pixels, labels, ("a", "b", "c"))
    if lazy:
        images = replace(images, pixels=LazyPixels(lambda i: pixels[i], pixels.shape, 1 << 12))
    split = Split(np.arange(10), np.arange(10, 18), np.arange(18, COUNT))
    return Federation.of_device(images, split, "both", client_number(name), seed, np.arange(COUNT))


def test_numbers_of_clients_are_those_of_decimal_names_and_hashes_of_others() -> None:
    assert [client_number(name) for name in ("0", "17", "4294967295")] == [0, 17, 4294967295]
    others = [client_number(name) for name in ("site-a", "site-b", "007", "-1", "1.0", "a" * 64)]
    assert len(set(others)) == len(others)
    assert all(2**32 <= number < 2**32 + 2**62 for number in others)
    draws = [generator("test", 1, number).integers(2**31) for number in (*others, 0, 17)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("brfl", ("original", "corrupted")),
        ("btgfl", ("original_ind", "shifted_ind")),
        ("corrupted", ("corrupted",)),
        ("mixture,original", ("original",)),
    ],
)
def test_a_device_alone_has_the_shifts_that_need_no_other_images(spec: str, names: tuple[str, ...]) -> None:
    found, note = resolve(spec, has_natural=False, alone=True)
    assert found == names
    assert (note is None) == (spec == "corrupted")
    assert resolve(spec, has_natural=True, alone=True)[0] == names
    for name in names:
        assert len(stream(device(), 0, name, seed=1)) == 12


def test_a_shift_that_needs_other_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none is available.*original, corrupted"):
        resolve("mixture,natural", has_natural=True, alone=True)
    with pytest.raises(ValueError, match="'mixture' needs images of other clients"):
        stream(device(), 0, "mixture", seed=1)


@pytest.mark.parametrize("shift", ["original", "corrupted", "shifted_ind"])
def test_streams_from_disk_have_the_bits_of_streams_in_memory(shift: str) -> None:
    one, other = (stream(device(lazy=lazy), 0, shift, seed=3) for lazy in (True, False))
    assert isinstance(one.x, LazyRows)
    assert isinstance(other.x, torch.Tensor)
    assert one.x[0:12].equal(other.x)
    assert torch.cat(list(one.x.split(5))).equal(other.x)
    assert one.y.equal(other.y)
    assert (one.index == other.index).all()
    assert (one.source == other.source).all()


def test_the_order_of_a_stream_depends_on_seed_and_name() -> None:
    first = stream(device(), 0, "original", seed=1).index
    assert (stream(device(), 0, "original", seed=1).index == first).all()
    assert (stream(device("site-b"), 0, "original", seed=1).index != first).any()
    assert (stream(device(), 0, "original", seed=2).index != first).any()


@pytest.mark.parametrize(("size", "sizes"), [(5, [5, 5, 2]), (12, [12]), (100, [12]), (6, [6, 6])])
def test_test_time_rounds_go_once_over_the_test_images_in_a_fixed_order(size: int, sizes: list[int]) -> None:
    made = OwnStream(device(), size)
    batches = [made.batch(round) for round in range(made.rounds)]
    assert [len(batch) for batch in batches] == sizes
    index = np.concatenate([batch.index for batch in batches])
    assert sorted(index) == list(range(18, COUNT))
    for batch in batches:
        assert batch.corruption == "original"
        assert batch.x.equal(device().images.batch(batch.index))
        assert batch.y.tolist() == (batch.index % 3).tolist()
    assert (OwnStream(device(), size).order == made.order).all()
    assert (OwnStream(device("site-b"), size).order != made.order).any()
    assert (OwnStream(device(seed=2), size).order != made.order).any()
    assert OwnStream(device(), size, in_order=True).order.tolist() == list(range(18, COUNT))
    for round in (-1, made.rounds):
        with pytest.raises(ValueError, match=re.escape(f"round={round} is not in 0..{made.rounds - 1}")):
            made.batch(round)


def test_equal_content_counts_as_the_same_sample() -> None:
    plain = device()
    twins = replace(plain, content=np.arange(COUNT) % 28)  # samples 28 and 29 are 0 and 1 again
    samples = np.array([18, 28, 29, -1])
    assert plain.among(samples, plain.train_indices).tolist() == [False] * 4
    assert twins.among(samples, plain.train_indices).tolist() == [False, True, True, False]
