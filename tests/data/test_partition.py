"""Contract of every partition scheme, and the rule of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data.partition import ATTEMPTS, SCHEMES, major_pairs, partition, step_weights
from fedtta.data.rng import generator

CIFAR10 = np.repeat(np.arange(10), 6000)
DOMAINS = ("ink", "paint", "photo")


def counts_of(clients: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Samples per client and class, [N, K]."""
    return np.stack([np.bincount(labels[own], minlength=int(labels.max()) + 1) for own in clients])


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=120),
    clients=st.integers(1, 9),
    scheme=st.sampled_from(list(SCHEMES)),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    ratio=st.sampled_from([1.0, 2.5, 16.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_every_scheme_is_disjoint_complete_sorted_and_deterministic(
    samples: list[tuple[int, int]], clients: int, scheme: str, alpha: float, ratio: float, seed: int
) -> None:
    domain, labels = (np.array(column, np.int64) for column in zip(*samples, strict=True))
    if SCHEMES[scheme].by_domain:
        clients *= len(np.unique(domain))

    def draw() -> list[np.ndarray]:
        return partition(labels, clients, scheme, alpha, seed, 0, ratio, domain, DOMAINS)

    parts, sizes = draw(), [len(own) for own in draw()]
    together = np.concatenate(parts)
    assert len(parts) == clients
    assert same(parts, draw())
    assert all(own.dtype == np.int64 and (np.diff(own) > 0).all() for own in parts)
    assert len(np.unique(together)) == len(together)
    if scheme == "equal":
        assert set(sizes) == {len(labels) // clients}  # N mod clients samples are unused
    else:
        assert sorted(together) == list(range(len(labels)))
    if scheme == "iid":
        assert max(sizes) - min(sizes) <= 1
    if SCHEMES[scheme].by_domain:
        present = np.unique(domain)
        each = clients // len(present)
        assert all(set(domain[own]) <= {present[client // each]} for client, own in enumerate(parts))
    if scheme == "domain":
        for start in range(0, clients, each):
            counts = counts_of(parts[start : start + each], labels)
            assert (np.ptp(counts, axis=0) <= 1).all()  # of each class
            assert np.ptp(counts.sum(1)) <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_seed_changes_every_scheme(scheme: str) -> None:
    labels, domain = np.repeat(np.arange(4), 60), np.arange(240) % 3
    first, other = (partition(labels, 6, scheme, 1.0, seed, domain=domain, domains=DOMAINS) for seed in (1, 2))
    assert not same(first, other)


# equal --------------------------------------------------------------------------------------------------------------


def equal_by_hand(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """The published rule as a naive loop with the same draws: renormalize over the stock before every single choice."""
    rng = generator("partition", "equal", seed)
    classes = labels.max() + 1
    stock = [list(rng.permutation(np.flatnonzero(labels == k))) for k in range(classes)]
    mixes = rng.dirichlet(np.full(classes, alpha), size=clients)
    draws = rng.random((len(labels) // clients, clients))
    taken: list[list[int]] = [[] for _ in range(clients)]
    for turn in range(len(draws)):
        for client in range(clients):
            p = mixes[client] * [len(members) > 0 for members in stock]
            chosen = int(np.searchsorted(np.cumsum(p / p.sum()), draws[turn, client], side="right"))
            taken[client].append(stock[chosen].pop())
    return [np.sort(own) for own in taken]


@pytest.mark.parametrize("seed", range(5))
def test_equal_is_the_published_rule(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 6, 400)
    assert same(partition(labels, 7, "equal", 0.5, seed), equal_by_hand(labels, 7, 0.5, seed))


def test_equal_uses_every_sample_when_it_divides_and_skews_with_alpha() -> None:
    labels = np.repeat(np.arange(10), 600)
    top = {}
    for alpha in (0.1, 10.0):
        counts = counts_of(partition(labels, 20, alpha=alpha), labels)
        assert counts.sum(0).tolist() == [600] * 10
        top[alpha] = (counts.max(1) / 300).mean()
    assert top[0.1] > 0.5  # E[largest of Dir(0.1)] is about 0.66
    assert top[10.0] < 0.3


# dirichlet ----------------------------------------------------------------------------------------------------------


def test_dirichlet_expectation_is_even() -> None:
    labels = np.repeat(np.arange(10), 100)
    shares = np.stack([[len(own) for own in partition(labels, 4, "dirichlet", 1.0, seed)] for seed in range(200)])
    # Mean 250; the standard error of a mean over 200 draws is below 6.
    np.testing.assert_allclose(shares.mean(0), 250, atol=30)


@pytest.mark.parametrize("alpha", [0.3, 100.0])
def test_dirichlet_clients_with_a_fair_share_get_no_more(alpha: float) -> None:
    """Classes of 20, 400, 100, 240 and 40 samples to 8 clients, of whom 100 are the fair share."""
    labels = np.repeat(np.arange(5), [20, 400, 100, 240, 40])
    full = 0
    for seed in range(20):
        for own in partition(labels, 8, "dirichlet", alpha, seed, min_size=0):
            counts = np.bincount(labels[own], minlength=5)
            for label in range(1, 5):
                if counts[:label].sum() >= 100:
                    full += 1
                    assert counts[label] == 0
    assert full > 20


def test_dirichlet_meets_min_size_or_gives_up() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert min(len(own) for own in partition(labels, 10, "dirichlet", 0.3, 0, min_size=20)) >= 20
    with pytest.raises(ValueError, match=rf"{ATTEMPTS} draws with alpha=0.001 and num_clients=100 .* min_size=10"):
        partition(labels, 100, "dirichlet", 0.001, 0, min_size=10)


def test_many_clients_and_extreme_mixes() -> None:
    assert {len(own) for own in partition(CIFAR10, 1000, "equal", 0.005)} == {60}
    assert sum(len(own) for own in partition(CIFAR10, 1000, "dirichlet", 1.0, min_size=1)) == 60_000


# step ---------------------------------------------------------------------------------------------------------------


def test_step_on_cifar10_has_the_papers_sizes() -> None:
    """300 clients of 200: 80 + 80 + 8 · 5, pairs of one label 155 + 9 · 5; each of the 100 ordered pairs 3 times."""
    counts = counts_of(partition(CIFAR10, 300, "step", seed=1), CIFAR10)
    shapes = [tuple(sorted(row.tolist(), reverse=True)) for row in counts]
    assert set(shapes) == {(80, 80, *[5] * 8), (155, *[5] * 9)}
    assert shapes.count((155, *[5] * 9)) == 30  # ten pairs of one label, three clients each
    # Counts do not distinguish (a, b) from (b, a): 45 unordered pairs six times, ten equal ones three times.
    majors = [tuple(np.flatnonzero(row >= 80)) for row in counts]
    assert {major: majors.count(major) for major in majors} == {
        **{(a, b): 6 for a in range(10) for b in range(a + 1, 10)},
        **{(a,): 3 for a in range(10)},
    }
    ordered = [tuple(pair) for pair in major_pairs(300, 10).tolist()]
    assert {pair: ordered.count(pair) for pair in ordered} == {(a, b): 3 for a in range(10) for b in range(10)}


def test_step_on_cifar100_and_with_a_ratio_of_one() -> None:
    labels = np.repeat(np.arange(100), 600)
    counts = counts_of(partition(labels, 300, "step", seed=1, step_ratio=51.0), labels)
    assert {tuple(sorted(row.tolist(), reverse=True)) for row in counts} == {(51, 51, *[1] * 98)}
    assert (counts_of(partition(CIFAR10, 300, "step", seed=3, step_ratio=1.0), CIFAR10) == 20).all()


@pytest.mark.parametrize(("clients", "classes", "ratio"), [(300, 10, 16.0), (7, 3, 4.0), (25, 5, 2.5), (4, 10, 16.0)])
def test_step_weights_by_hand(clients: int, classes: int, ratio: float) -> None:
    weights = step_weights(clients, classes, ratio)
    for row, (first, second) in zip(weights, major_pairs(clients, classes), strict=True):
        expected = [ratio if label in (first, second) else 1.0 for label in range(classes)]
        if first == second:
            expected[first] = 2 * ratio - 1
        assert row.tolist() == expected
    assert np.ptp(weights.sum(axis=1)) < 1e-9  # all clients have one total weight


@settings(max_examples=100, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=150).map(lambda drawn: np.array(drawn, np.int64)),
    clients=st.integers(1, 12),
    ratio=st.floats(1, 1e4),
    seed=st.integers(0, 2**32),
)
def test_step_is_proportional_to_its_weights(labels: np.ndarray, clients: int, ratio: float, seed: int) -> None:
    parts = partition(labels, clients, "step", seed=seed, min_size=0, step_ratio=ratio)
    permutation = generator("partition", "step", seed).permutation(clients)  # the pair of each client
    weights = step_weights(clients, int(labels.max()) + 1, ratio)[permutation]
    quotas = weights / weights.sum(axis=0) * np.bincount(labels)  # [N, K]
    assert (np.abs(counts_of(parts, labels) - quotas) < 1 + 1e-5).all()


def test_step_refuses_clients_below_the_smallest_size() -> None:
    labels = np.arange(20, dtype=np.int64) % 10  # two of each class, of which most of 20 clients get none
    assert min(map(len, partition(labels, 20, "step", min_size=0))) == 0
    with pytest.raises(ValueError, match="leaves one of 20 clients with 0 samples, fewer than min_size=1; use fewer"):
        partition(labels, 20, "step")


def test_domain_step_is_the_step_partition_of_each_domain() -> None:
    """The same generator, domain by domain."""
    domain, labels = np.arange(900) % 3, np.arange(900) // 3 % 5
    rng = generator("partition", "domain_step", 7)
    expected = []
    for number in range(3):
        members = np.array([i for i in range(900) if i % 3 == number])
        weights = step_weights(5, 5, 4.0)[rng.permutation(5)]
        parts: list[list[int]] = [[] for _ in range(5)]
        for label in range(5):
            stock = rng.permutation(np.flatnonzero(labels[members] == label))
            edges = np.floor(np.cumsum(weights[:, label]) / weights[:, label].sum() * len(stock) + 1e-6).astype(int)
            for client, (start, stop) in enumerate(zip([0, *edges[:-1]], edges, strict=True)):
                parts[client].extend(members[stock[start:stop]])
        expected += [np.sort(own) for own in parts]
    assert same(partition(labels, 15, "domain_step", seed=7, step_ratio=4.0, domain=domain, domains=DOMAINS), expected)


# Errors -------------------------------------------------------------------------------------------------------------

TWO_DOMAINS = {"domain": np.arange(100) % 2, "domains": ("ink", "paint")}


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
        ({"step_ratio": 0.5}, "step_ratio=0.5 must be finite and at least 1"),
        ({"step_ratio": float("nan")}, "step_ratio=nan"),
        ({"step_ratio": float("inf")}, "step_ratio=inf"),
        ({"scheme": "domain"}, "partition 'domain' needs images with domains"),
        ({"scheme": "domain", "num_clients": 3, **TWO_DOMAINS}, "must be a multiple of the 2 domains: ink, paint"),
        (
            {"scheme": "domain", "domain": np.arange(100) // 99, "domains": ("ink", "paint")},
            r"domain paint with 1 images leaves one of its 2 clients with 0, fewer than min_size=1",
        ),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"labels": np.repeat(np.arange(4), 25), "num_clients": 4}
    with pytest.raises(ValueError, match=message):
        partition(**(arguments | change))
