"""Ratios of two measurements made side by side, parts of `speed`, and timing helpers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Ratio:
    """A ratio and its two sides.

    Parameters
    ----------
    what : str
        Such as "btfl, batch 512".
    ratio : float
    unit : str
        Of `ours` and `other`.
    ours, other : float
    than : str
        What `other` measures.
    target : float or None
        Bound of the ratio.
    least : bool
        Whether the bound is a lower one.
    """

    what: str
    ratio: float
    unit: str
    ours: float
    other: float
    than: str
    target: float | None = None
    least: bool = False

    @property
    def mark(self) -> str:
        """Return a check mark or a cross; nothing without a target."""
        if self.target is None:
            return ""
        return "✓" if (self.ratio >= self.target if self.least else self.ratio <= self.target) else "✗"

    @property
    def wanted(self) -> str:
        """Return the target as it is printed."""
        return "" if self.target is None else f"{'≥' if self.least else '≤'} {self.target:g}"


@dataclass(frozen=True)
class Measured:
    """The ratios of a part, and further numbers as JSON values."""

    ratios: list[Ratio]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of the `speed` command.

    Parameters
    ----------
    title : str
    measure : callable
        Takes whether to measure as little as possible (`--quick`).
    one_core : bool
        Whether it runs on one core with one torch thread.
    """

    title: str
    measure: Callable[[bool], Measured]
    one_core: bool = False


def markdown(ratios: Iterable[Ratio]) -> list[str]:
    """Return the lines of a Markdown table of ratios."""
    lines = ["| what | ratio | target | ours | beside |", "| --- | --: | --- | --- | --- |"]
    for one in ratios:
        sides = f"{one.ours:.3g} {one.unit} | {one.other:.3g}: {one.than}"
        lines.append(f"| {one.what} | {one.ratio:.3g} | {one.wanted} {one.mark} | {sides} |")
    return lines


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
