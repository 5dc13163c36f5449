"""Generators that depend on (seed, what for, round, partition) and on nothing else."""

from __future__ import annotations

import zlib

import numpy as np
import torch


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return a CPU generator for one purpose, e.g. `generator(1, "local", round, partition)`."""
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]).generate_state(2)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
