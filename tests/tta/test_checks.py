from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedtta.tta.arrays import double
from fedtta.tta.checks import Checks, Diverged

ROWS = [[1.0, 2.0], [math.nan, 0.0], [0.0, -math.inf]]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_checks_are_read_in_order_and_then_forgotten(kind: Any) -> None:
    checks, rows = Checks(), kind(ROWS)
    assert checks.finite("the input", rows[:1]) is not None
    checks.finite("the output", rows)
    checks.require(kind([False]), lambda bad: f"later: {bad}")
    with pytest.raises(Diverged, match=r"^the output for samples \[1, 2\] of the batch is not finite$"):
        checks.read()
    checks.read()
    checks.require(kind([True, False]), lambda bad: f"later: {bad}")
    with pytest.raises(ValueError, match=r"^later: \[1\]$"):
        checks.read(kind([1.0]))


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_values_are_read_with_the_checks(kind: Any) -> None:
    checks = Checks()
    checks.finite("the input", kind(ROWS)[:1])
    values = checks.read(double(kind([[0.5, 2.0], [3.0, 2.0**90]])))
    assert isinstance(values, np.ndarray)
    assert values.tolist() == [[0.5, 2.0], [3.0, 2.0**90]]
    assert checks.read(double(kind(ROWS))).shape == (3, 2)  # they need not be finite
