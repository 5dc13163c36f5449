"""FedTHE, BTFL, MEMO and FedTHE+ compared with straightforward loops (`fedtta.benchmarks.speed.naive`).

Head interpolation is timed alone, with features and logits given; tuning on views with the whole network. Both sides
must agree to 1e-6 before anything is timed.
"""

from __future__ import annotations

import copy
import statistics as averages
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Generator, Tensor, nn

from fedtta.benchmarks.speed import naive
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.models import TwoHead, build
from fedtta.models.accelerator import clock
from fedtta.tta.augmix import AugMix
from fedtta.tta.btfl import BTFL, discretise
from fedtta.tta.fedthe import FedTHE
from fedtta.tta.memo import Readout, Tuning, tune_and_predict
from fedtta.tta.statistics import Statistics

FEATURES, CLASSES = 64, 10
BATCHES = (1, 32, 1000)
REPEATS = 7
TOLERANCE = 1e-6
#: (method, batch) → most seconds per 1,000 samples.
HEAD_TARGETS = {("BTFL", 1): 0.1, ("BTFL", 1000): 0.01, ("FedTHE", 1): 1.0, ("FedTHE", 1000): 0.1}
METHODS: dict[str, tuple[type[FedTHE] | type[BTFL], Callable[..., Tensor]]] = {
    "BTFL": (BTFL, naive.btfl),
    "FedTHE": (FedTHE, naive.fedthe),
}
VIEWS, STEPS, LR = 16, 3, 5e-4  # of FedTHE+
#: What is tuned on views → weights of the global head, (samples, generator) → [n].
TUNED: dict[str, Callable[[int, Generator], Tensor]] = {
    "MEMO": lambda samples, draw: torch.ones(samples),
    "FedTHE+": lambda samples, draw: torch.rand(samples, generator=draw),
}
#: Least multiple of the loop's speed, on a CPU and on a GPU.
TUNING_TARGETS = {"cpu": 1.3, "cuda": 20.0}


def loops(quick: bool) -> Measured:
    """Check that both sides agree, then time them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timings = measure_heads(make_inputs(1000), 1 if quick else REPEATS)
    heads = [
        Ratio(
            f"{one.method}, heads alone, {one.dtype}, batch {one.batch}",
            one.naive_seconds / one.seconds,
            "s for 1,000 samples",
            one.seconds,
            one.naive_seconds,
            "a loop with autograd",
            least=True,
        )
        for one in timings
    ]
    views = [tuned(name, 2 if quick else 16, 1 if quick else 5, device) for name in TUNED]
    return Measured([*heads, *views], {"heads": [asdict(one) for one in timings]})


@dataclass(frozen=True)
class Inputs:
    """Features [n, d], logits of both heads [n, K] and statistics that a method gets."""

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
    statistics = Statistics(
        descriptor_local=mine[0].mean(0),
        descriptor_global=everyone[0].mean(0),
        dle_local=(discretise(mine[0]) == 0).double().mean(0),
        dle_global=(discretise(everyone[0]) == 0).double().mean(0),
        entropy_local=_mean_entropy(mine[2]),
        entropy_global=_mean_entropy(mine[1]),
    )
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    inside = torch.rand(samples, generator=draw) < 0.5
    return Inputs(*observe(torch.where(inside, labels % 3, labels)), statistics)


def _mean_entropy(logits: Tensor) -> float:
    logs = logits.log_softmax(1)
    return float(-(logs.exp() * logs).sum(1).mean())


def measure_heads(inputs: Inputs, repeats: int = REPEATS) -> list[Timing]:
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
                check_heads(method, ours, outputs, batch, expected)
                seconds = averages.median(1000 * _pass(ours, outputs, batch) / len(inputs.z) for _ in range(repeats))
                name = str(dtype).removeprefix("torch.")
                timings.append(Timing(method, name, batch, seconds, naive_seconds, HEAD_TARGETS.get((method, batch))))
    return timings


def timed_loop(loop: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, float]:
    """Return the naive loop's probabilities [n, K] and its seconds per 1,000 samples."""
    outputs = inputs.outputs(torch.float64)
    loop(*(tensor[:5] for tensor in outputs), inputs.statistics)  # imports and caches of a first call
    start = time.perf_counter()
    probabilities = loop(*outputs, inputs.statistics)
    return probabilities, 1000 * (time.perf_counter() - start) / len(inputs.z)


def check_heads(method: str, ours: FedTHE | BTFL, outputs: list[Tensor], batch: int, expected: Tensor) -> None:
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


def tuned(name: str, samples: int, repeats: int, device: torch.device) -> Ratio:
    """Compare tuning on each sample's views, with one head (MEMO) or with two (FedTHE+), with the loop.

    Raises
    ------
    RuntimeError
        The two sides differ.
    """
    draw = Generator().manual_seed(0)
    model = build("cnn", CLASSES, seed=0).to(device).to(memory_format=torch.channels_last)
    images = torch.rand(samples, 3, 32, 32, generator=draw).to(device).contiguous(memory_format=torch.channels_last)
    weights = TUNED[name](samples, draw).to(device)
    check(name, model, images[:2], weights[:2])
    sides = [ours(model, images, weights), loop(model, images, weights)]
    turns = [[timed(side, device) for side in sides] for _ in range(repeats)]
    best, naive_best = (averages.median(turn[side] for turn in turns) / samples * 1000 for side in (0, 1))
    ratio = averages.median(turn[1] / turn[0] for turn in turns)
    title = f"{name}, {VIEWS} views, {STEPS} steps, {device.type}"
    than = "a loop over samples and views"
    return Ratio(title, ratio, "ms a sample", best, naive_best, than, TUNING_TARGETS[device.type], least=True)


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
    start = clock(device)
    work()
    return clock(device) - start
