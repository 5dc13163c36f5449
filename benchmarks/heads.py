"""`heads`: the time of head interpolation alone, features and logits given, on one core.

Ours in batches of 1, 32 and 1,000 beside the naive loop over samples (`benchmarks.speed.naive`), in one process. Both
have to agree to 1e-6 on all samples before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics as averages
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor, nn

from benchmarks.record import RESULTS, mark, provenance, write_json
from benchmarks.speed import naive
from models import TwoHead
from tta.btfl import BTFL, discretise
from tta.fedthe import FedTHE
from tta.statistics import Statistics

FEATURES, CLASSES = 64, 10
BATCHES = (1, 32, 1000)
REPEATS = 7
TOLERANCE = 1e-6
#: Seconds per 1,000 samples, by method and batch.
TARGETS = {("BTFL", 1): 0.1, ("BTFL", 1000): 0.01, ("FedTHE", 1): 1.0, ("FedTHE", 1000): 0.1}
METHODS: dict[str, tuple[type[FedTHE] | type[BTFL], Callable[..., Tensor]]] = {
    "BTFL": (BTFL, naive.btfl),
    "FedTHE": (FedTHE, naive.fedthe),
}


@dataclass(frozen=True)
class Inputs:
    """What a network gives a method: features [n, d] and the two heads' logits [n, K]; and the statistics."""

    z: Tensor
    logits_global: Tensor
    logits_personal: Tensor
    statistics: Statistics

    def outputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Return features and logits in one floating-point type."""
        return [tensor.to(dtype) for tensor in (self.z, self.logits_global, self.logits_personal)]


@dataclass(frozen=True)
class Timing:
    """Seconds per 1,000 samples of one method, type and batch, and of the naive loop; `target` where there is one."""

    method: str
    dtype: str
    batch: int
    seconds: float
    naive_seconds: float
    target: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `heads`."""
    parser.add_argument("--samples", type=_samples, default=1000, help="length of the stream (default: 1000)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of heads.json (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Check, time, print and write `heads.json`."""
    with one_core():
        timings = measure(make_inputs(arguments.samples))
    console.print(rendered(timings))
    rows: list[dict[str, Any]] = [
        {**asdict(timing), "ratio": timing.naive_seconds / timing.seconds} for timing in timings
    ]
    content = {"unit": "seconds per 1,000 samples on one core", "samples": arguments.samples, "features": FEATURES}
    content |= {"classes": CLASSES, "repeats": REPEATS, **provenance(), "timings": rows}
    path = write_json(arguments.out / "heads.json", content)
    console.print(f"Written: {path}", highlight=False)


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core, and torch on one thread, for a while."""
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


def make_inputs(samples: int, seed: int = 0) -> Inputs:
    """Draw a stream of which half is from the client's own three classes, and statistics of training data like it.

    Features are those of a trained encoder in kind: each class has its units, the rest are mostly zero behind the ReLU.
    The personal head knows its own classes only, and knows them better than the global head does.
    """
    draw = Generator().manual_seed(seed)
    own = torch.arange(3)
    centres = 1.2 * torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=draw) - 0.4
    noise = 0.05 * torch.randn(2, FEATURES, CLASSES, dtype=torch.float64, generator=draw)
    weight = 0.12 * (centres.clamp(min=0) - centres.clamp(min=0).mean(0)).T  # (d, K)
    foreign = torch.full((CLASSES,), -4.0, dtype=torch.float64).index_fill(0, own, 0.0)

    def observe(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spread = 0.8 * torch.randn(len(labels), FEATURES, dtype=torch.float64, generator=draw)
        z = (centres[labels] + spread).clamp(min=0)
        return z, z @ (weight + noise[0]), z @ (1.5 * weight + noise[1]) + foreign

    everyone = observe(torch.arange(2000) % CLASSES)
    mine = observe(own[torch.arange(600) % 3])
    known = Statistics(
        descriptor_local=mine[0].mean(0),
        descriptor_global=everyone[0].mean(0),
        dle_local=(discretise(mine[0]) == 0).double().mean(0),
        dle_global=(discretise(everyone[0]) == 0).double().mean(0),
        entropy_local=_mean_entropy(mine[2]),
        entropy_global=_mean_entropy(mine[1]),
    )
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    inside = torch.rand(samples, generator=draw) < 0.5
    return Inputs(*observe(torch.where(inside, labels % 3, labels)), known)


def _mean_entropy(logits: Tensor) -> float:
    logs = logits.log_softmax(1)
    return float(-(logs.exp() * logs).sum(1).mean())


def measure(inputs: Inputs, repeats: int = REPEATS) -> list[Timing]:
    """Check that ours and the naive loop agree, then time both.

    Raises
    ------
    RuntimeError
        They differ by more than `TOLERANCE` somewhere.
    """
    timings = []
    for method, (adapter, loop) in METHODS.items():
        expected, naive_seconds = timed_loop(loop, inputs)
        ours = adapter(TwoHead(nn.Identity(), FEATURES, CLASSES), inputs.statistics)
        for dtype in (torch.float32, torch.float64):
            outputs = inputs.outputs(dtype)
            for batch in BATCHES:
                check(method, ours, outputs, batch, expected)
                seconds = averages.median(1000 * _pass(ours, outputs, batch) / len(inputs.z) for _ in range(repeats))
                name = str(dtype).removeprefix("torch.")
                timings.append(Timing(method, name, batch, seconds, naive_seconds, TARGETS.get((method, batch))))
    return timings


def timed_loop(loop: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, float]:
    """Return the naive loop's probabilities [n, K] and its seconds per 1,000 samples."""
    outputs = inputs.outputs(torch.float64)
    loop(*(tensor[:5] for tensor in outputs), inputs.statistics)  # imports and caches of a first call
    start = time.perf_counter()
    probabilities = loop(*outputs, inputs.statistics)
    return probabilities, 1000 * (time.perf_counter() - start) / len(inputs.z)


def check(method: str, ours: FedTHE | BTFL, outputs: list[Tensor], batch: int, expected: Tensor) -> None:
    """Raise RuntimeError, naming the worst sample, unless ours equals `expected` [n, K] to `TOLERANCE`."""
    ours.reset()
    parts = zip(*(tensor.split(batch) for tensor in outputs), strict=True)
    error = (torch.cat([ours.interpolate(*part) for part in parts]).double() - expected).abs().amax(1)  # (n,)
    worst = int(error.argmax())
    if not bool(error[worst] <= TOLERANCE):
        raise RuntimeError(f"{method}, batch {batch}: sample {worst} differs from the naive loop by {error[worst]:.2g}")


def _pass(ours: FedTHE | BTFL, outputs: list[Tensor], batch: int) -> float:
    """Return the seconds that one stream takes in batches; cutting it up is not counted."""
    parts = list(zip(*(tensor.split(batch) for tensor in outputs), strict=True))
    ours.reset()
    start = time.perf_counter()
    for part in parts:
        ours.interpolate(*part)
    return time.perf_counter() - start


def rendered(timings: list[Timing]) -> Table:
    """Return the table for a terminal."""
    grid = Table(title=f"Head interpolation, d = {FEATURES}, K = {CLASSES}, one core: seconds per 1,000 samples")
    for column in ("method", "type", "batch", "ours", "naive", "naive / ours", "target", ""):
        grid.add_column(column, justify="left" if column in ("method", "type") else "right")
    for timing in timings:
        target = "" if timing.target is None else f"≤ {timing.target:g}"
        numbers = (
            f"{timing.seconds:.4f}",
            f"{timing.naive_seconds:.2f}",
            f"{timing.naive_seconds / timing.seconds:,.0f}",
        )
        batch = f"{timing.batch:,}"
        grid.add_row(timing.method, timing.dtype, batch, *numbers, target, mark(timing.seconds, timing.target))
    return grid


def _samples(text: str) -> int:
    if not text.isdecimal() or int(text) < max(BATCHES):
        raise argparse.ArgumentTypeError(
            f"{text!r}: allowed is a whole number, {max(BATCHES)} (the largest batch) or more"
        )
    return int(text)
