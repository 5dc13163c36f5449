"""All clients' splits together: nothing shared, nothing lost, everything from the seed."""

from __future__ import annotations

import numpy as np
import pytest

from data import Federation, Images


def images(count=1000, classes=10):
    rng = np.random.default_rng(0)
    labels = np.arange(count, dtype=np.int64) % classes
    return Images("made", rng.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8), labels, tuple("abcdefghij"[:classes]))


@pytest.mark.parametrize("scheme", ["equal", "dirichlet", "iid"])
def test_samples_belong_to_one_split_of_one_client(scheme):
    made = Federation.create(images(), 8, scheme=scheme, alpha=0.5, seed=3)
    everything = np.concatenate([part for one in made.splits for part in (one.train, one.validation, one.test)])
    tests = np.concatenate([one.test for one in made.splits])

    assert made.num_clients == 8
    assert len(np.unique(everything)) == len(everything) == 1000
    assert not np.isin(tests, made.train_indices).any()
    assert sorted([*made.train_indices, *tests]) == list(range(1000))
    np.testing.assert_array_equal(
        made.others_test(2), np.concatenate([one.test for i, one in enumerate(made.splits) if i != 2])
    )


def test_class_counts_are_of_the_training_split():
    made = Federation.create(images(), 5, alpha=0.1, seed=0)
    counts = made.class_counts()
    assert counts.shape == (5, 10)
    for client in range(5):
        for label in range(10):
            assert counts[client, label] == sum(made.images.labels[i] == label for i in made.splits[client].train)


def test_equal_settings_equal_splits_and_seed_matters():
    first, again, other = (Federation.create(images(), 5, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a.test, b.test) for a, b in zip(first.splits, again.splits, strict=True))
    assert not all(np.array_equal(a.test, b.test) for a, b in zip(first.splits, other.splits, strict=True))


def test_one_client_has_no_others():
    made = Federation.create(images(50), 1)
    assert len(made.others_test(0)) == 0
    assert len(made.splits[0]) == 50
