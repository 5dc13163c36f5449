"""Splits drawn anew in every round: other samples, the same sizes, all of it from the seed, and what leaks by it."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from data import Federation, Images, Split, check_no_leak, stream

PARTS = ("train", "validation", "test")
SEED, CLIENTS = 3, 5


def images(count: int = 600) -> Images:
    labels = np.arange(count, dtype=np.int64) % 4
    return Images("made", np.zeros((count, 1, 8, 8), np.uint8), labels, tuple("abcd"))


def federation(anew: bool = True, seed: int = SEED, scheme: str = "dirichlet") -> Federation:
    return Federation.create(images(), CLIENTS, scheme, alpha=1.0, seed=seed, anew=anew)


def same(one: Split, other: Split) -> bool:
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in PARTS)


def by_hand(own: np.ndarray, client: int, round: int) -> list[np.ndarray]:
    """A shuffle by (seed, client, round), cut at 60 and 80 %, of a client's sorted samples."""
    draw = np.random.default_rng(np.random.SeedSequence([zlib.crc32(b"split"), SEED, client, round]))
    shuffled, test = draw.permutation(own), round_half(0.2 * len(own))
    train = round_half(0.6 * len(own))
    return [np.sort(part) for part in np.split(shuffled, [train, len(own) - test])]


def round_half(value: float) -> int:
    return int(np.floor(value + 0.5))


def test_drawn_once_every_round_has_the_same() -> None:
    made = federation(anew=False)
    assert all(made.in_round(round) is made for round in (1, 2, 99))
    np.testing.assert_array_equal(made.trained_on(7), made.train_indices)


def test_drawing_anew_leaves_what_is_tested_alone() -> None:
    once, anew = federation(anew=False), federation()
    assert all(map(same, once.splits, anew.splits))
    for shift in ("original", "corrupted", "out_of_client"):
        ours, theirs = (stream(world, 1, shift, seed=2) for world in (anew, once))
        np.testing.assert_array_equal(ours.index, theirs.index)


@pytest.mark.parametrize("scheme", ["equal", "dirichlet", "iid"])
def test_a_round_has_other_splits_of_the_same_samples_and_sizes(scheme: str) -> None:
    made = federation(scheme=scheme)
    rounds = [made, *(made.in_round(round) for round in (1, 2, 3))]
    for client in range(CLIENTS):
        drawn = [one.splits[client] for one in rounds]
        for one in drawn[1:]:
            np.testing.assert_array_equal(one.samples, drawn[0].samples)
            assert [len(getattr(one, part)) for part in PARTS] == [len(getattr(drawn[0], part)) for part in PARTS]
            assert len(np.unique(one.samples)) == len(one)
        assert not any(same(one, other) for i, one in enumerate(drawn) for other in drawn[:i])


def test_a_round_is_a_shuffle_by_seed_client_and_round() -> None:
    even = Federation.create(images(), 6, "equal", seed=SEED, anew=True)  # 100 samples each: 60, 20, 20
    for round in (1, 4):
        for client, one in enumerate(even.in_round(round).splits):
            expected = by_hand(even.splits[client].samples, client, round)
            assert all(np.array_equal(getattr(one, part), it) for part, it in zip(PARTS, expected, strict=True))


def test_the_same_seed_draws_the_same_in_any_order_and_another_does_not() -> None:
    one, again, other = federation(), federation(), federation(seed=4)
    late, early = one.in_round(5).splits, one.in_round(1).splits
    assert all(map(same, early, again.in_round(1).splits))
    assert all(map(same, late, again.in_round(5).splits))
    assert not any(map(same, early, other.in_round(1).splits))


def test_what_was_trained_on_are_the_training_splits_of_all_rounds_so_far() -> None:
    made = federation()
    seen: set[int] = set()
    for rounds in range(1, 7):
        seen |= {int(index) for one in made.in_round(rounds).splits for index in one.train}
        assert made.trained_on(rounds).tolist() == sorted(seen)
    assert len(made.trained_on(0)) == 0


def test_after_five_rounds_almost_every_test_sample_leaks() -> None:
    """A sample is in none of five training splits with probability 0.4⁵ = 1 %."""
    made = federation()
    streams = [stream(made, client, shift, seed=1) for client in range(CLIENTS) for shift in ("original", "corrupted")]
    trained = {int(index) for round in range(1, 6) for one in made.in_round(round).splits for index in one.train}
    leaked = sum(int(index) in trained for one in streams for index in one.index)
    assert sum(check_no_leak(one, made, rounds=5) for one in streams) == leaked
    assert leaked / sum(map(len, streams)) > 0.95
    assert sum(check_no_leak(one, made, rounds=0) for one in streams) == 0


def test_a_leak_is_not_counted_without_the_rounds() -> None:
    made = federation()
    with pytest.raises(ValueError, match="depends on rounds"):
        check_no_leak(stream(made, 0, "original", seed=1), made)


def test_the_tested_split_is_no_rounds() -> None:
    with pytest.raises(ValueError, match="round=0"):
        federation().in_round(0)


def test_clients_that_only_test_have_no_split_to_draw() -> None:
    with pytest.raises(ValueError, match="all clients train and test"):
        Federation.create(images(), CLIENTS, "iid", target_fraction=0.4, anew=True)
