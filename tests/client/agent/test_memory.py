"""Freed memory goes back to the system."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from fedtta.client.agent.memory import return_freed_memory

BLOCK, BLOCKS, KEPT = 4096, 16_000, 500  # bytes; one in so many blocks stays in use, the last one among them


def own() -> float:
    """This process's own resident memory in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 2**10


def test_free_pages_between_blocks_in_use_are_returned() -> None:
    return_freed_memory()
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(BLOCKS)]
    full = own()
    blocks = blocks[KEPT - 1 :: KEPT]
    gc.collect()
    freed = own()
    return_freed_memory()
    assert full - own() > BLOCK * BLOCKS / 2**20 / 2
    assert full - freed < BLOCK * BLOCKS / 2**20 / 2  # without it they stay
