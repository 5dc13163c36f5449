"""Checks of options and tensors; every message names what is wrong and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedtta.tta.arrays import Array, namespace

if TYPE_CHECKING:
    from torch import Tensor, nn

    _Rows = TypeVar("_Rows", Tensor, np.ndarray)


class Diverged(ValueError):
    """What an adapter computed for a batch is not finite; its state is unchanged."""


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


class Checks:
    """Checks of a batch that are read together.

    On a GPU each reading makes the program wait for all that was begun.

        checks = Checks()
        logits = checks.finite("the network's output", network(x))
        loss = checks.finite("the loss", ...)
        checks.read()

    Read them before anything that was computed is kept.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Array, Callable[[list[int]], str], type[ValueError]]] = []

    def require(self, good: Array, error: Callable[[list[int]], str]) -> None:
        """Require that `good` [n] be True throughout; `error` makes a message of the indices where it is not."""
        self._noted.append((good, error, ValueError))

    def require_finite(self, good: Array, error: Callable[[list[int]], str]) -> None:
        """Require as `require`; what is not `good` is not finite, and the adapter has `Diverged`."""
        self._noted.append((good, error, Diverged))

    def finite(self, what: str, rows: _Rows) -> _Rows:
        """Return `rows` [B, ...], which have to be finite; the message names `what` and the samples."""
        self.require_finite(finite_rows(rows), lambda bad: f"{what} for samples {bad} of the batch is not finite")
        return rows

    def read(self, values: Array | None = None) -> Any:
        """Raise what the first check that failed demands; forget them all.

        Parameters
        ----------
        values : Array, float64, optional
            They reach the CPU in the same copy.

        Returns
        -------
        np.ndarray or None
            `values`.

        Raises
        ------
        ValueError
            A check failed; Diverged if something is not finite.
        """
        noted, self._noted = self._noted, []
        flags = [good for good, _, _ in noted]
        if values is None:
            fine, found = not flags or bool(namespace(flags[0]).concat(flags, axis=0).all()), None
        elif isinstance(values, np.ndarray):
            fine, found = all(bool(good.all()) for good in flags), values
        else:
            one = namespace(values).concat([*(good.double() for good in flags), values.reshape(-1)], axis=0)
            host = one.cpu().numpy()
            start = len(host) - values.numel()
            fine, found = bool(host[:start].all()), host[start:].reshape(values.shape)
        if not fine:
            for good, error, kind in noted:
                if bad := [index for index, one in enumerate(good.tolist()) if not one]:
                    raise kind(error(bad))
        return found


def finite_rows(rows: Tensor | np.ndarray) -> Array:
    """Return which rows [B, ...] have finite values alone, [B]."""
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return namespace(flat).isfinite(flat).all(1)


def check_finite(what: str, rows: _Rows) -> _Rows:
    """Return `rows` [B, ...]; raise Diverged naming `what` and the samples whose rows are not finite."""
    checks = Checks()
    checks.finite(what, rows)
    checks.read()
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
