"""Train, validation, test: one draw, nothing lost, nothing twice."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.split import sizes, split


@settings(max_examples=100, deadline=None)
@given(
    own=st.sets(st.integers(0, 10_000), max_size=80),
    seed=st.integers(0, 2**40),
    fractions=st.sampled_from([(0.6, 0.2, 0.2), (0.8, 0.0, 0.2), (1.0, 0.0, 0.0), (0.1, 0.45, 0.45)]),
)
def test_split_is_a_partition_of_the_indices(own, seed, fractions):
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


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, (0, 0, 0)),
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
        (3, (2, 0, 1)),
        (4, (2, 1, 1)),
        (5, (3, 1, 1)),
        (3000, (1800, 600, 600)),
    ],
)
def test_sizes_by_hand(count, expected):
    assert sizes(count, (0.6, 0.2, 0.2)) == expected


def test_sizes_are_largest_remainders():
    for count in range(200):
        exact = {"train": Fraction(3, 5) * count, "test": Fraction(1, 5) * count, "validation": Fraction(1, 5) * count}
        given_ = {part: int(quota) for part, quota in exact.items()}
        ranked = sorted(
            exact, key=lambda part: exact[part] - given_[part], reverse=True
        )  # stable: train, test, validation
        for part in ranked[: count - sum(given_.values())]:
            given_[part] += 1
        assert sizes(count, (0.6, 0.2, 0.2)) == (given_["train"], given_["validation"], given_["test"])


def test_a_tiny_client_trains_first():
    assert sizes(1, (0.1, 0.45, 0.45)) == (1, 0, 0)
    assert sizes(2, (0.1, 0.45, 0.45)) == (1, 1, 0)


def test_seeds_differ():
    indices = np.arange(100)
    assert not np.array_equal(split(indices, (0, 1)).test, split(indices, (0, 2)).test)
    np.testing.assert_array_equal(split(indices, 7).test, split(indices, (7,)).test)


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.3), (0.0, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5)])
def test_bad_fractions(fractions):
    with pytest.raises(ValueError, match="fractions="):
        split(np.arange(10), 0, fractions)


def test_repeated_indices():
    with pytest.raises(ValueError, match="1 indices of the client are repeated"):
        split(np.array([1, 2, 2]), 0)
