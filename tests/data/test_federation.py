"""Federations: no shared samples, none lost, everything from the seed; domains and resampled splits."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from fedtta.data import SCHEMES, Federation, Images, Split, check_no_leak, stream
from fedtta.data.domains import render_domains
from fedtta.data.partition import partition

NAMES = ("ink", "paint", "photo")
PARTS = ("train", "validation", "test")


def make_images(count: int = 600, classes: int = 10, domains: int = 3, size: int = 8) -> Images:
    """Classes and domains in turn, so that the samples of neither are contiguous."""
    number = np.arange(count, dtype=np.int64)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    labels = number // max(1, domains) % classes
    with_domains = (NAMES[:domains], number % domains) if domains else ()
    return Images("made", pixels, labels, tuple("abcdefghij"[:classes]), *with_domains)


def same(one: Split, other: Split) -> bool:
    return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in PARTS)


# Contract of all schemes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unseen", ["", "paint"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_belong_to_one_split_of_one_client(scheme: str, unseen: str) -> None:
    made = Federation.create(make_images(), 6, scheme, alpha=0.5, seed=3, unseen_domain=unseen)
    tests = np.concatenate([one.test for one in made.splits])
    together = np.concatenate([*(one.samples for one in made.splits), made.unseen])

    assert made.num_clients == 6
    assert made.roles == ("both",) * 6
    assert len(np.unique(together)) == len(together)
    assert len(together) > 590  # "equal" leaves N mod 6
    assert sorted([*made.train_indices, *tests, *made.unseen]) == sorted(together)
    assert made.unseen.tolist() == (list(range(1, 600, 3)) if unseen else [])
    others = [one.test for client, one in enumerate(made.splits) if client != 2]
    np.testing.assert_array_equal(made.others_test(2), np.concatenate(others))
    names = [name for name in NAMES if name != unseen]
    expected = tuple(name for name in names for _ in range(6 // len(names)))
    assert made.origins == (expected if SCHEMES[scheme].by_domain else (None,) * 6)

    again = Federation.create(make_images(), 6, scheme, alpha=0.5, seed=3, unseen_domain=unseen)
    other = Federation.create(make_images(), 6, scheme, alpha=0.5, seed=4, unseen_domain=unseen)
    assert all(map(same, made.splits, again.splits))
    assert not any(map(same, made.splits, other.splits))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_are_those_of_the_partition(scheme: str) -> None:
    images = make_images()
    made = Federation.create(images, 6, scheme, alpha=0.7, seed=5, step_ratio=4.0)
    expected = partition(images.labels, 6, scheme, 0.7, 5, 1, 4.0, images.domain, images.domains)
    for one, own in zip(made.splits, expected, strict=True):
        np.testing.assert_array_equal(one.samples, own)
    if not SCHEMES[scheme].by_domain:  # the domains have no effect
        plain = Images("plain", images.pixels, images.labels, images.classes)
        without = Federation.create(plain, 6, scheme, alpha=0.7, seed=5, step_ratio=4.0)
        assert all(map(same, made.splits, without.splits))


def test_class_counts_are_of_the_training_split() -> None:
    made = Federation.create(make_images(), 5, alpha=0.1, seed=0)
    counts = made.class_counts()
    assert counts.shape == (5, 10)
    for client in range(5):
        for label in range(10):
            assert counts[client, label] == sum(made.images.labels[i] == label for i in made.splits[client].train)


def test_one_client_has_no_others() -> None:
    made = Federation.create(make_images(50), 1)
    assert len(made.others_test(0)) == 0
    assert len(made.splits[0]) == 50


def test_clients_keep_a_share_of_their_samples() -> None:
    whole = Federation.create(make_images(), 4, seed=1)
    part = Federation.create(make_images(), 4, seed=1, train_part=0.5, test_part=0.75)
    for before, after in zip(whole.splits, part.splits, strict=True):
        assert len(after.train) == round(0.5 * len(before.train))
        assert len(after.test) == round(0.75 * len(before.test))
        np.testing.assert_array_equal(after.validation, before.validation)
        assert np.isin(after.train, before.train).all()
        assert np.isin(after.test, before.test).all()


# Domains and roles --------------------------------------------------------------------------------------------------


def test_one_domains_clients_are_the_targets() -> None:
    """ATP: 80/20 at the sources, all samples of the target domain for testing."""
    made = Federation.create(make_images(180), 6, "domain", target_domain="paint", seed=1)
    assert made.roles == ("source", "source", "target", "target", "source", "source")
    sizes = [(len(one.train), len(one.validation), len(one.test)) for one in made.splits]
    assert sizes == [(24, 6, 0)] * 2 + [(0, 0, 30)] * 2 + [(24, 6, 0)] * 2
    assert made.images.domain is not None
    assert set(made.images.domain[made.train_indices]) == {0, 2}


def test_corrupted_domains_are_rendered() -> None:
    images = make_images(36, size=16)
    settings: dict[str, Any] = {"domains": "corruptions", "target_domain": "ink", "seed": 4}
    made, again = (Federation.create(images, 3, "domain", **settings) for _ in range(2))
    clients = [np.arange(client, 36, 3) for client in range(3)]
    np.testing.assert_array_equal(made.images.pixels, render_domains(images, clients, made.domains, 4).pixels)
    np.testing.assert_array_equal(made.images.pixels, again.images.pixels)
    assert (made.roles, made.domains) == (again.roles, again.domains)
    assert (made.images.pixels != images.pixels).any()


PLAIN = make_images(12, domains=0)
ONE = make_images(4, domains=1)


@pytest.mark.parametrize(
    ("images", "arguments", "message"),
    [
        (make_images(), {"scheme": "domains"}, "unknown partition scheme 'domains'; there are: .*domain_step"),
        (PLAIN, {"scheme": "domain"}, "partition 'domain' needs images with domains"),
        (make_images(), {"target_domain": "ink"}, "'ink': allowed with partition domain or domain_step only"),
        (make_images(), {"scheme": "domain", "target_domain": "oil"}, "'oil': no client has it; made has .*: ink"),
        (make_images(), {"scheme": "domain", "target_domain": "ink", "target_fraction": 0.3}, "exclude each other"),
        (ONE, {"scheme": "domain", "target_domain": "ink"}, "target_domain='ink' leaves no source"),
        (make_images(), {"unseen_domain": "oil"}, "unseen_domain='oil': made has the domains: ink, paint"),
        (PLAIN, {"unseen_domain": "ink"}, "unseen_domain='ink': made has the domains: none"),
        (ONE, {"unseen_domain": "ink"}, "unseen_domain='ink' has 4 of the 4 images"),
        (PLAIN, {"resample_splits": True, "target_fraction": 0.4}, "all clients train and test"),
        (PLAIN, {"resample_splits": True, "test_part": 0.5}, "allowed with train_part=1 and test_part=1, not"),
    ],
)  # fmt: skip
def test_bad_arguments(images: Images, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Federation.create(images, **{"num_clients": 3, **arguments})


# Resampled splits ---------------------------------------------------------------------------------------------------

SEED, CLIENTS = 3, 5


def resampled(resample: bool = True, seed: int = SEED, scheme: str = "dirichlet") -> Federation:
    return Federation.create(make_images(), CLIENTS, scheme, alpha=1.0, seed=seed, resample_splits=resample)


def test_without_resampling_every_round_has_the_same_splits() -> None:
    made = resampled(False)
    assert all(made.in_round(round) is made for round in (1, 2, 99))
    np.testing.assert_array_equal(made.trained_on(7), made.train_indices)


def test_resampling_does_not_change_what_is_tested() -> None:
    once, redrawn = resampled(False), resampled()
    assert all(map(same, once.splits, redrawn.splits))
    for shift in ("original", "corrupted", "out_of_client"):
        ours, theirs = (stream(world, 1, shift, seed=2) for world in (redrawn, once))
        np.testing.assert_array_equal(ours.index, theirs.index)


@pytest.mark.parametrize("scheme", ["equal", "dirichlet", "iid"])
def test_a_round_has_other_splits_of_the_same_samples_and_sizes(scheme: str) -> None:
    made = resampled(scheme=scheme)
    rounds = [made, *(made.in_round(round) for round in (1, 2, 3))]
    for client in range(CLIENTS):
        drawn = [one.splits[client] for one in rounds]
        for one in drawn[1:]:
            np.testing.assert_array_equal(one.samples, drawn[0].samples)
            assert [len(getattr(one, part)) for part in PARTS] == [len(getattr(drawn[0], part)) for part in PARTS]
            assert len(np.unique(one.samples)) == len(one)
        assert not any(same(one, other) for i, one in enumerate(drawn) for other in drawn[:i])


def test_a_round_is_a_shuffle_by_seed_client_and_round() -> None:
    made = Federation.create(make_images(), 6, "equal", seed=SEED, resample_splits=True)  # 100 samples: 60, 20, 20
    for round in (1, 4):
        for client, one in enumerate(made.in_round(round).splits):
            draw = np.random.default_rng(np.random.SeedSequence([zlib.crc32(b"split"), SEED, client, round]))
            expected = np.split(draw.permutation(made.splits[client].samples), [60, 80])
            assert all(
                np.array_equal(getattr(one, part), np.sort(it)) for part, it in zip(PARTS, expected, strict=True)
            )


def test_rounds_can_be_drawn_in_any_order() -> None:
    one, again, other = resampled(), resampled(), resampled(seed=4)
    late, early = one.in_round(5).splits, one.in_round(1).splits
    assert all(map(same, early, again.in_round(1).splits))
    assert all(map(same, late, again.in_round(5).splits))
    assert not any(map(same, early, other.in_round(1).splits))
    with pytest.raises(ValueError, match="round=0"):  # would be the split that is tested
        one.in_round(0)


def test_trained_samples_are_the_training_splits_of_all_rounds_so_far() -> None:
    made = resampled()
    seen: set[int] = set()
    for rounds in range(1, 7):
        seen |= {int(index) for one in made.in_round(rounds).splits for index in one.train}
        assert made.trained_on(rounds).tolist() == sorted(seen)
    assert len(made.trained_on(0)) == 0


def test_after_five_rounds_almost_every_test_sample_leaks() -> None:
    """A sample is in none of five training splits with probability 0.4⁵ = 1 %."""
    made = resampled()
    streams = [stream(made, client, shift, seed=1) for client in range(CLIENTS) for shift in ("original", "corrupted")]
    trained = {int(index) for round in range(1, 6) for one in made.in_round(round).splits for index in one.train}
    leaked = sum(int(index) in trained for one in streams for index in one.index)
    assert sum(check_no_leak(one, made, rounds=5) for one in streams) == leaked
    assert leaked / sum(map(len, streams)) > 0.95
    assert sum(check_no_leak(one, made, rounds=0) for one in streams) == 0
    with pytest.raises(ValueError, match="depends on rounds"):
        check_no_leak(streams[0], made)
