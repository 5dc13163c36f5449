"""Test streams: their composition, no leaks, and dependence on the arguments only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data import (
    BRFL,
    BTGFL,
    CORRUPTIONS,
    SHIFTS,
    Federation,
    Images,
    available,
    check_no_leak,
    corrupt,
    resolve,
    stream,
)
from fedtta.data.partition import largest_remainder, match_class_mixes
from fedtta.data.rng import generator

CLASSES = tuple("abcdefghij")


def make_images(count, name="made", seed=0, size=8):
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.int64) % 10
    return Images(name, rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8), labels, CLASSES)


@pytest.fixture(scope="module")
def federation():
    return Federation.create(make_images(1200), 6, alpha=0.3, seed=1)  # 40 test samples a client


@pytest.fixture(scope="module")
def natural():
    return make_images(200, "new", seed=5)


def rows(x):
    """The bytes of each image, as a key."""
    return [one.numpy().tobytes() for one in x]


@pytest.mark.parametrize("with_natural", [False, True])
@pytest.mark.parametrize("name", BRFL + BTGFL)
def test_every_stream(federation, natural, name, with_natural):
    given_ = natural if with_natural else None
    if name not in available(given_):
        with pytest.raises(ValueError, match="unknown shift 'natural' without a natural data set; there are: original"):
            stream(federation, 0, name, 0)
        return
    for client in range(3):
        made = stream(federation, client, name, seed=4, natural=given_)
        known = made.index >= 0
        assert made.name == name
        assert len(made) == len(made.x) == len(made.index) == len(made.source) > 0
        assert made.x.dtype == torch.float32
        assert made.y.dtype == torch.int64
        assert float(made.x.min()) >= 0
        assert float(made.x.max()) <= 1
        # labels belong to the images, and no image occurs twice
        np.testing.assert_array_equal(made.y.numpy()[known], federation.images.labels[made.index[known]])
        assert len(np.unique(made.index[known])) == known.sum()
        # no training sample, and each sample comes from its stated source
        assert check_no_leak(made, federation) == 0
        own, others = federation.splits[client].test, federation.others_test(client)
        internal = np.isin(made.source, ["original", "corrupted"])
        external = np.isin(made.source, ["out_of_client", "corrupted_out_of_client"])
        assert np.isin(made.index[internal], own).all()
        assert np.isin(made.index[external], others).all()
        np.testing.assert_array_equal(known, internal | external)
        # clean images are those of the data set, natural ones those of the natural set, with their labels
        clean = np.isin(made.source, ["original", "out_of_client"])
        assert torch.equal(made.x[clean], federation.images.batch(made.index[clean]))
        if with_natural and (~known).any():
            places = {row: number for number, row in enumerate(rows(natural.batch(np.arange(200))))}
            found = np.array([places[row] for row in rows(made.x[~known])])
            np.testing.assert_array_equal(natural.labels[found], made.y.numpy()[~known])
            assert len(np.unique(found)) == len(found)
            # of the client's share, or of the others'
            share = match_class_mixes(federation.class_counts(), natural.labels, seed=4)[client]
            np.testing.assert_array_equal(np.isin(found, share), made.source[~known] == "natural")


def counts(made):
    return dict(zip(*(part.tolist() for part in np.unique(made.source, return_counts=True)), strict=True))


def test_what_streams_are_made_of(federation):
    def of(name):
        return counts(stream(federation, 0, name, seed=0))

    assert of("original") == of("original_ind") == {"original": 40}
    assert of("corrupted") == of("shifted_ind") == {"corrupted": 40}
    assert of("out_of_client") == of("original_exd") == {"out_of_client": 40}
    assert of("shifted_exd") == {"corrupted_out_of_client": 40}
    assert of("mixture") == {"original": 13, "corrupted": 13, "out_of_client": 13}  # 40 // 3
    assert of("synthetical") == {
        "original": 10, "corrupted": 10, "out_of_client": 10, "corrupted_out_of_client": 10
    }  # fmt: skip


def test_what_streams_are_made_of_with_a_natural_set(federation, natural):
    shares = [len(share) for share in match_class_mixes(federation.class_counts(), natural.labels, seed=0)]

    def of(name, client=0):
        return counts(stream(federation, client, name, seed=0, natural=natural))

    for client, share in enumerate(shares):
        assert of("natural", client) == {"natural": share}
        half = min(20, share)
        assert of("shifted_ind", client) == {"corrupted": half, "natural": half}
        assert set(of("mixture", client).values()) == {min(10, share)}
        assert len(of("mixture", client)) == 4
    assert of("shifted_exd") == {"corrupted_out_of_client": 20, "natural_out_of_client": 20}
    assert of("synthetical") == {
        "original": 10, "corrupted": 5, "natural": 5,
        "out_of_client": 10, "corrupted_out_of_client": 5, "natural_out_of_client": 5,
    }  # fmt: skip


def test_few_natural_images_cut_all_parts_to_one_size(federation):
    scarce = make_images(20, "new", seed=5)
    for client in range(6):
        share = len(match_class_mixes(federation.class_counts(), scarce.labels, seed=0)[client])
        made = counts(stream(federation, client, "mixture", seed=0, natural=scarce))
        assert made == dict.fromkeys(["original", "corrupted", "out_of_client", "natural"] if share else [], share)


def test_own_streams_hold_the_whole_test_split(federation):
    made = stream(federation, 2, "original", seed=9)
    np.testing.assert_array_equal(np.sort(made.index), federation.splits[2].test)
    assert not np.array_equal(made.index, federation.splits[2].test)  # in random order


def test_corruptions_depend_on_seed_and_sample_only(federation):
    made = stream(federation, 1, "corrupted", seed=3)
    clean = federation.images.batch(made.index)
    kinds = set()
    for x, image, index in zip(made.x, clean, made.index, strict=True):
        kind, sample_seed = generator("corruption", 3, int(index)).integers((15, 2**31))
        kinds.add(CORRUPTIONS[kind])
        alone = corrupt(image[None], CORRUPTIONS[kind], 5, [int(sample_seed)])[0]
        torch.testing.assert_close(x, alone, rtol=0, atol=1e-6)
    assert len(kinds) > 8  # 40 draws of 15

    # an image is corrupted identically in other clients' streams and under other shifts
    seen = dict(zip(made.index.tolist(), rows(made.x), strict=True))
    for client, name in ((0, "shifted_exd"), (1, "mixture"), (1, "synthetical"), (4, "synthetical")):
        other = stream(federation, client, name, seed=3)
        corrupted = np.char.startswith(other.source, "corrupted")
        shared = [i for i in np.flatnonzero(corrupted) if int(other.index[i]) in seen]
        assert shared or client != 1
        for i in shared:
            there = torch.frombuffer(bytearray(seen[int(other.index[i])]), dtype=torch.float32).view_as(other.x[i])
            torch.testing.assert_close(other.x[i], there, rtol=0, atol=1e-6)


def test_severity_matters(federation):
    light, heavy = (stream(federation, 1, "corrupted", seed=3, severity=level) for level in (1, 5))
    clean = federation.images.batch(light.index)
    np.testing.assert_array_equal(light.index, heavy.index)
    assert float((heavy.x - clean).abs().mean()) > float((light.x - clean).abs().mean())


@pytest.mark.parametrize("name", ["mixture", "synthetical", "natural"])
def test_streams_do_not_depend_on_what_was_made_before(federation, natural, name):
    first = stream(federation, 3, name, seed=0, natural=natural)
    stream(federation, 5, name, seed=0, natural=natural)
    same = Federation.create(federation.images, 6, alpha=0.3, seed=1)
    stream(same, 0, "original", seed=0)
    again = stream(same, 3, name, seed=0, natural=natural)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    np.testing.assert_array_equal(first.index, again.index)
    np.testing.assert_array_equal(first.source, again.source)
    assert not torch.equal(first.x, stream(federation, 3, name, seed=1, natural=natural).x)


@settings(max_examples=100, deadline=None)
@given(
    table=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=n, max_size=n)
    ),
    labels=st.lists(st.integers(0, 3), max_size=80),
    seed=st.integers(0, 2**32),
)
def test_natural_images_follow_the_training_mix(table, labels, seed):
    training, stock = np.array(table), np.array(labels, dtype=np.int64)
    assigned = match_class_mixes(training, stock, seed)
    together = np.concatenate(assigned)
    assert len(np.unique(together)) == len(together)  # disjoint

    demand, supply = training.sum(0), np.bincount(stock, minlength=4)
    scale = min((supply[k] / demand[k] for k in range(4) if demand[k]), default=0)
    mix = np.stack([np.bincount(stock[own], minlength=4) for own in assigned])
    assert (np.abs(mix - scale * training) < 1 + 1e-6).all()
    assert all(mix[:, k].sum() == np.floor(round(scale * demand[k], 6)) for k in range(4))
    assert all(np.array_equal(a, b) for a, b in zip(assigned, match_class_mixes(training, stock, seed), strict=True))


def test_largest_remainder_by_hand():
    assert largest_remainder(np.array([1.5, 0.75, 0.75])).tolist() == [1, 1, 1]
    assert largest_remainder(np.array([0.5, 0.5, 2.0])).tolist() == [1, 0, 2]
    assert largest_remainder(np.full(3, 1 / 3)).tolist() == [1, 0, 0]
    assert largest_remainder(np.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("tests", [0, 1])
def test_clients_with_few_samples(name, tests, natural):
    tiny = Federation.create(make_images(3 + 3 * tests), 3, scheme="iid", seed=0)
    assert [len(one.test) for one in tiny.splits] == [tests] * 3
    made = stream(tiny, 0, name, seed=0, natural=natural)
    if name in ("original", "corrupted", "out_of_client", "corrupted_out_of_client", "original_ind", "original_exd"):
        assert len(made) == tests
    elif name != "natural":
        assert len(made) == 0  # nothing to cut into parts
    assert made.x.shape == (len(made), 3, 8, 8)
    assert made.y.dtype == torch.int64
    assert check_no_leak(made, tiny) == 0


def test_a_single_client_has_no_other_clients():
    alone = Federation.create(make_images(50), 1, seed=0)
    assert len(stream(alone, 0, "original", 0)) == 10
    for name in ("out_of_client", "mixture", "original_exd", "shifted_exd", "synthetical"):
        assert len(stream(alone, 0, name, 0)) == 0


def test_a_leak_is_counted(federation):
    made = stream(federation, 0, "original", seed=0)
    leaky = type(made)(made.name, made.x, made.y, made.index.copy(), made.source)
    leaky.index[:3] = [federation.splits[0].train[0], federation.splits[4].validation[1], -1]
    assert check_no_leak(leaky, federation) == 2


def test_resolve():
    assert resolve("brfl", has_natural=True) == (BRFL, None)
    assert resolve("btgfl", has_natural=True) == (BTGFL, None)
    assert resolve(" Mixture , original,mixture", has_natural=True) == (("mixture", "original"), None)
    names, note = resolve("brfl,btgfl", has_natural=False)
    assert names == ("original", "corrupted", "out_of_client", "mixture", *BTGFL)
    assert note == (
        "no natural data set is at hand: the natural column is left out; mixture is equal parts of the other three; "
        "shifted sets are all corrupted; synthetical's shifted parts are all corrupted"
    )
    assert resolve("original,corrupted", has_natural=False) == (("original", "corrupted"), None)
    with pytest.raises(ValueError, match="unknown shift 'orignal'; there are: brfl, btgfl, original, corrupted"):
        resolve("orignal", has_natural=True)
    with pytest.raises(ValueError, match="none is available"):
        resolve("natural", has_natural=False)


def test_the_unseen_domain_is_a_test_set_of_every_client():
    plain = make_images(60)
    domain = np.arange(60, dtype=np.int64) % 3
    images = Images("made", plain.pixels, plain.labels, plain.classes, ("a", "b", "c"), domain)
    made = Federation.create(images, 2, "domain", unseen_domain="b", seed=1)
    streams = [stream(made, client, "unseen_domain", seed=4) for client in range(2)]
    for one in streams:
        assert sorted(one.index) == list(range(1, 60, 3))
        np.testing.assert_array_equal(one.y.numpy(), images.labels[one.index])
        assert set(one.source) == {"unseen_domain"}
        assert check_no_leak(one, made) == 0
    assert streams[0].index.tolist() != streams[1].index.tolist()
    assert len(stream(Federation.create(plain, 2, "iid"), 0, "unseen_domain", 4)) == 0


def test_names_that_can_be_made(natural):
    assert available(natural) == tuple(SHIFTS) == (*BRFL, "corrupted_out_of_client", *BTGFL, "unseen_domain")
    assert set(SHIFTS) - set(available(None)) == {"natural"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": "fog"}, "unknown shift 'fog'; there are: original, corrupted, out_of_client"),
        ({"partition": 6}, r"partition=6 is not in 0\.\.5"),
        ({"partition": -1}, "partition=-1"),
        ({"severity": 0}, "severity=0"),
        ({"severity": 6}, "severity=6"),
        ({"natural": make_images(20, "big", size=16)}, "big does not fit made: classes or image shapes differ"),
    ],
)
def test_bad_arguments(federation, change, message):
    with pytest.raises(ValueError, match=message):
        stream(**({"federation": federation, "partition": 0, "shift": "original", "seed": 0} | change))
