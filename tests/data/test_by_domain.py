"""Clients of one domain each, targets by domain, and a domain that nobody has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Federation, Images
from data.by_domain import BY_DOMAIN, by_domain, leave_out, origins_of, target_roles
from data.domains import render_domains
from data.partition import partition
from data.seeds import generator
from data.step import step

NAMES = ("ink", "paint", "photo")


def pictures(domain: Any, labels: Any, names: tuple[str, ...] = NAMES) -> Images:
    """Each picture is one pixel, its number (mod 256)."""
    pixels = np.arange(len(labels)).astype(np.uint8).reshape(-1, 1, 1, 1)
    made = np.asarray(domain, np.int64), np.asarray(labels, np.int64)
    return Images("made", pixels, made[1], tuple("abcde"), names, made[0])


def even(each: int = 60, domains: int = 3) -> Images:
    """Domains in turn, so that a domain's samples do not stand together."""
    number = np.arange(each * domains)
    return pictures(number % domains, number // domains % 5, NAMES[:domains])


def deal(images: Images, clients: int, scheme: str = "domain", seed: int = 0, **more: Any) -> list[np.ndarray]:
    rng = generator("partition", scheme, seed)
    return by_domain(images, np.arange(len(images)), clients, scheme, more.pop("step_ratio", 16.0), rng, **more)


@settings(max_examples=100, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=90),
    each=st.integers(1, 4),
    scheme=st.sampled_from(BY_DOMAIN),
    seed=st.integers(0, 999),
)
def test_every_sample_goes_to_a_client_of_its_domain(
    samples: list[tuple[int, int]], each: int, scheme: str, seed: int
) -> None:
    images = pictures([domain for domain, _ in samples], [label for _, label in samples])
    present = sorted({domain for domain, _ in samples})
    made = deal(images, each * len(present), scheme, seed, min_size=0)
    again = deal(images, each * len(present), scheme, seed, min_size=0)
    assert images.domain is not None
    assert len(made) == each * len(present)
    assert sorted(np.concatenate(made)) == list(range(len(samples)))
    for client, own in enumerate(made):
        assert set(images.domain[own]) <= {present[client // each]}
        assert own.dtype == np.int64
        assert (np.diff(own) > 0).all()
        np.testing.assert_array_equal(own, again[client])
    if scheme == "domain":
        for start in range(0, len(made), each):
            parts = made[start : start + each]
            counts = np.stack([np.bincount(images.labels[own], minlength=5) for own in parts])
            assert (np.ptp(counts, axis=0) <= 1).all()  # of each class
            assert np.ptp(counts.sum(1)) <= 1


def test_a_domains_clients_are_those_of_the_step_partition() -> None:
    """The same generator, domain by domain, through `step` on the domain's own labels."""
    images = even(300)
    rng = generator("partition", "domain_step", 7)
    expected = []
    for domain in range(3):
        members = np.array([i for i in range(len(images)) if i % 3 == domain])
        expected += [np.sort(members[part]) for part in step(images.labels[members], 5, 4.0, rng)]
    made = Federation.create(images, 15, "domain_step", seed=7, step_ratio=4.0)
    for one, own in zip(made.splits, expected, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([one.train, one.validation, one.test])), own)
    sizes = np.stack([np.bincount(images.labels[own], minlength=5) for own in expected])
    assert (np.sort(sizes, axis=1)[:, -1] >= 3 * np.sort(sizes, axis=1)[:, 0]).all()


def test_one_client_a_domain_has_all_of_it() -> None:
    made = Federation.create(even(), 3, "domain", seed=2)
    assert made.origins == NAMES
    assert made.roles == ("both",) * 3
    assert [(len(one.train), len(one.validation), len(one.test)) for one in made.splits] == [(36, 12, 12)] * 3
    for client, one in enumerate(made.splits):
        everything = np.concatenate([one.train, one.validation, one.test])
        assert sorted(everything) == list(range(client, 180, 3))
    other = Federation.create(even(), 3, "domain", seed=3)
    assert not np.array_equal(made.splits[0].test, other.splits[0].test)


def test_one_domains_clients_are_the_targets() -> None:
    """ATP: 80/20 at the sources, all samples of the left-out domain for testing."""
    made = Federation.create(even(), 6, "domain", target_domain="paint", seed=1)
    assert made.origins == ("ink", "ink", "paint", "paint", "photo", "photo")
    assert made.roles == ("source", "source", "target", "target", "source", "source")
    sizes = [(len(one.train), len(one.validation), len(one.test)) for one in made.splits]
    assert sizes == [(24, 6, 0)] * 2 + [(0, 0, 30)] * 2 + [(24, 6, 0)] * 2
    assert made.images.domain is not None
    assert set(made.images.domain[made.train_indices]) == {0, 2}


@pytest.mark.parametrize(("scheme", "clients"), [("domain", 4), ("domain_step", 4), ("iid", 5), ("equal", 5)])
def test_nobody_has_the_unseen_domain(scheme: str, clients: int) -> None:
    images = even()
    made = Federation.create(images, clients, scheme, unseen_domain="paint", seed=1)
    assert made.unseen.tolist() == list(range(1, 180, 3))
    everything = np.concatenate([part for one in made.splits for part in (one.train, one.validation, one.test)])
    assert sorted([*everything, *made.unseen]) == list(range(180))
    assert made.origins == (("ink", "ink", "photo", "photo") if scheme in BY_DOMAIN else (None,) * 5)
    assert not len(Federation.create(images, 6, "domain").unseen)


def test_clients_of_all_domains_are_those_of_the_labels_alone() -> None:
    """Domains do not change what the other partitions deal."""
    images = even()
    made = Federation.create(images, 4, "iid", seed=5)
    expected = partition(images.labels, 4, "iid", seed=5)
    for one, own in zip(made.splits, expected, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([one.train, one.validation, one.test])), own)
    assert made.origins == (None,) * 4
    plain = Images("plain", images.pixels, images.labels, images.classes)
    assert Federation.create(plain, 4, "iid", seed=5).origins == (None,) * 4
    assert Federation(images, made.splits, 5).origins == (None,) * 4


def test_domains_and_corruptions_together() -> None:
    plain = even(12)
    pixels = np.random.default_rng(0).integers(0, 256, (36, 3, 16, 16), dtype=np.uint8)
    images = Images("made", pixels, plain.labels, plain.classes, NAMES, plain.domain)
    made = Federation.create(images, 3, "domain", domains="corruptions", target_domain="ink", seed=4)
    assert made.origins == NAMES
    expected = render_domains(images, [np.arange(client, 36, 3) for client in range(3)], made.domains, 4)
    np.testing.assert_array_equal(made.images.pixels, expected.pixels)
    assert (expected.pixels != pixels).any()


def test_a_client_without_pictures_has_no_domain() -> None:
    images = even(2)
    assert origins_of(images, [np.array([0, 3]), np.array([0, 1]), np.array([], np.int64)]) == ("ink", None, None)
    assert target_roles(images, ("ink", "photo"), "photo") == ("source", "target")


PLAIN = Images("plain", np.zeros((12, 1, 1, 1), np.uint8), np.arange(12) % 5, tuple("abcde"))


@pytest.mark.parametrize(
    ("images", "settings_", "message"),
    [
        (even(), {"scheme": "domains"}, "unknown partition scheme 'domains'; there are: .*, step, domain, domain_step"),
        (PLAIN, {"scheme": "domain"}, "partition 'domain': plain has no domains"),
        (
            even(),
            {"scheme": "domain", "num_clients": 4},
            "num_clients=4 must be a multiple of the 3 domains of made: ink",
        ),
        (
            even(2),
            {"scheme": "domain", "num_clients": 9},
            r"domain ink with 2 pictures .* 3 clients with 0, .*min_size=1",
        ),
        (even(), {"scheme": "iid", "target_domain": "ink"}, "'ink': allowed with partition domain or domain_step only"),
        (
            even(),
            {"scheme": "domain", "target_domain": "oil"},
            "'oil': no client has it; made has .*: ink, paint, photo",
        ),
        (even(), {"scheme": "domain", "target_domain": "ink", "target_fraction": 0.3}, "exclude each other"),
        (even(4, 1), {"scheme": "domain", "target_domain": "ink"}, "target_domain='ink' leaves no source"),
        (even(), {"scheme": "iid", "unseen_domain": "oil"}, "unseen_domain='oil': made has the domains: ink, paint"),
        (PLAIN, {"scheme": "iid", "unseen_domain": "ink"}, "unseen_domain='ink': plain has the domains: none"),
        (even(4, 1), {"scheme": "iid", "unseen_domain": "ink"}, "unseen_domain='ink' has 4 of the 4 pictures"),
        (
            even(),
            {"scheme": "domain", "num_clients": 2, "unseen_domain": "ink", "target_domain": "ink"},
            "target_domain='ink': no client has it",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(images: Images, settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Federation.create(images, **{"num_clients": 3, **settings_})


def test_nothing_is_left_out_by_default() -> None:
    dealt, unseen = leave_out(PLAIN, "")
    assert dealt.tolist() == list(range(12))
    assert unseen.dtype == np.int64
    assert not len(unseen)


# The domains of pictures ---------------------------------------------------------------------------------------------


def test_a_part_of_the_images_keeps_its_domains() -> None:
    images = even()
    part = images.subset([5, 4, 0])
    assert part.domains == NAMES
    assert part.domain is not None
    assert part.domain.tolist() == [2, 1, 0]
    assert not part.domain.flags.writeable


def test_a_fraction_keeps_every_class_of_every_domain() -> None:
    sizes = {(0, 0): 20, (0, 1): 7, (2, 0): 3, (2, 4): 1}
    images = pictures(
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
        (("a",), None, ValueError, "no domain of each picture"),
        ((), np.zeros(2, np.int64), ValueError, "domain names must be present"),
        (("a", "a"), np.zeros(2, np.int64), ValueError, "present and different"),
        (("a",), np.zeros(3, np.int64), ValueError, "2 pictures but domain"),
        (("a",), np.array([0, 1]), ValueError, "domain runs from 0 to 1, but there are 1"),
        (("a",), np.array([0, -1]), ValueError, "domain runs from -1"),
        (("a",), np.zeros(2), TypeError, "domain must be int64, got float64"),
    ],
)
def test_domains_that_do_not_fit(domains: tuple[str, ...], domain: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Images("made", np.zeros((2, 1, 1, 1), np.uint8), np.zeros(2, np.int64), ("x",), domains, domain)
