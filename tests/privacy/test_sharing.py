"""Shamir's secret sharing: t shares give the secret back, fewer or changed ones do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedtta.privacy.sharing import PRIME, SECRET, combine, split


@examples(max_examples=40)
@given(secret=st.binary(min_size=SECRET, max_size=SECRET), data=st.data())
def test_any_threshold_of_the_shares_gives_the_secret_back(secret: bytes, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, split(secret, threshold, points), strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert combine({point: shares[point] for point in chosen}) == secret
    assert combine(shares) == secret  # more are as good


def test_one_share_too_few_fits_any_secret() -> None:
    """With t - 1 shares every secret is possible: the last share decides which, here by hand for t = 2."""
    one = split(b"\1" * SECRET, 2, [1, 2])[0]
    for secret in (bytes(SECRET), b"\2" * SECRET):
        slope = (int.from_bytes(one) - int.from_bytes(secret)) % PRIME
        other = (int.from_bytes(one) + slope) % PRIME
        assert combine({1: one, 2: other.to_bytes(66)}) == secret


def test_shares_are_drawn_for_each_split() -> None:
    assert split(bytes(SECRET), 2, [1, 2]) != split(bytes(SECRET), 2, [1, 2])


def test_a_changed_share_gives_another_secret_or_none() -> None:
    secret = b"\5" * SECRET
    shares = dict(zip([1, 2, 3], split(secret, 3, [1, 2, 3]), strict=True))
    shares[2] = bytes(66)
    with pytest.raises(ValueError, match="not of one secret"):
        combine(shares)
    with pytest.raises(ValueError, match="not of one secret"):
        combine({})


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [(b"short", 1, [1]), (bytes(32), 0, [1]), (bytes(32), 3, [1, 2]), (bytes(32), 1, [0]), (bytes(32), 1, [2, 2])],
)
def test_what_cannot_be_split_is_refused(secret: bytes, threshold: int, points: list[int]) -> None:
    with pytest.raises(ValueError, match=r"secret|threshold|points"):
        split(secret, threshold, points)
