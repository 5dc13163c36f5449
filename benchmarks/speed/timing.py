"""Timing helpers of the parts of `speed`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def least_seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the least seconds of a few calls."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def clock_and_processor(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, on the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


@contextmanager
def one_core() -> Iterator[None]:
    """Restrict this process to one core, and torch to one thread."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)
