"""Whether all numbers of tensors or arrays are finite, at the price of adding them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def all_finite(values: Sequence[Tensor]) -> bool:
    """Tell whether all numbers of floating-point tensors on one device are finite; True for none.

    A sum with NaN or infinity in it is not finite. A sum of large finite numbers may overflow too: only then is every
    number looked at, which takes some fifty times longer.
    """
    if not values:
        return True
    sums = torch.stack([value.detach().sum(dtype=torch.float32) for value in values])
    if bool(torch.isfinite(sums).all()):
        return True
    return bool(torch.stack([torch.isfinite(value.detach()).all() for value in values]).all())


def array_finite(value: NDArray[Any]) -> bool:
    """Tell whether all numbers of a floating-point array are finite; see `all_finite`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum())) or bool(np.isfinite(value).all())
