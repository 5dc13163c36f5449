"""Finite or not, wherever the number is, and where adding up overflows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.finite import all_finite, array_finite

LARGE = float(np.finfo(np.float32).max)
numbers = st.one_of(st.sampled_from([0.0, LARGE, -LARGE, np.inf, -np.inf, np.nan]), st.floats(width=32))


@given(st.lists(st.lists(numbers, max_size=5), max_size=3), st.sampled_from([torch.float32, torch.float64]))
def test_it_is_what_looking_at_every_number_says(parts: list[list[float]], dtype: torch.dtype) -> None:
    expected = all(np.isfinite(part).all() for part in parts)
    assert all_finite([torch.tensor(part, dtype=dtype) for part in parts]) == expected
    for part in parts:
        for kind in (np.float32, np.float64):
            assert array_finite(np.array(part, dtype=kind)) == np.isfinite(part).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_types(dtype: torch.dtype) -> None:
    values = torch.tensor([60000, 60000, 3]).to(dtype)
    assert all_finite([values, torch.zeros(0)])
    assert array_finite(np.array([60000, 60000], np.float16))
    if dtype.is_floating_point:
        assert not all_finite([torch.zeros(2), values / 0])


def test_weights_that_need_a_gradient() -> None:
    value = torch.nn.Parameter(torch.tensor([1.0, float("nan")]))
    assert not all_finite([value])
    assert all_finite([])
