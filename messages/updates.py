"""Trained models as compressed updates, with error feedback: the codec that client and server share.

- `changed`: arrays that equal what was sent, bit for bit, are left out. Nothing is lost.
- `float16`, `int8`: in addition, arrays with two or more axes travel as their difference to what was sent, rounded to
  float16, or to 255 levels with one scale an array. Arrays with fewer axes (biases, normalization layers and their
  running statistics) travel as they are: they are few bytes, and a rounded variance could be 0.

Error feedback: what rounding leaves out is added to the client's next update ("1-bit stochastic gradient descent",
Seide et al., Interspeech 2014; "Error feedback fixes SignSGD", Karimireddy et al., ICML 2019). It is measured against
the model that the server decodes, so decoded changes and the last residual sum to the true changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import Arrays

Format = Literal["float32", "changed", "float16", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Formats that round → the type of their numbers.
ROUNDED: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "int8": np.dtype(np.int8)}
LEVELS = 127  # of int8 on each side of 0
LARGEST_SCALE = 1e30  # 127 times it is a float32


@dataclass(frozen=True)
class Update:
    """A trained model as it travels.

    Parameters
    ----------
    arrays : dict
        What is sent.
    scales : dict
        Name → step between two levels of an int8 array.
    residual : dict
        Name → what rounding has left out, for the next update; empty for formats that do not round.
    """

    arrays: Arrays = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    residual: Arrays = field(default_factory=dict)


def encode(how: Format, sent: Arrays, trained: Mapping[str, NDArray[Any]], residual: Arrays) -> Update:
    """Return a trained model as an update of the model that was sent.

    Parameters
    ----------
    sent : dict
        With at least the names in `trained`.
    residual : dict
        That of the last update; a name that is missing counts as zeros.

    Raises
    ------
    FloatingPointError
        A change is too large for the format.
    """
    update = Update()
    for name, value in trained.items():
        before = sent[name]
        if not is_rounded(how, before):
            if not _same_bits(value, before):
                update.arrays[name] = value
            continue
        owed = residual.get(name, np.zeros((), before.dtype))
        numbers, scale = _rounded(how, name, value - before + owed)
        if numbers.any():
            update.arrays[name] = numbers
            if scale is not None:
                update.scales[name] = scale
            update.residual[name] = value - _moved(before, numbers, scale) + owed
        else:
            update.residual[name] = value - before + owed
    return update


def decode(how: Format, sent: Arrays, arrays: Arrays, scales: Mapping[str, float]) -> Arrays:
    """Return the trained model of an update, in the dtypes and the order of what was sent.

    Everything is compared with what was sent before anything is allocated. Arrays that are not in the update are those
    that were sent, not copied. Values are not checked: they may be NaN or infinite.

    Raises
    ------
    ValueError
        An array is unknown, or its shape or dtype is not that of the format, or scales are missing or unknown.
    """
    if unknown := sorted(set(arrays) - set(sent)):
        raise ValueError(f"unknown arrays {unknown}")
    scaled = set()
    for name, value in arrays.items():
        before = sent[name]
        rounded = is_rounded(how, before)
        dtype = ROUNDED[how] if rounded else before.dtype
        if value.shape != before.shape or value.dtype != dtype:
            raise ValueError(f"{name}: {value.dtype}{list(value.shape)}, expected {dtype}{list(before.shape)}")
        scaled |= {name} if rounded and how == "int8" else set()
    if missing := sorted(scaled - set(scales)):
        raise ValueError(f"scales of {missing} are missing")
    if unknown := sorted(set(scales) - scaled):
        raise ValueError(f"unknown scales {unknown}")
    return {name: _decoded(how, name, before, arrays, scales) for name, before in sent.items()}


def is_rounded(how: Format, value: NDArray[Any]) -> bool:
    """Tell whether a format rounds an array."""
    return how in ROUNDED and value.dtype.kind == "f" and value.ndim >= 2


def _decoded(how: Format, name: str, before: NDArray[Any], arrays: Arrays, scales: Mapping[str, float]) -> NDArray[Any]:
    if name not in arrays:
        return before
    return _moved(before, arrays[name], scales.get(name)) if is_rounded(how, before) else arrays[name]


def _moved(before: NDArray[Any], numbers: NDArray[Any], scale: float | None) -> NDArray[Any]:
    """Return an array after its rounded change; both sides compute it, in the array's own type."""
    change = numbers.astype(before.dtype)
    if scale is not None:
        change *= before.dtype.type(scale)
    with np.errstate(over="ignore", invalid="ignore"):  # of a hostile sender; validation refuses it
        change += before
    return change


def _rounded(how: Format, name: str, change: NDArray[Any]) -> tuple[NDArray[Any], float | None]:
    """Return a change in the format's numbers, and their scale if they have one."""
    largest = float(np.abs(change).max(initial=0.0))
    most = float(np.finfo(np.float16).max) if how == "float16" else LEVELS * LARGEST_SCALE
    if not largest <= most:
        raise FloatingPointError(f"{name} has changed by {largest:.3g}: allowed with {how} is at most {most:.3g}")
    if how == "float16":
        return change.astype(np.float16), None
    scale = change.dtype.type(largest / LEVELS)
    if not scale:  # too small for a step
        return np.zeros(change.shape, np.int8), None
    steps = np.rint(change / scale).clip(-LEVELS, LEVELS)
    return steps.astype(np.int8), float(scale)


def _same_bits(value: NDArray[Any], other: NDArray[Any]) -> bool:
    """Compare arrays of one shape and dtype; 0 is not -0 here."""
    bits = f"u{value.dtype.itemsize}"
    return bool(np.array_equal(value.view(bits), other.view(bits)))
