"""Masks cancel in the sum and hide single vectors; numbers as integers are exact in any order."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedtta.messages.replies import RefinedRates, Summarized, Trained
from fedtta.privacy import masking
from fedtta.privacy.sums import length, to_mean, to_vector

SIZE = 5
NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=SIZE, max_size=SIZE)


def test_masks_of_pairs_cancel_in_the_sum() -> None:
    keys = {number: masking.new_secret() for number in (3, 7, 12)}
    public = {number: masking.public_key(key) for number, key in keys.items()}
    masks = [
        masking.pair_masks(key, own, [(n, public[n]) for n in keys if n != own], "s", SIZE) for own, key in keys.items()
    ]
    assert sum(masks).tolist() == [0] * SIZE  # type: ignore[union-attr]
    assert all(len(set(one.tolist())) == SIZE for one in masks)


def test_a_mask_belongs_to_its_session_and_is_aes_in_counter_mode() -> None:
    key, other = masking.new_secret(), masking.public_key(masking.new_secret())
    assert (masking.pair_masks(key, 1, [(2, other)], "a", 3) != masking.pair_masks(key, 1, [(2, other)], "b", 3)).all()
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    block = encryptor.update((0).to_bytes(16)) + encryptor.update((1).to_bytes(16))
    assert masking.mask(key, 4).tobytes() == block


def test_a_masked_vector_tells_nothing_of_its_numbers() -> None:
    """Bits of one vector under fresh masks are fair coins, whatever the numbers are."""
    words = np.concatenate([masking.mask(masking.new_secret(), 1000) for _ in range(20)])
    bits = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 6 * 0.5 / np.sqrt(64 * len(words))


@examples(max_examples=60)
@given(rows=st.lists(st.tuples(NUMBERS, st.integers(1, 500)), min_size=1, max_size=8), data=st.data())
def test_a_sum_is_exact_in_any_order_and_rounding_is_bounded(
    rows: list[tuple[list[float], int]], data: st.DataObject
) -> None:
    bits = masking.fraction_bits(len(rows), 500)
    words = [masking.encode(weight * np.array(values), bits, 500) for values, weight in rows]
    orders = [words, data.draw(st.permutations(words))]
    totals = [masking.decode(sum(one, np.zeros(SIZE, np.uint64)), bits) for one in orders]
    assert totals[0].tobytes() == totals[1].tobytes()
    exact = sum(weight * np.array(values) for values, weight in rows)
    assert np.abs(totals[0] - exact).max() <= len(rows) * 2.0**-bits + 1e-12 * np.abs(exact).max()


@given(clients=st.integers(1, 10_000), most=st.integers(1, 100_000))
def test_the_largest_sum_does_not_overflow(clients: int, most: int) -> None:
    bits = masking.fraction_bits(clients, most)
    assert clients * most * masking.LIMIT * 2**bits < 2**63
    assert bits >= 8


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**16 * 3 + 1])
def test_what_would_spoil_a_sum_is_not_encoded(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be summed"):
        masking.encode(np.array([0.0, value]), 20, 3)
    with pytest.raises(ValueError, match="too many"):
        masking.fraction_bits(100_000, 10_000_000)


def test_a_sealed_share_opens_with_its_key_and_for_its_purpose_only() -> None:
    one, other = masking.new_secret(), masking.new_secret()
    key = masking.shared_key(one, masking.public_key(other), "share")
    assert key == masking.shared_key(other, masking.public_key(one), "share")
    assert key != masking.shared_key(other, masking.public_key(one), "mask")
    sealed = masking.seal(key, b"text", "from 1 to 2")
    assert masking.unseal(key, sealed, "from 1 to 2") == b"text"
    for wrong in (sealed[:-1], b"", sealed[:5], bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(ValueError, match="from 1 to 2"):
            masking.unseal(key, wrong, "from 1 to 2")
    with pytest.raises(ValueError, match="from 2 to 1"):
        masking.unseal(key, sealed, "from 2 to 1")


# -- replies as vectors

COUNTS = {"validation_total": 4, "validation_correct": 2, "personal_validation_correct": 3, "seconds": 0.5}
SHAPES = {"b": ((2, 1), "float32"), "a": ((), "float64")}


def trained(value: float, examples: int) -> Trained:
    return Trained(arrays={}, num_examples=examples, train_loss=value, **COUNTS)


def test_the_mean_reply_of_a_sum_by_hand() -> None:
    total = sum(
        to_vector(trained(value, n), {"b": np.full((2, 1), value), "a": np.array(-value)}, n)
        for value, n in ((1.0, 1), (5.0, 3))
    )
    assert length(Trained, SHAPES) == len(total)
    mean = to_mean(trained(9, 1), total, SHAPES)
    assert isinstance(mean, Trained)
    assert {name: (value.shape, str(value.dtype)) for name, value in mean.arrays.items()} == SHAPES
    np.testing.assert_allclose([*mean.arrays["b"].ravel(), mean.arrays["a"]], [4, 4, -4])
    assert (mean.num_examples, mean.train_loss, mean.seconds) == (4, 4.0, 0.5)
    assert (mean.validation_total, mean.validation_correct, mean.personal_validation_correct) == (8, 4, 6)


def test_a_count_that_no_client_has_stays_without_value() -> None:
    one = Summarized(statistics={}, num_examples=3, **{**COUNTS, "personal_validation_correct": None})
    mean = to_mean(one, to_vector(one, {"a": np.array(1.0)}, 1), {"a": ((), "float64")})
    assert mean.personal_validation_correct is None  # type: ignore[attr-defined]


def test_a_sum_that_is_none_of_replies_is_refused() -> None:
    one = RefinedRates(rates={}, num_examples=3, loss=1.0, correct=1, seconds=0.0)
    total = to_vector(one, {"a": np.array(1.0)}, 1)
    total[-1] = -5
    with pytest.raises(ValueError, match="none of replies"):
        to_mean(one, total, {"a": ((), "float64")})
