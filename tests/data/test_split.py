"""Splits of a client's samples: disjoint, complete, of the promised sizes; and shares of them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data.split import Split, sizes, split, subsample


@settings(max_examples=100, deadline=None)
@given(
    own=st.sets(st.integers(0, 10_000), max_size=80),
    seed=st.integers(0, 2**40),
    fractions=st.sampled_from([(0.6, 0.2, 0.2), (0.8, 0.0, 0.2), (1.0, 0.0, 0.0), (0.1, 0.45, 0.45)]),
)
def test_split_is_a_partition_of_the_indices(own: set[int], seed: int, fractions: tuple[float, float, float]) -> None:
    indices = np.array(sorted(own), dtype=np.int64)
    made = split(indices, seed, fractions)
    parts = [made.train, made.validation, made.test]

    assert sorted(np.concatenate(parts)) == sorted(own)
    assert len(made) == len(own)
    assert len(made.train) >= min(1, len(own))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * len(own)) < 1 or len(own) < 5
        assert (np.diff(part) > 0).all()

    again = split(indices[::-1], seed, fractions)  # the set decides, not the order
    np.testing.assert_array_equal(again.train, made.train)
    np.testing.assert_array_equal(again.test, made.test)


def test_sizes_are_largest_remainders() -> None:
    for count in range(200):
        exact = {"train": Fraction(3, 5) * count, "test": Fraction(1, 5) * count, "validation": Fraction(1, 5) * count}
        given_ = {part: int(quota) for part, quota in exact.items()}
        # The sort is stable: ties go to train, test, validation.
        ranked = sorted(exact, key=lambda part: exact[part] - given_[part], reverse=True)
        for part in ranked[: count - sum(given_.values())]:
            given_[part] += 1
        assert sizes(count, (0.6, 0.2, 0.2)) == (given_["train"], given_["validation"], given_["test"])


def test_a_tiny_client_has_training_samples_first() -> None:
    found = [sizes(count, (0.6, 0.2, 0.2)) for count in range(6)]
    assert found == [(0, 0, 0), (1, 0, 0), (1, 0, 1), (2, 0, 1), (2, 1, 1), (3, 1, 1)]
    assert sizes(1, (0.1, 0.45, 0.45)) == (1, 0, 0)
    assert sizes(2, (0.1, 0.45, 0.45)) == (1, 1, 0)
    assert sizes(1, (0.2, 0.6, 0.2)) == (1, 0, 0)  # from the largest part: here that of validation
    assert sizes(1, (0.2, 0.2, 0.6)) == (1, 0, 0)


def test_seeds_differ() -> None:
    indices = np.arange(100)
    assert not np.array_equal(split(indices, (0, 1)).test, split(indices, (0, 2)).test)
    np.testing.assert_array_equal(split(indices, 7).test, split(indices, (7,)).test)


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.3), (0.0, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5)])
def test_bad_fractions(fractions: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="fractions="):
        split(np.arange(10), 0, fractions)


def test_repeated_indices() -> None:
    with pytest.raises(ValueError, match="1 indices of the client are repeated"):
        split(np.array([1, 2, 2]), 0)


@given(st.integers(0, 200), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 9))
def test_a_smaller_share_is_a_subset_of_a_larger_one(count: int, first: float, second: float, seed: int) -> None:
    whole = split(np.arange(3, 3 + count), seed)
    small, large = (subsample(whole, part, part, seed) for part in sorted((first, second)))
    for name in ("train", "test"):
        own, more, less = (getattr(one, name) for one in (whole, large, small))
        assert len(more) == min(len(own), max(1, round(max(first, second) * len(own))))
        assert np.isin(more, own).all()
        assert np.isin(less, more).all()
        assert np.array_equal(more, np.unique(more))
    assert np.array_equal(small.validation, whole.validation)


def test_a_share_of_one_keeps_all_and_bad_shares_are_rejected() -> None:
    whole = split(np.arange(50), 1)
    same = subsample(whole, 1.0, 1.0, (1, 2))
    assert [part.tobytes() for part in (same.train, same.test)] == [whole.train.tobytes(), whole.test.tobytes()]
    nothing = np.empty(0, np.int64)
    assert len(subsample(Split(nothing, nothing, nothing), 0.5, 0.5, 1)) == 0
    for bad in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="part of train"):
            subsample(whole, bad, 1.0, 1)
        with pytest.raises(ValueError, match="part of test"):
            subsample(whole, 1.0, bad, 1)
