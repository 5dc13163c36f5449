"""Generators that depend on (seed, what for, round, partition) and on nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """Return a CPU generator for one purpose, e.g. `generator(1, "local", round, partition)`."""
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]).generate_state(2)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))


@contextmanager
def layers_draw_by(draw: torch.Generator, device: torch.device) -> Iterator[None]:
    """Let what layers draw by themselves (dropout, stochastic depth) depend on a generator's seed alone.

    They draw from the process's generators, which other clients have used before; afterwards those are as they were.
    """
    seed = draw.initial_seed() ^ 1  # not the numbers that the generator itself gives
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
