"""Parts of clients' training and test samples: how many, nested, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.runtime import federation_of
from data.split import Split, part_of, split
from settings import Settings, SettingsError

SMALL = Settings(clients=4, fraction=0.2)


@given(st.integers(0, 200), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 9))
def test_so_many_of_its_own_and_a_smaller_part_is_within_a_larger_one(
    count: int, first: float, second: float, seed: int
) -> None:
    whole = split(np.arange(3, 3 + count), seed)
    small, large = (part_of(whole, part, part, seed) for part in sorted((first, second)))
    for name, part in (("train", max(first, second)), ("test", max(first, second))):
        own, more, less = (getattr(one, name) for one in (whole, large, small))
        assert len(more) == min(len(own), max(1, round(part * len(own))))
        assert np.isin(more, own).all()
        assert np.isin(less, more).all()
        assert np.array_equal(more, np.unique(more))
    assert np.array_equal(small.validation, whole.validation)


def test_all_is_what_it_was_and_bad_parts_are_refused() -> None:
    whole = split(np.arange(50), 1)
    same = part_of(whole, 1.0, 1.0, (1, 2))
    assert [part.tobytes() for part in (same.train, same.test)] == [whole.train.tobytes(), whole.test.tobytes()]
    nothing = np.empty(0, np.int64)
    assert len(part_of(Split(nothing, nothing, nothing), 0.5, 0.5, 1)) == 0
    for bad in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="part of train"):
            part_of(whole, bad, 1.0, 1)
        with pytest.raises(ValueError, match="part of test"):
            part_of(whole, 1.0, bad, 1)


def test_clients_have_parts_of_what_they_had() -> None:
    whole, part = federation_of(SMALL), federation_of(SMALL.replace(train_part=0.5, test_part=0.75))
    for before, after in zip(whole.splits, part.splits, strict=True):
        assert len(after.train) == round(0.5 * len(before.train))
        assert len(after.test) == round(0.75 * len(before.test))
        assert np.isin(after.train, before.train).all()
        assert np.isin(after.test, before.test).all()
    assert not np.isin(part.others_test(0), part.train_indices).any()
    with pytest.raises(SettingsError, match=r"train-part = 0\.5: allowed with split = 'published'"):
        SMALL.replace(split="published", train_part=0.5)
