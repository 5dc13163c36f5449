"""A data set dealt out to clients: who has which samples, and which of them are for training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .images import Images
from .partition import partition
from .split import Split, split


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' splits of one data set. Every node computes the same one from the same settings."""

    images: Images
    splits: tuple[Split, ...]
    seed: int

    @classmethod
    def create(
        cls,
        images: Images,
        num_clients: int,
        scheme: str = "equal",
        alpha: float = 0.1,
        seed: int = 0,
        min_size: int = 1,
        fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
    ) -> Federation:
        """Deal `images` out (`partition`) and split each client's samples (`split`), everything from `seed`.

        Raises
        ------
        ValueError
            As `partition` and `split`.
        """
        clients = partition(images.labels, num_clients, scheme, alpha, seed, min_size)
        splits = tuple(split(own, (seed, client), fractions) for client, own in enumerate(clients))
        return cls(images, splits, seed)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.splits)

    def class_counts(self) -> np.ndarray:
        """Return how many training samples of each class each client has, int64 [N, K]."""
        classes = self.images.num_classes
        return np.stack([np.bincount(self.images.labels[one.train], minlength=classes) for one in self.splits])

    @cached_property
    def train_indices(self) -> np.ndarray:
        """All samples that any client trains or tunes on: training and validation splits, sorted."""
        return np.sort(np.concatenate([part for one in self.splits for part in (one.train, one.validation)]))

    def others_test(self, client: int) -> np.ndarray:
        """Return the pooled test samples of all clients but `client`, in the order of the clients."""
        parts = [one.test for number, one in enumerate(self.splits) if number != client]
        return np.concatenate([np.empty(0, np.int64), *parts])
