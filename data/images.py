"""Labelled images in memory: stored as bytes, returned as floats in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .rng import generator


class Pixels(Protocol):
    """Images that are indexed like a uint8 array [N, C, H, W]: an ndarray, or files that are read when indexed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, H, W)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8."""

    @property
    def ndim(self) -> int:
        """4."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class LazyRows:
    """The rows of a tensor that are computed when they are asked for, so that they are never in memory all at once.

    Parameters
    ----------
    index : ndarray int64 [n]
        What `read` is called with, row by row.
    read : callable
        Indices [m] → tensor [m, ...].
    """

    index: np.ndarray
    read: Callable[[np.ndarray], Tensor]

    def __len__(self) -> int:
        """Return n."""
        return len(self.index)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return some rows."""
        return self.read(self.index[rows.cpu().numpy() if isinstance(rows, Tensor) else rows])

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield consecutive batches of `size` rows; the last one may be smaller."""
        return (self[begin : begin + size] for begin in range(0, len(self), size))


#: Images that are in memory, or read batch by batch.
Rows: TypeAlias = Tensor | LazyRows


@dataclass(frozen=True, eq=False)
class Images:
    """A data set of N images with one label each; read-only, so clients of one process can share it.

    Parameters
    ----------
    name : str
        Name of the data set in messages and reports.
    pixels : ndarray [N, C, H, W], or an array-like one (`Pixels`)
        uint8, 0 to 255.
    labels : ndarray [N]
        int64, 0 to K-1; all -1 for images without labels.
    classes : tuple of str
        The K class names.
    domains : tuple of str
        Names of the D domains that the images come from; empty if the data set has no domains.
    domain : ndarray [N], optional
        int64, 0 to D-1: the domain of each image; given if and only if `domains` is.
    labelled : bool
        Whether the images have labels.

    Raises
    ------
    TypeError
        A wrong dtype.
    ValueError
        A wrong shape, unequal lengths, a label or domain out of range, no or repeated class names, repeated domain
        names, or one of `domains` and `domain` without the other.
    """

    name: str
    pixels: Pixels
    labels: np.ndarray
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()
    domain: np.ndarray | None = None
    labelled: bool = True

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.labels.dtype != np.int64:
            raise TypeError(
                f"{self.name}: pixels must be uint8 and labels int64, got {self.pixels.dtype} and {self.labels.dtype}"
            )
        if self.pixels.ndim != 4 or min(self.pixels.shape[1:]) < 1:
            raise ValueError(f"{self.name}: pixels must be [N, C, H, W], got {self.pixels.shape}")
        if self.labels.shape != self.pixels.shape[:1]:
            raise ValueError(f"{self.name}: {self.pixels.shape[0]} images but labels {self.labels.shape}")
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"{self.name}: class names must be present and different, got {self.classes}")
        if not self.labelled and (self.labels != -1).any():
            raise ValueError(f"{self.name}: labels of images without labels must be -1")
        if self.labelled and len(self) and (self.labels.min() < 0 or self.labels.max() >= len(self.classes)):
            raise ValueError(
                f"{self.name}: labels run from {self.labels.min()} to {self.labels.max()}, "
                f"but there are {len(self.classes)} classes"
            )
        self._check_domains()
        # Views, so that the caller's arrays stay writable.
        if isinstance(self.pixels, np.ndarray):
            object.__setattr__(self, "pixels", _read_only(self.pixels))
        object.__setattr__(self, "labels", _read_only(self.labels))
        if self.domain is not None:
            object.__setattr__(self, "domain", _read_only(self.domain))

    def _check_domains(self) -> None:
        """Raise an error for domains that do not match the images."""
        if self.domain is None:
            if self.domains:
                raise ValueError(f"{self.name}: domains {self.domains} but no domain of each image")
            return
        if self.domain.dtype != np.int64:
            raise TypeError(f"{self.name}: domain must be int64, got {self.domain.dtype}")
        if self.domain.shape != self.labels.shape:
            raise ValueError(f"{self.name}: {len(self)} images but domain {self.domain.shape}")
        if not self.domains or len(set(self.domains)) != len(self.domains):
            raise ValueError(f"{self.name}: domain names must be present and different, got {self.domains}")
        if len(self) and (self.domain.min() < 0 or self.domain.max() >= len(self.domains)):
            raise ValueError(
                f"{self.name}: domain runs from {self.domain.min()} to {self.domain.max()}, "
                f"but there are {len(self.domains)} domains"
            )

    def __len__(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    @property
    def in_memory(self) -> bool:
        """Whether all pixels are in memory; others are read when they are indexed."""
        return isinstance(self.pixels, np.ndarray)

    def rows(self, indices: np.ndarray, device: torch.device | str = "cpu") -> Rows:
        """Return the images at `indices` [n] as bytes, uint8 [n, C, H, W] on `device`."""

        def read(chosen: np.ndarray) -> Tensor:
            return torch.from_numpy(self.pixels[chosen]).to(device)

        index = np.asarray(indices, dtype=np.int64)
        return read(index) if self.in_memory else LazyRows(index, read)

    @cached_property
    def pixel_mean(self) -> float:
        """Mean of all pixels, 0 to 255; 0 without images. Reads all of them."""
        return float(self.pixels[:].mean(dtype=np.float64)) if len(self) else 0.0

    def subset(self, indices: np.ndarray | Sequence[int]) -> Images:
        """Return the images at `indices` [n], in this order, as a copy."""
        chosen = np.asarray(indices, dtype=np.int64)
        domain = None if self.domain is None else self.domain[chosen]
        pixels, labels = self.pixels[chosen], self.labels[chosen]
        return Images(self.name, pixels, labels, self.classes, self.domains, domain, self.labelled)

    def batch(self, indices: np.ndarray | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the images at `indices` [n] as float32 [n, C, H, W] in [0, 1] on `device`."""
        chosen = self.pixels[np.asarray(indices, dtype=np.int64)]
        # Bytes are a quarter of the size of floats: convert on the device.
        return torch.from_numpy(chosen).to(device).float().div_(255.0)

    def stratified(self, fraction: float, seed: int) -> Images:
        """Return a subset with the same class mix: round(fraction · n_k) of each class k, at least one.

        The order of the images is kept, and empty classes stay empty. With domains, this holds for every class in each
        domain.

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
        groups = self.labels if self.domain is None else self.domain * self.num_classes + self.labels
        for group in range(self.num_classes * max(1, len(self.domains))):
            members = np.flatnonzero(groups == group)
            count = min(len(members), max(1, round(fraction * len(members))))
            kept.append(rng.permutation(members)[:count])
        return self.subset(np.sort(np.concatenate(kept)))


def _read_only(array: np.ndarray) -> np.ndarray:
    """Return a contiguous read-only view of `array`."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view
