"""Who has what: disjoint, complete, of the promised sizes, decided by the seed, and always at an end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.partition import ATTEMPTS, SCHEMES, partition

labels_of = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)


@settings(max_examples=150, deadline=None)
@given(
    labels=labels_of,
    clients=st.integers(1, 9),
    scheme=st.sampled_from(SCHEMES),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_every_sample_goes_to_one_client_at_most(labels, clients, scheme, alpha, seed):
    if len(labels) < clients and scheme != "dirichlet":
        with pytest.raises(ValueError, match="min_size"):
            partition(labels, clients, scheme, alpha, seed)
    dealt = partition(labels, clients, scheme, alpha, seed, min_size=0)
    again = partition(labels, clients, scheme, alpha, seed, min_size=0)
    together = np.concatenate(dealt)
    sizes = [len(own) for own in dealt]

    assert len(dealt) == clients
    assert len(np.unique(together)) == len(together)
    assert all(own.dtype == np.int64 and (np.diff(own) > 0).all() for own in dealt)
    assert all(np.array_equal(a, b) for a, b in zip(dealt, again, strict=True))
    if scheme == "equal":
        assert set(sizes) == {len(labels) // clients}  # the rest, N mod clients, belongs to nobody
    else:
        assert sorted(together) == list(range(len(labels)))
    if scheme == "iid":
        assert max(sizes) - min(sizes) <= 1


def equal_by_hand(labels, clients, alpha, seed):
    """The published rule as a naive loop with the same draws: renormalise over the stock before every single choice."""
    from data.seeds import generator

    rng = generator("partition", "equal", seed)
    classes = labels.max() + 1
    stock = [list(rng.permutation(np.flatnonzero(labels == k))) for k in range(classes)]
    mixes = rng.dirichlet(np.full(classes, alpha), size=clients)
    draws = rng.random((len(labels) // clients, clients))
    taken = [[] for _ in range(clients)]
    for turn in range(len(draws)):
        for client in range(clients):
            p = mixes[client] * [len(members) > 0 for members in stock]
            chosen = int(np.searchsorted(np.cumsum(p / p.sum()), draws[turn, client], side="right"))
            taken[client].append(stock[chosen].pop())
    return [np.sort(own) for own in taken]


@pytest.mark.parametrize("seed", range(5))
def test_equal_is_the_published_rule(seed):
    labels = np.random.default_rng(seed).integers(0, 6, 400)
    for mine, naive in zip(partition(labels, 7, "equal", 0.5, seed), equal_by_hand(labels, 7, 0.5, seed), strict=True):
        np.testing.assert_array_equal(mine, naive)


def test_equal_takes_everything_when_it_divides_and_skews_with_alpha():
    labels = np.repeat(np.arange(10), 600)
    top = {}
    for alpha in (0.1, 10.0):
        counts = np.stack([np.bincount(labels[own], minlength=10) for own in partition(labels, 20, alpha=alpha)])
        assert counts.sum(0).tolist() == [600] * 10
        top[alpha] = (counts.max(1) / 300).mean()
    assert top[0.1] > 0.5  # E[largest of Dir(0.1)] is about 0.66
    assert top[10.0] < 0.3


def test_seed_and_scheme_change_the_deal():
    labels = np.repeat(np.arange(4), 50)
    first = partition(labels, 5, "iid", seed=1)
    assert not all(np.array_equal(a, b) for a, b in zip(first, partition(labels, 5, "iid", seed=2), strict=True))


def test_dirichlet_expectation_is_even():
    labels = np.repeat(np.arange(10), 100)
    shares = np.stack([[len(own) for own in partition(labels, 4, "dirichlet", 1.0, seed)] for seed in range(200)])
    # Mean 250; the standard error of a mean over 200 deals is below 6.
    np.testing.assert_allclose(shares.mean(0), 250, atol=30)


def test_dirichlet_meets_min_size_or_gives_up():
    labels = np.repeat(np.arange(10), 100)
    assert min(len(own) for own in partition(labels, 10, "dirichlet", 0.3, 0, min_size=20)) >= 20
    with pytest.raises(ValueError, match=rf"{ATTEMPTS} draws with alpha=0.001 and num_clients=100 .* min_size=10"):
        partition(labels, 100, "dirichlet", 0.001, 0, min_size=10)


def test_large_deals_come_to_an_end():
    labels = np.repeat(np.arange(10), 6000)
    assert {len(own) for own in partition(labels, 1000, "equal", 0.005)} == {60}
    assert sum(len(own) for own in partition(labels, 1000, "dirichlet", 1.0, min_size=1)) == 60_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "pathological"}, "unknown partition scheme 'pathological'; there are: equal, dirichlet, iid"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"min_size": 26}, "100 samples cannot give 4 clients min_size=26"),
        ({"min_size": -1}, "min_size=-1"),
        ({"labels": np.full(100, -1)}, "non-negative"),
        ({"labels": np.zeros(100)}, "non-negative integers"),
        ({"seed": -1}, "negative"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        partition(**({"labels": np.repeat(np.arange(4), 25), "num_clients": 4} | change))
