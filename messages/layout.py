"""Arrays in the memory order in which networks hold them.

Convolutions' weights [O, I, H, W] lie channels-last (O, H, W, I) in a client's network (`client.runtime`). To load an
array of another order it has to be transposed, which takes three times as long as copying it. Values and shapes are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAST = (0, 2, 3, 1)
FIRST = (0, 3, 1, 2)
#: An array in C order, and whether its axes are in the order LAST: what can be shipped without a copy.
Contiguous = tuple[NDArray[Any], bool]


def as_held(value: NDArray[Any]) -> NDArray[Any]:
    """Return an array with four axes as one that lies channels-last; others, and one that does, as they are."""
    return np.ascontiguousarray(value.transpose(LAST)).transpose(FIRST) if value.ndim == 4 else value


def contiguous(value: NDArray[Any]) -> Contiguous:
    """Return an array as `restored` takes it; it is copied only if it lies neither in C order nor channels-last."""
    turned = value.ndim == 4 and not value.flags.c_contiguous
    return np.asarray(value.transpose(LAST) if turned else value, order="C"), turned


def restored(value: NDArray[Any], turned: bool) -> NDArray[Any]:
    """Return the array that `contiguous` was given, in the same memory."""
    return value.transpose(FIRST) if turned else value


def packed(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Contiguous]:
    """Return named arrays as they are shipped; `unpacked` gives them back."""
    return {name: contiguous(value) for name, value in arrays.items()}


def unpacked(arrays: Mapping[str, Contiguous]) -> dict[str, NDArray[Any]]:
    """Return the arrays that were `packed`, in the same memory."""
    return {name: restored(*value) for name, value in arrays.items()}
