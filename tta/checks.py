"""Checks of options and tensors; every message names what is wrong and what is allowed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedtta.tta.arrays import namespace

if TYPE_CHECKING:
    from torch import Tensor, nn

    _Rows = TypeVar("_Rows", Tensor, np.ndarray)


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ValueError naming `name` unless `value` is finite and in [low, high] (or (low, high])."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not (math.isfinite(value) and inside):
        raise ValueError(f"{name}={value} is outside {'(' if open_low else '['}{low}, {high}]")


def check_least(least: int, **values: int) -> None:
    """Raise ValueError for the first of the named `values` that is below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError listing `choices` unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; there are: {', '.join(choices)}")


def not_finite(rows: Tensor | np.ndarray) -> list[int]:
    """Return the indices of the rows [B, ...] with a value that is not finite."""
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    finite = namespace(flat).isfinite(flat).all(1)  # [B]
    return [] if bool(finite.all()) else [i for i, whole in enumerate(finite.tolist()) if not whole]


def check_finite(what: str, rows: _Rows) -> _Rows:
    """Return `rows` [B, ...]; raise ValueError naming `what` and the samples whose rows are not finite."""
    if bad := not_finite(rows):
        raise ValueError(f"{what} for samples {bad} of the batch is not finite")
    return rows


def check_parts(model: nn.Module, method: str, *parts: str) -> None:
    """Raise ValueError naming the attributes that `method` needs and `model` lacks."""
    missing = [part for part in parts if getattr(model, part, None) is None]
    if missing:
        raise ValueError(f"{method} needs a model with {', '.join(parts)}; {type(model).__name__} has no {missing}")


def class_count(model: nn.Module, num_classes: int | None, least: int = 2) -> int:
    """Return K: as given, or `model.num_classes`; raise ValueError where there is neither, or K is below `least`."""
    count = getattr(model, "num_classes", None) if num_classes is None else num_classes
    if not isinstance(count, int):
        raise ValueError(f"num_classes is needed: {type(model).__name__} does not state how many classes it has")
    check_least(least, num_classes=count)
    return count
