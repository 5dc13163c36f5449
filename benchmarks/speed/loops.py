"""(b) FedTHE, BTFL, MEMO and FedTHE+ beside the loops that one would first write (`benchmarks.speed.naive`)."""

from __future__ import annotations

import copy
import statistics as averages
import time
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from benchmarks import heads
from benchmarks.speed import naive
from benchmarks.speed.figure import Figure
from models import TwoHead, build
from tta.augmix import AugMix
from tta.memo import Readout, Tuning, tune_and_predict

VIEWS, STEPS, LR = 16, 3, 5e-4  # of FedTHE+
TOLERANCE = 1e-6
#: What ours is at least, as a multiple of the loop's speed, on a CPU and on a GPU.
TARGETS = {"cpu": 1.3, "cuda": 20.0}


def loops(quick: bool) -> list[Figure]:
    """Check that both sides agree, then time them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [*interpolation(1000), *tuning(2 if quick else 16, 1 if quick else 5, device)]


def interpolation(samples: int) -> list[Figure]:
    """Compare head interpolation alone, features and logits given (the benchmark `heads`)."""
    timings = heads.measure(heads.make_inputs(samples), 3)
    return [
        Figure(
            f"{one.method}, heads alone, batch {one.batch}",
            one.naive_seconds / one.seconds,
            "s for 1,000 samples",
            one.seconds,
            one.naive_seconds,
            "a loop with autograd",
            least=True,
        )
        for one in timings
        if one.dtype == "float32"
    ]


def tuning(samples: int, repeats: int, device: torch.device) -> list[Figure]:
    """Compare tuning on each sample's views, with one head (MEMO) and with two (FedTHE+).

    Raises
    ------
    RuntimeError
        The two sides differ.
    """
    draw = Generator().manual_seed(0)
    model = build("cnn", heads.CLASSES, seed=0).to(device)
    images = torch.rand(samples, 3, 32, 32, generator=draw).to(device)
    found = []
    for name, weights in (("MEMO", torch.ones(samples)), ("FedTHE+", torch.rand(samples, generator=draw))):
        check(name, model, images[:2], weights[:2].to(device))
        sides = [ours(model, images, weights.to(device)), loop(model, images, weights.to(device))]
        turns = [[timed(side, device) for side in sides] for _ in range(repeats)]
        best, naive_best = (averages.median(turn[side] for turn in turns) / samples * 1000 for side in (0, 1))
        ratio = averages.median(turn[1] / turn[0] for turn in turns)
        title = f"{name}, {VIEWS} views, {STEPS} steps, {device.type}"
        than = "a loop over samples and views"
        found.append(Figure(title, ratio, "ms a sample", best, naive_best, than, TARGETS[device.type], least=True))
    return found


def ours(model: TwoHead, images: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    """Return what tunes and predicts as the adapters do."""
    readout, how = Readout(model, "mix"), Tuning(VIEWS, STEPS, LR)
    return lambda: tune_and_predict(readout, images, weights, 0, how)[0].softmax(1)


def loop(model: TwoHead, images: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    """Return the naive loop, with the same views, made one by one."""
    how, augment = Tuning(VIEWS, STEPS, LR), AugMix()
    draws: dict[tuple[int, int], Tensor] = {}

    def view(i: int, step: int, v: int) -> Tensor:
        if (i, step) not in draws:
            draws[i, step] = augment.draw(how.generator(i, step), VIEWS)
        return augment.apply(images[i : i + 1], draws[i, step][v : v + 1])[0]

    return lambda: naive.tune(model, images, weights, VIEWS, STEPS, LR, view)


def check(name: str, model: TwoHead, images: Tensor, weights: Tensor) -> None:
    """Raise RuntimeError unless both sides predict alike in float64."""
    exact = copy.deepcopy(model).double()
    one, other = (side(exact, images.double(), weights.double())() for side in (ours, loop))
    if not float((one - other).detach().abs().max()) <= TOLERANCE:
        raise RuntimeError(f"{name}: ours and the naive loop differ by {float((one - other).abs().max()):.2g}")


def timed(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the seconds that a call takes, on a GPU until it has ended there."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
