"""Pixels that are read when they are indexed, through a cache of bounded size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LazyPixels:
    """N images that behave like a uint8 array [N, C, H, W] when they are indexed along the first axis.

    The images used last stay in memory, as many as fit into the cache, at least one. The cache changes no value, so
    neither does the order of reading.

    Parameters
    ----------
    read : callable
        Takes i, 0 to N-1; returns image i, uint8 [C, H, W].
    shape : (N, C, H, W)
    cache_bytes : int
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self, read: Callable[[int], NDArray[np.uint8]], shape: tuple[int, int, int, int], cache_bytes: int
    ) -> None:
        self.shape = shape
        self.capacity = max(1, cache_bytes // int(np.prod(shape[1:])))
        self._read = read
        self._kept: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        """Return the image at an integer, or the images at a slice, a list or an array of integers or booleans."""
        chosen = np.arange(len(self))[index]
        if chosen.ndim == 0:
            return self._one(int(chosen)).copy()
        found = np.empty((*chosen.shape, *self.shape[1:]), np.uint8)
        for position, i in np.ndenumerate(chosen):
            found[position] = self._one(int(i))
        return found

    def _one(self, i: int) -> NDArray[np.uint8]:
        """Return image i from the cache, or read it."""
        with self._lock:
            if i in self._kept:
                self._kept.move_to_end(i)
                return self._kept[i]
        # Outside the lock, so that several threads read at once.
        image = np.ascontiguousarray(self._read(i))
        with self._lock:
            self._kept[i] = image
            self._kept.move_to_end(i)
            while len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
        return image
