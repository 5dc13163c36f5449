"""Labelled pictures in memory: bytes at rest, float in [0, 1] when somebody asks for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .seeds import generator


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: N pictures with one label each, read-only, so that clients of one process may share it.

    Parameters
    ----------
    name : str
        What the pictures are called in messages and reports.
    pixels : ndarray [N, C, H, W]
        uint8, 0 to 255.
    labels : ndarray [N]
        int64, 0 to K-1.
    classes : tuple of str
        The K class names.

    Raises
    ------
    TypeError
        A wrong dtype.
    ValueError
        A wrong shape, unequal lengths, a label out of range, or no or repeated class names.
    """

    name: str
    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.labels.dtype != np.int64:
            raise TypeError(
                f"{self.name}: pixels must be uint8 and labels int64, got {self.pixels.dtype} and {self.labels.dtype}"
            )
        if self.pixels.ndim != 4 or min(self.pixels.shape[1:]) < 1:
            raise ValueError(f"{self.name}: pixels must be [N, C, H, W], got {self.pixels.shape}")
        if self.labels.shape != self.pixels.shape[:1]:
            raise ValueError(f"{self.name}: {self.pixels.shape[0]} pictures but labels {self.labels.shape}")
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"{self.name}: class names must be present and different, got {self.classes}")
        if len(self) and (self.labels.min() < 0 or self.labels.max() >= len(self.classes)):
            raise ValueError(
                f"{self.name}: labels run from {self.labels.min()} to {self.labels.max()}, "
                f"but there are {len(self.classes)} classes"
            )
        # Views, so that the caller's own arrays stay as they are.
        object.__setattr__(self, "pixels", _read_only(self.pixels))
        object.__setattr__(self, "labels", _read_only(self.labels))

    def __len__(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one picture."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def subset(self, indices: np.ndarray | Sequence[int]) -> Images:
        """Return the pictures at `indices` [n], in that order, as a copy."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Images(self.name, self.pixels[chosen], self.labels[chosen], self.classes)

    def batch(self, indices: np.ndarray | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the pictures at `indices` [n] as float32 [n, C, H, W] in [0, 1] on `device`."""
        chosen = self.pixels[np.asarray(indices, dtype=np.int64)]
        # Bytes travel to the device, a quarter of the floats; the division happens there.
        return torch.from_numpy(chosen).to(device).float().div_(255.0)

    def stratified(self, fraction: float, seed: int) -> Images:
        """Return a subset with the same class mix: round(fraction · n_k) of each class k, at least one.

        The order of the pictures is kept. A class without pictures stays without.

        Raises
        ------
        ValueError
            `fraction` is outside (0, 1].
        """
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction={fraction} must be in (0, 1]")
        if fraction == 1.0:
            return self
        rng = generator("stratified", seed)
        kept = [np.empty(0, np.int64)]
        for label in range(self.num_classes):
            members = np.flatnonzero(self.labels == label)
            count = min(len(members), max(1, round(fraction * len(members))))
            kept.append(rng.permutation(members)[:count])
        return self.subset(np.sort(np.concatenate(kept)))


def _read_only(array: np.ndarray) -> np.ndarray:
    """Return a contiguous view of `array` that refuses to be written through."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view
