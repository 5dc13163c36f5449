"""`bbn`: adapting to one batch with BBN over a plain forward and backward pass of the same batch, on one core.

The plain pass is the network's own, in evaluation mode, with the gradient of a cross-entropy for all parameters. It,
BBN, and BBN without random views take turns in one process, so that a change in the machine's load meets all three.
Seconds are on the clock, with the processor's beside them: where other programs want the core, the latter say more.
"""

from __future__ import annotations

import argparse
import statistics as averages
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor, nn

from benchmarks.heads import one_core
from benchmarks.record import RESULTS, mark, provenance, write_json
from models import MODELS, build
from tta.bbn import BBN

CLASSES, SIDE = 10, 32
BATCH = 200  # the paper's
REPEATS = 7
TARGET = 3.5  # BBN over plain
PLAIN = "forward and backward"


@dataclass(frozen=True)
class Timing:
    """Median seconds a batch, on the clock and of the processor; each ratio is the median over the turns.

    `ratio` is the time over that of the plain pass in the same turn, `target` what it may be at most.
    """

    name: str
    seconds: float
    processor_seconds: float
    ratio: float
    processor_ratio: float
    target: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bbn`."""
    known = [name for name, info in MODELS.items() if info.normalisation == "batch"]
    parser.add_argument("--model", choices=known, default="resnet20-bn", help="default: resnet20-bn")
    parser.add_argument("--batch", type=_positive, default=BATCH, help=f"samples a batch (default: {BATCH})")
    parser.add_argument("--repeats", type=_positive, default=REPEATS, help=f"turns (default: {REPEATS})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of bbn.json (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Time, print and write `bbn.json`."""
    with one_core():
        timings = measure(arguments.model, arguments.batch, arguments.repeats)
    console.print(rendered(timings, arguments.model, arguments.batch))
    content = {"unit": "seconds a batch on one core", "model": arguments.model, "batch": arguments.batch}
    content |= {"classes": CLASSES, "image_size": SIDE, "repeats": arguments.repeats, **provenance()}
    content |= {"timings": [asdict(timing) for timing in timings]}
    path = write_json(arguments.out / "bbn.json", content)
    console.print(f"Written: {path}", highlight=False)


def measure(name: str, batch: int = BATCH, repeats: int = REPEATS) -> list[Timing]:
    """Time the plain pass, BBN and BBN without views on `batch` random images, in turns."""
    model = build(name, CLASSES, image_size=SIDE, seed=0)
    x = torch.rand(batch, 3, SIDE, SIDE, generator=Generator().manual_seed(0))
    labels = torch.arange(batch) % CLASSES
    adapters = {"BBN": BBN(model), "BBN without views": BBN(model, augment=_same)}
    tasks: dict[str, Callable[[], object]] = {PLAIN: lambda: plain_pass(model, x, labels)}
    tasks |= {name: lambda adapter=adapter: adapter.predict(x) for name, adapter in adapters.items()}  # type: ignore[misc]
    turns = [[_seconds(task) for task in tasks.values()] for _ in range(repeats + 1)][1:]  # the first turn warms up
    timings = []
    for i, task in enumerate(tasks):
        clock, processor = ([turn[i][which] for turn in turns] for which in (0, 1))
        over_clock, over_processor = ([turn[i][which] / turn[0][which] for turn in turns] for which in (0, 1))
        seconds, processor_seconds = averages.median(clock), averages.median(processor)
        ratio, processor_ratio = averages.median(over_clock), averages.median(over_processor)
        target = TARGET if task == "BBN" else None
        timings.append(Timing(task, seconds, processor_seconds, ratio, processor_ratio, target))
    return timings


def plain_pass(model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor | None]:
    """Return the gradients of the cross-entropy for all parameters, None for those that the output does not use."""
    loss = nn.functional.cross_entropy(model(x), labels)
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def rendered(timings: list[Timing], model: str, batch: int) -> Table:
    """Return the table for a terminal."""
    grid = Table(title=f"BBN on {model}, {batch} images of {SIDE}x{SIDE} a batch, one core")
    for column in ("", "seconds", "over plain", "processor seconds", "over plain", "target", "reached"):
        grid.add_column(column, justify="right" if column else "left")
    for timing in timings:
        target = "" if timing.target is None else f"≤ {timing.target:g}"
        clock = f"{timing.seconds:.3f}", f"{timing.ratio:.2f}"
        processor = f"{timing.processor_seconds:.3f}", f"{timing.processor_ratio:.2f}"
        grid.add_row(timing.name, *clock, *processor, target, mark(timing.ratio, timing.target))
    return grid


def _same(x: Tensor, generator: Generator) -> Tensor:
    return x


def _seconds(task: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `task` takes, on the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    task()
    return time.perf_counter() - clock, time.process_time() - processor


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number, 1 or more")
    return int(text)
