"""BBN on one batch over a plain forward and backward pass of the same batch, on one core.

The plain pass is the network's own, in evaluation mode, with the gradient of a cross-entropy for all parameters. It,
BBN, and BBN without random views take turns in one process, so that a change in load affects all three. Seconds are on
the clock, with processor seconds beside them.
"""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Generator, Tensor, nn

from benchmarks.speed.measurement import Measured, Ratio, clock_and_processor
from models import build
from tta.bbn import BBN

CLASSES, SIDE = 10, 32
BATCH = 200  # the paper's
REPEATS = 7
TARGET = 3.5  # BBN over plain
PLAIN = "a forward and backward pass"


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


def bbn(quick: bool) -> Measured:
    """Compare BBN, with and without random views, with a plain forward and backward pass."""
    model, batch, repeats = ("shallow-cnn", 4, 1) if quick else ("resnet20-bn", BATCH, REPEATS)
    plain, *others = timings = measure(model, batch, repeats)
    ratios = [
        Ratio(f"{one.name}, batch {batch}", one.ratio, "s a batch", one.seconds, plain.seconds, PLAIN, one.target)
        for one in others
    ]
    details = {"model": model, "batch": batch, "classes": CLASSES, "image_size": SIDE, "repeats": repeats}
    return Measured(ratios, {**details, "timings": [asdict(one) for one in timings]})


def measure(name: str, batch: int = BATCH, repeats: int = REPEATS) -> list[Timing]:
    """Time the plain pass, BBN and BBN without views on `batch` random images, in turns."""
    model = build(name, CLASSES, image_size=SIDE, seed=0)
    x = torch.rand(batch, 3, SIDE, SIDE, generator=Generator().manual_seed(0))
    labels = torch.arange(batch) % CLASSES
    adapters = {"BBN": BBN(model), "BBN without views": BBN(model, augment=_same)}
    tasks: dict[str, Callable[[], object]] = {PLAIN: lambda: plain_pass(model, x, labels)}
    tasks |= {name: lambda adapter=adapter: adapter.predict(x) for name, adapter in adapters.items()}  # type: ignore[misc]
    turns = [[clock_and_processor(task) for task in tasks.values()] for _ in range(repeats + 1)][
        1:
    ]  # the first warms up
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


def _same(x: Tensor, generator: Generator) -> Tensor:
    return x
