"""Arrays that go by reference, in the memory order in which networks hold them.

Convolutions' weights [O, I, H, W] lie channels-last (O, H, W, I) in a client's network (`client.runtime`). To load an
array of another order it has to be transposed, which takes three times as long as copying it. Values and shapes are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.work import Arrays

LAST = (0, 2, 3, 1)
FIRST = (0, 3, 1, 2)
#: Name → an array in C order, and whether its axes are in the order LAST.
Packed = dict[str, tuple[NDArray[Any], bool]]


def as_held(value: NDArray[Any]) -> NDArray[Any]:
    """Return an array with four axes as one that lies channels-last; others, and one that does, as they are."""
    return np.ascontiguousarray(value.transpose(LAST)).transpose(FIRST) if value.ndim == 4 else value


def packed(arrays: Mapping[str, NDArray[Any]]) -> Packed:
    """Return arrays in C order, which Ray ships without a copy of its own; `unpacked` gives them back."""
    turned = {name: value.ndim == 4 and not value.flags.c_contiguous for name, value in arrays.items()}
    return {
        name: (np.asarray(value.transpose(LAST) if turned[name] else value, order="C"), turned[name])
        for name, value in arrays.items()
    }


def unpacked(arrays: Packed) -> Arrays:
    """Return the arrays that were packed, in the same memory."""
    return {name: value.transpose(FIRST) if turned else value for name, (value, turned) in arrays.items()}
