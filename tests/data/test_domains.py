"""Clients' roles, domains held out, and corrupted domains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtta.data import Federation, Images
from fedtta.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from fedtta.data.domains import (
    Domain,
    Role,
    client_domains,
    draw_domains,
    draw_roles,
    hold_out,
    render_domains,
    target_roles,
)
from fedtta.data.rng import generator


def random_images(count: int, size: int = 8, classes: int = 10) -> Images:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    return Images("made", pixels, np.arange(count, dtype=np.int64) % classes, tuple("abcdefghij"[:classes]))


def test_the_papers_federation() -> None:
    """ATP, C.1: 240 sources of 160 + 40, 60 targets of 200 test samples, on CIFAR-10's 60,000 labels."""
    made = Federation.create(random_images(60_000, size=1), 300, scheme="step", target_fraction=0.2, seed=1)
    sizes = {
        role: {
            (len(one.train), len(one.validation), len(one.test))
            for one, own in zip(made.splits, made.roles, strict=True)
            if own == role
        }
        for role in made.roles
    }
    assert sizes == {"source": {(160, 40, 0)}, "target": {(0, 0, 200)}}
    assert (made.roles.count("source"), made.roles.count("target")) == (240, 60)
    tests = np.concatenate([one.test for one in made.splits])
    assert sorted([*made.train_indices, *tests]) == list(range(60_000))
    assert made.domains == (None,) * 300


def test_without_targets_all_clients_train_and_test() -> None:
    made = Federation.create(random_images(100), 4, seed=1)
    assert made.roles == ("both",) * 4
    assert made.domains == (None,) * 4
    assert {(len(one.train), len(one.validation), len(one.test)) for one in made.splits} == {(15, 5, 5)}
    # also without `create`
    assert Federation(made.images, made.splits, 1).roles == ("both",) * 4


@given(st.integers(2, 60), st.floats(0.01, 0.98), st.integers(0, 999))
def test_roles_are_drawn_from_the_seed(clients: int, fraction: float, seed: int) -> None:
    if not 0 < round(fraction * clients) < clients:
        with pytest.raises(ValueError, match="leaves no source or no target"):
            draw_roles(clients, fraction, seed)
        return
    roles = draw_roles(clients, fraction, seed)
    assert roles.count("target") == round(fraction * clients)
    assert roles.count("source") == clients - round(fraction * clients)
    assert roles == draw_roles(clients, fraction, seed)


def test_another_seed_other_roles() -> None:
    assert len({draw_roles(300, 0.2, seed) for seed in range(5)}) == 5


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_bad_target_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"target_fraction={fraction} must be in"):
        draw_roles(10, fraction, 1)


def test_targets_have_the_four_extra_corruptions_and_sources_the_fifteen_common_ones() -> None:
    roles = draw_roles(300, 0.2, 1)
    domains = draw_domains(roles, "corruptions", 1)
    seen: dict[Role, set[str]] = {"source": set(), "target": set()}
    for role, domain in zip(roles, domains, strict=True):
        assert domain is not None
        seen[role].add(domain.corruption)
    assert seen == {"source": set(CORRUPTIONS), "target": set(EXTRA_CORRUPTIONS)}
    assert (len(CORRUPTIONS), len(EXTRA_CORRUPTIONS)) == (15, 4)
    severities = [domain.severity for domain in domains if domain is not None]
    assert {level: severities.count(level) > 30 for level in set(severities)} == dict.fromkeys(range(1, 6), True)
    # clients with both roles have the common ones
    both = draw_domains(("both",) * 50, "corruptions", 1)
    assert {domain.corruption for domain in both if domain is not None} <= set(CORRUPTIONS)


def test_a_clients_domain_depends_on_seed_client_and_role_only() -> None:
    roles = draw_roles(40, 0.25, 3)
    domains = draw_domains(roles, "corruptions", 7)
    assert draw_domains(roles[:11], "corruptions", 7) == domains[:11]
    others: list[Role] = ["source" if role == "target" else "target" for role in roles]
    mixed = (*others[:39], roles[39])
    assert draw_domains(mixed, "corruptions", 7)[39] == domains[39]
    assert draw_domains(roles, "corruptions", 8) != domains


def test_unknown_domains_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown domains 'weather'; there are: none, corruptions"):
        draw_domains(("both",), "weather", 1)
    with pytest.raises(ValueError, match="'weather'"):
        Federation.create(random_images(40), 4, domains="weather")


def test_without_domains_the_images_are_the_same_object() -> None:
    images = random_images(40)
    made = Federation.create(images, 4, domains="none", seed=1)
    assert made.images is images


CLIENTS = [np.array([0, 3, 5]), np.array([1, 2]), np.array([4, 7]), np.array([], np.int64)]
DOMAINS = (Domain("gaussian_noise", 3), None, Domain(EXTRA_CORRUPTIONS[0], 5), Domain("fog", 1))


def test_images_are_corrupted_and_rounded_to_bytes() -> None:
    """Every sample by its own seed; all others are unchanged."""
    images = random_images(9, size=32)
    before = images.pixels.copy()
    made = render_domains(images, CLIENTS, DOMAINS, seed=5)
    for indices, domain in zip(CLIENTS, DOMAINS, strict=True):
        for index in indices:
            if domain is None:
                np.testing.assert_array_equal(made.pixels[index], before[index])
                continue
            noise = int(generator("domain sample", 5, int(index)).integers(2**31))
            x = torch.from_numpy(before[index : index + 1]).float() / 255
            expected = (corrupt(x, domain.corruption, domain.severity, [noise])[0] * 255).round().numpy()
            np.testing.assert_array_equal(made.pixels[index], expected)
            assert (made.pixels[index] != before[index]).any()
    np.testing.assert_array_equal(made.pixels[[6, 8]], before[[6, 8]])  # of no client
    np.testing.assert_array_equal(images.pixels, before)
    assert made.pixels.dtype == np.uint8
    np.testing.assert_array_equal(made.labels, images.labels)
    assert (made.name, made.classes) == (images.name, images.classes)


def test_noise_depends_on_the_seed_and_the_sample_number_only() -> None:
    images, domain = random_images(9, size=16), Domain("impulse_noise", 4)
    together = render_domains(images, [np.arange(9)], [domain], seed=2).pixels
    backwards = render_domains(images, [np.arange(9)[::-1]], [domain], seed=2).pixels
    np.testing.assert_array_equal(together, backwards)
    split = render_domains(images, [np.array([8, 1]), np.array([4])], [domain, domain], seed=2).pixels
    np.testing.assert_array_equal(split[[1, 4, 8]], together[[1, 4, 8]])
    other = render_domains(images, [np.arange(9)], [domain], seed=3).pixels
    assert all((other[i] != together[i]).any() for i in range(9))
    # two equal images do not get equal noise
    same = Images("same", np.repeat(images.pixels[:1], 2, axis=0), np.zeros(2, np.int64), ("a",))
    noisy = render_domains(same, [np.arange(2)], [domain], seed=2).pixels
    assert (noisy[0] != noisy[1]).any()


# Domains of the data set --------------------------------------------------------------------------------------------

NAMES = ("ink", "paint", "photo")


def with_domains(count: int) -> Images:
    plain = random_images(count)
    domain = np.arange(count, dtype=np.int64) % 3
    return Images("made", plain.pixels, plain.labels, plain.classes, NAMES, domain)


def test_a_held_out_domain_is_excluded() -> None:
    included, unseen = hold_out(with_domains(9), "paint")
    assert included.tolist() == [0, 2, 3, 5, 6, 8]
    assert unseen.tolist() == [1, 4, 7]
    everything, nothing = hold_out(random_images(4), "")
    assert everything.tolist() == [0, 1, 2, 3]
    assert (nothing.dtype, len(nothing)) == (np.int64, 0)


def test_client_domains_and_target_roles() -> None:
    clients = [np.array([0, 3]), np.array([0, 1]), np.array([], np.int64)]
    assert client_domains(with_domains(6), clients) == ("ink", None, None)
    assert client_domains(random_images(6), clients) == (None,) * 3
    assert target_roles(with_domains(6), ("ink", "photo"), "photo") == ("source", "target")
