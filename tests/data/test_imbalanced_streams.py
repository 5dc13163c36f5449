"""Class-imbalanced corruption streams: the paper's tables, class mixes, and dependence on the arguments only."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data import CORRUPTIONS, Images, corrupt
from fedtta.data.imbalanced_streams import MIXES, PUBLISHED, class_counts, corruption_streams
from fedtta.data.rng import generator

# Tables 4 and 5 of the paper: images of classes 0 to 9 of all ten clients together, rounds 1 to 5. Rounds 6
# to 75 repeat them.
TABLE_4 = [
    [496, 5, 268, 0, 200, 0, 327, 200, 304, 200],
    [266, 0, 199, 0, 202, 132, 400, 200, 401, 200],
    [200, 0, 0, 0, 200, 200, 400, 200, 400, 400],
    [200, 0, 0, 0, 200, 115, 400, 200, 485, 400],
    [200, 0, 0, 0, 53, 10, 400, 200, 736, 401],
]


def make_images(per_class, classes=10, size=8, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes, dtype=np.int64), per_class))
    pixels = rng.integers(0, 256, (len(labels), 1, size, size), dtype=np.uint8)
    return Images("made", pixels, labels, tuple(f"c{k}" for k in range(classes)))


@pytest.fixture(scope="module")
def images():
    return make_images(30)


def small(images, **changes):
    return corruption_streams(
        images,
        **{
            "clients": 4, "size": 24, "batch": 8, "concentration": 0.3, "seed": 5,
            "corruptions": ("fog", "contrast", "gaussian_noise", "glass_blur"),
        }
        | changes,
    )  # fmt: skip


# The paper's tables


def test_published_lists_give_the_papers_tables():
    made = corruption_streams(make_images(1000), mix="published")
    assert made.rounds == 75
    assert made.num_clients == 10
    for number in range(75):
        met = [np.bincount(made.images.labels[made.indices(client, number)], minlength=10) for client in range(10)]
        assert np.sum(met, axis=0).tolist() == TABLE_4[number % 5]
        np.testing.assert_array_equal(made.round_counts[number], met)
    assert made.counts.tolist() == [[own.get(k, 0) for k in range(10)] for own in PUBLISHED]
    assert made.counts[:, 3].sum() == 0  # "class-3 samples are not observed by any clients"
    assert (made.counts.sum(axis=1) == 1000).all()


def test_published_lists_need_the_papers_set_up():
    full = {"mix": "published", "clients": 10, "size": 1000, "classes": 10, "seed": 0, "concentration": 0.01}
    for key, value in (("clients", 9), ("size", 500), ("classes", 100)):
        with pytest.raises(ValueError, match=rf'{key}={value} must be 1?0+ for mix="published"'):
            class_counts(**(full | {key: value}))
    stock = np.full(10, 1000)
    stock[[3, 1]] = 0, 5  # no client has class 3; five of class 1 are enough
    assert class_counts(**full, available=stock)[9, 1] == 5
    stock[[1, 6]] = 4, 999
    with pytest.raises(ValueError, match=r"needs more images than there are \(class 1: 4 of 5, class 6: 999 of 1000"):
        class_counts(**full, available=stock)


# Class counts


@settings(max_examples=80, deadline=None)
@given(
    mix=st.sampled_from(["dirichlet", "iid"]),
    stock=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    size=st.integers(1, 60),
    concentration=st.sampled_from([5e-324, 1e-300, 1e-4, 0.005, 0.01, 0.1, 1.0, 1e3, 1e300]),
    seed=st.integers(0, 2**40),
)
def test_counts_are_what_there_is(mix, stock, size, concentration, seed):
    def draw(clients):
        return class_counts(mix, clients, size, len(stock), seed, concentration, np.array(stock))

    if sum(stock) < size:
        with pytest.raises(
            ValueError, match=rf"size={size} images per client are not available: there are {sum(stock)}"
        ):
            draw(3)
        return
    counts = draw(3)
    assert counts.dtype == np.int64
    assert counts.shape == (3, len(stock))
    assert (counts >= 0).all()
    assert (counts <= stock).all()
    assert (counts.sum(axis=1) == size).all()
    np.testing.assert_array_equal(draw(5)[:3], counts)  # other clients have no effect


@pytest.mark.parametrize("concentration", [0.005, 0.01, 0.1, 1.0, 10.0])
def test_dirichlet_counts_against_plain_arithmetic(concentration):
    getcontext().prec, delta = 60, Decimal(concentration)
    counts = class_counts("dirichlet", 5, 1000, 10, 3, concentration)
    for client, own in enumerate(counts):
        rng = generator("imbalanced mix", 3, client)
        gamma = rng.standard_gamma(1.0 + concentration, 10).tolist()
        uniform = (1.0 - rng.random(10)).tolist()
        weights = [Decimal(g) * Decimal(u) ** (1 / delta) for g, u in zip(gamma, uniform, strict=True)]
        for count, weight in zip(own.tolist(), weights, strict=True):
            assert abs(count - float(1000 * weight / sum(weights))) < 1 + 1e-6


@pytest.mark.parametrize("concentration", [0.005, 0.1, 2.0])
def test_shares_have_the_moments_of_a_dirichlet(concentration):
    clients, classes = 3000, 5
    shares = class_counts("dirichlet", clients, 10_000, classes, 0, concentration) / 10_000
    variance = (1 / classes) * (1 - 1 / classes) / (classes * concentration + 1)
    np.testing.assert_allclose(shares.mean(axis=0), 1 / classes, atol=5 * math.sqrt(variance / clients))
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.12)


def test_numpys_dirichlet_underflows_at_tiny_concentrations():
    """Why the draw is made in logarithms: at δ = 1e-4 gamma variates underflow, and their mix is 0 / 0."""
    assert (np.random.default_rng(0).standard_gamma(1e-4, (50, 10)).sum(axis=1) == 0).any()
    counts = class_counts("dirichlet", 50, 1000, 10, 0, 1e-4)
    assert (counts.max(axis=1) == 1000).all()
    assert (np.bincount(counts.argmax(axis=1), minlength=10) > 0).sum() > 6  # not always the same class


def test_what_a_class_lacks_goes_to_the_clients_next_classes():
    # CIFAR-100: 100 images per class. At this δ shares differ by orders of magnitude, so the ten largest fill up.
    concentration, counts = 1e-5, class_counts("dirichlet", 4, 1000, 100, 7, 1e-5, np.full(100, 100))
    for client, own in enumerate(counts):
        rng = generator("imbalanced mix", 7, client)
        gamma, uniform = rng.standard_gamma(1 + concentration, 100), 1 - rng.random(100)
        ranked = np.argsort(-(np.log(gamma) + np.log(uniform) / concentration))
        assert own[ranked[:10]].tolist() == [100] * 10


def test_excess_in_proportion_by_hand(monkeypatch):
    monkeypatch.setattr("fedtta.data.imbalanced_streams._log_shares", lambda *_: np.log([0.6, 0.2, 0.1, 0.1]) - 700)
    # 20 · shares = 12, 4, 2, 2. Five of class 0: 7 over, 7/2, 7/4, 7/4 to the others: 3 + 2 + 2 (largest remainders).
    counts = class_counts("dirichlet", 1, 20, 4, 0, 1.0, np.array([5, 9, 9, 9]))
    assert counts.tolist() == [[5, 7, 4, 4]]
    # Two passes: 7 over as before, class 1 can take 1 of its 3 only, the other 2 go to classes 2 and 3 alike.
    counts = class_counts("dirichlet", 1, 20, 4, 0, 1.0, np.array([5, 5, 9, 9]))
    assert counts.tolist() == [[5, 5, 5, 5]]


def test_iid_counts():
    assert (class_counts("iid", 10, 1000, 10, 0, 0.01) == 100).all()
    # 5 = 3 + 2: the two left over start at class 0, at class 2, at class 4 = 1
    assert class_counts("iid", 3, 5, 3, 0, 0.01).tolist() == [[2, 2, 1], [2, 1, 2], [1, 2, 2]]
    assert class_counts("iid", 1, 9, 3, 0, 0.01, np.array([1, 9, 9])).tolist() == [[1, 4, 4]]


# Streams


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("mix", ["dirichlet", "iid"])
def test_lists(images, mix, order):
    made = small(images, mix=mix, order=order)
    assert made.rounds == 4 * 3
    assert made.rounds_per_corruption == 3
    for client in range(4):
        rounds = [made.indices(client, number) for number in range(12)]
        own = np.concatenate(rounds[:3])
        assert len(np.unique(own)) == len(own) == 24  # without repetition
        for number, met in enumerate(rounds):  # the same list under each corruption
            np.testing.assert_array_equal(met, rounds[number % 3])
            assert made.corruption(client, number) == made.domains[client][number // 3]
            np.testing.assert_array_equal(
                made.round_counts[number, client], np.bincount(images.labels[met], minlength=10)
            )
        labels = images.labels[own]
        np.testing.assert_array_equal(made.counts[client], np.bincount(labels, minlength=10))
        assert (np.diff(labels) >= 0).all() == (order == "sorted")
        assert not np.array_equal(own, own[np.lexsort((own, labels))])  # in a class, not in the order of the data set
    stock = np.bincount(images.labels)
    np.testing.assert_array_equal(made.counts, class_counts(mix, 4, 24, 10, 5, 0.3, stock))


@pytest.mark.parametrize(("mix", "order"), [("dirichlet", "sorted"), ("iid", "shuffled")])
def test_default_order(images, mix, order):
    np.testing.assert_array_equal(small(images, mix=mix).lists, small(images, mix=mix, order=order).lists)


def test_clients_draw_independently(images):
    made = small(images, size=160, batch=8, mix="iid")  # 4 · 160 of 300 images: they must overlap
    sets = [set(own.tolist()) for own in made.lists]
    assert len(set.union(*sets)) < 4 * 160
    assert len({frozenset(one) for one in sets}) == 4
    np.testing.assert_array_equal(small(images, clients=2).lists, small(images, clients=4).lists[:2])


def test_orders_of_corruptions(images):
    names = {"corruptions": CORRUPTIONS}
    own = small(images, clients=6, **names)
    assert all(sorted(domains) == sorted(CORRUPTIONS) for domains in own.domains)
    assert len(set(own.domains)) == 6
    assert small(images, clients=6, orders=6, **names).domains == own.domains
    assert small(images, clients=3, **names).domains == own.domains[:3]
    shared = small(images, clients=6, orders=2, **names).domains
    assert shared == own.domains[:2] * 3
    assert len(set(small(images, clients=6, orders=1, **names).domains)) == 1


def test_corruptions_depend_on_the_image_number_only(images):
    made = small(images)
    for client, number in ((1, 0), (0, 5), (3, 11)):
        batch = made.batch(client, number)
        assert len(batch) == 8
        assert batch.x.shape == (8, 1, 8, 8)
        assert batch.x.dtype == torch.float32
        assert batch.y.dtype == torch.int64
        assert 0 <= float(batch.x.min()) <= float(batch.x.max()) <= 1
        assert batch.corruption == made.corruption(client, number)
        np.testing.assert_array_equal(batch.index, made.indices(client, number))
        assert batch.y.tolist() == images.labels[batch.index].tolist()
        for x, index in zip(batch.x, batch.index, strict=True):
            seed = int(generator("imbalanced noise", 5, batch.corruption, int(index)).integers(2**31))
            alone = corrupt(images.batch([index]), batch.corruption, 5, [seed])[0]
            torch.testing.assert_close(x, alone, rtol=0, atol=1e-6)


def test_an_image_is_corrupted_identically_for_all_clients():
    images = make_images(4, classes=2)  # all clients have all eight images, in different orders
    made = small(images, size=8, batch=4, mix="iid")
    seen: dict[tuple[str, int], torch.Tensor] = {}
    looks = set()
    for number in reversed(range(made.rounds)):
        for client in range(4):
            batch = made.batch(client, number)
            for x, index in zip(batch.x, batch.index.tolist(), strict=True):
                known = seen.setdefault((batch.corruption, index), x)
                torch.testing.assert_close(x, known, rtol=0, atol=1e-6)
                looks.add((batch.corruption, index))
    assert len(looks) == 4 * 8
    assert torch.equal(small(images, size=8, batch=4, mix="iid").batch(2, 3).x, made.batch(2, 3).x)


def test_seed_and_severity_matter(images):
    made, other, light = small(images), small(images, seed=6), small(images, severity=1)
    assert not np.array_equal(made.lists, other.lists)
    np.testing.assert_array_equal(made.lists, light.lists)
    clean = images.batch(made.indices(0, 0))
    noisy = made.domains[0].index("gaussian_noise") * 3
    distance = [float((one.batch(0, noisy).x - clean).abs().mean()) for one in (light, made)]
    assert distance[0] < distance[1]
    reseeded = type(made)(images, made.lists, made.domains, 8, 5, seed=6)
    assert not torch.equal(reseeded.batch(0, noisy).x, made.batch(0, noisy).x)


def test_lists_cannot_be_written(images):
    made = small(images)
    with pytest.raises(ValueError, match="read-only"):
        made.indices(0, 0)[0] = 1


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mix": "zipf"}, f"unknown mix 'zipf'; there are: {', '.join(MIXES)}"),
        ({"order": "random"}, "unknown order 'random'; there are: sorted, shuffled"),
        ({"batch": 7}, "batch=7 must be at least 1 and divide size=24"),
        ({"batch": 0}, "batch=0"),
        ({"size": 0}, "size=0 must be at least 1"),
        ({"clients": 0}, "clients=0 must be at least 1"),
        ({"concentration": 0.0}, r"concentration=0\.0 must be positive and finite"),
        ({"concentration": -1.0}, "concentration=-1"),
        ({"concentration": math.nan}, "concentration=nan"),
        ({"concentration": math.inf}, "concentration=inf"),
        ({"corruptions": ("fog", "rain")}, "unknown corruption 'rain'; there are: gaussian_noise, shot_noise"),
        ({"corruptions": ()}, "must be at least one, and different"),
        ({"corruptions": ("fog", "fog")}, r"corruptions=\('fog', 'fog'\) must be at least one, and different"),
        ({"severity": 6}, "severity=6 must be an integer from 1 to 5"),
        ({"orders": 5}, "orders=5 must be from 0 to clients=4"),
        ({"orders": -1}, "orders=-1"),
        ({"seed": -1}, "must not be negative"),
        ({"size": 304}, "size=304 images per client are not available: there are 300"),
        ({"mix": "published"}, 'clients=4 must be 10 for mix="published"'),
    ],
)
def test_bad_arguments(images, change, message):
    with pytest.raises(ValueError, match=message):
        small(images, **change)


@pytest.mark.parametrize(("client", "number", "key"), [(4, 0, "client=4"), (-1, 0, "client=-1"), (0, 12, "round=12")])
def test_clients_and_rounds_that_are_not_there(images, client, number, key):
    made = small(images)
    for ask in (made.indices, made.batch, made.corruption):
        with pytest.raises(ValueError, match=rf"{key} is not in 0\.\."):
            ask(client, number)


@pytest.mark.parametrize("available", [[1, 2], [5, 5, -1]])
def test_bad_stock(available):
    with pytest.raises(ValueError, match="must be 3 numbers >= 0, one per class"):
        class_counts("iid", 1, 3, 3, 0, 0.01, np.array(available))
