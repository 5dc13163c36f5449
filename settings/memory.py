"""Memory that this process has freed, given back to the system; glibc keeps it otherwise, more with every hour."""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 1 << 20  # of mallopt(3); bytes, more than one image needs


def return_large_blocks() -> None:
    """Return large blocks to the system when they are freed, from now on: a large batch's would stay resident.

    glibc raises the size from which it does so with each block that is freed; a size that is set stays.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def return_freed_memory() -> None:
    """Return all free pages to the system, also those between blocks that are in use."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
