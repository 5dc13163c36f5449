"""Freed memory goes back to the system."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedtta.settings.memory import return_freed_memory

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


HOLES = """
import sys
import numpy as np
from fedtta.settings.memory import return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

if sys.argv[1] == "returned":
    return_large_blocks()
np.ones(30 << 17)  # 30 MiB: glibc's threshold rises when it is freed
before = resident()
blocks = [(np.ones(5 << 17), bytes(1 << 16)) for _ in range(30)]
small = [one for _, one in blocks]
del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is what is set")
def test_models_that_are_freed_leave_no_holes() -> None:
    """30 blocks of 5 MiB, each followed by a small one that stays."""
    found = {}
    for name in ("returned", "kept"):
        made = subprocess.run([sys.executable, "-c", HOLES, name], capture_output=True, text=True, check=True)
        found[name] = int(made.stdout)
    assert found["returned"] < 10
    assert found["kept"] > 100, "the allocator does so by itself now: the function can go"
