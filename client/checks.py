"""Checks of the arrays that the server sends, before anything is changed by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import TwoHead
from tta.statistics import out_of_range

Arrays = Mapping[str, NDArray[Any]]


def check_model(arrays: Arrays, model: TwoHead) -> None:
    """Refuse what `TwoHead.load_global_state`, which compares names and shapes, does not look at.

    Raises
    ------
    ValueError
        An array has another dtype than the network's, or a variance is negative; the message names it.
    """
    for name, own in model.global_state().items():
        if name not in arrays:
            continue
        value, dtype = arrays[name], str(own.dtype).removeprefix("torch.")
        if value.dtype != np.dtype(dtype):
            raise ValueError(f"{name}: dtype {value.dtype} does not fit {dtype}")
        if name.endswith("running_var") and (value < 0).any():
            raise ValueError(f"{name} holds negative variances")


def check_means(means: Arrays, own: Arrays) -> None:
    """Refuse means over clients that do not fit the client's own statistics.

    Raises
    ------
    ValueError
        Names, shapes or dtypes differ, or a value is not finite or out of range; the message names it.
    """
    missing, unknown = sorted(set(own) - set(means)), sorted(set(means) - set(own))
    if missing or unknown:
        raise ValueError(f"means of statistics do not fit: missing {missing}, unknown {unknown}")
    for name, value in means.items():
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            expected = f"{own[name].dtype}{list(own[name].shape)}"
            raise ValueError(f"mean {name}: {value.dtype}{list(value.shape)} does not fit {expected}")
    check_ranges(means)


def check_ranges(means: Arrays) -> None:
    """Refuse means of statistics that are not finite or out of range; ValueError names the array."""
    for name, value in means.items():
        if wrong := out_of_range(name, value):
            raise ValueError(f"mean {name}: {wrong}")
