"""The test-time stream of a device with data of its own: its test images, uncorrupted, in one order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .federation import Federation
from .imbalanced_streams import Batch
from .rng import generator

#: Name of the only condition of such a stream, where other streams have the names of corruptions.
UNCORRUPTED = "original"


@dataclass(frozen=True, eq=False)
class OwnStream:
    """The test images of a device, in batches. Rounds are numbered from 0.

    Parameters
    ----------
    federation : Federation
        Of one device.
    batch_size : int
        B, images of a round; the last round may have fewer.
    in_order : bool
        In the order of the samples' names, instead of one that depends on the seed and the device's name.
    """

    federation: Federation
    batch_size: int
    in_order: bool = False

    @cached_property
    def order(self) -> np.ndarray:
        """Indices of the test images in the order of the stream, int64 [n]."""
        test = self.federation.splits[0].test
        draw = generator("own stream", self.federation.seed, self.federation.numbers[0])
        return test if self.in_order else draw.permutation(test)

    @property
    def rounds(self) -> int:
        """R = ⌈n / B⌉."""
        return -(-len(self.order) // self.batch_size)

    def batch(self, round: int, device: torch.device | str = "cpu") -> Batch:
        """Return the batch of a round; labels are -1 where there are none.

        Raises
        ------
        ValueError
            `round` is not in 0..R-1.
        """
        if not 0 <= round < self.rounds:
            raise ValueError(f"round={round} is not in 0..{self.rounds - 1}")
        index = self.order[round * self.batch_size : (round + 1) * self.batch_size]
        images = self.federation.images
        return Batch(images.batch(index, device), torch.from_numpy(images.labels[index]).to(device), index, UNCORRUPTED)
