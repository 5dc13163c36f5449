"""Cost of every adapter at test time: processor time and passes through the network, side by side in one run.

Each adapter processes random images on a random network, with everything that training would have provided:
statistics, pooled label statistics, rates and memorised samples of a synthetic client. Costs depend on shapes, not on
accuracy; only EATA and ROID, which skip samples, do more or less as the network is more or less confident.
"""

from __future__ import annotations

import statistics as averages
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from fedtta.benchmarks.clients import summarize
from fedtta.benchmarks.papers import values
from fedtta.benchmarks.speed.measurement import Measured, Ratio, clock_and_processor
from fedtta.client.adapters import AdapterContext, chooses, make_adapter
from fedtta.client.device import Device
from fedtta.client.evaluation import Labelled, Neighbours, gains_of, memorize
from fedtta.client.state import MemoryState, NetworkStore, private_folder
from fedtta.client.statistics import ON_REQUEST, join_statistics
from fedtta.data import Federation, Images
from fedtta.messages.requests import AdapterRow
from fedtta.models import MODELS, build
from fedtta.models.accelerator import clock
from fedtta.settings import Settings, SettingsError, assignments
from fedtta.tta import Adapter, Statistics
from fedtta.tta.atp import zero_rates
from fedtta.tta.bbn import BBN
from fedtta.tta.registry import ADAPTERS

CPU = torch.device("cpu")
CLASSES, SIDE = 10, 32
SAMPLES, BATCH, REPEATS = 200, 20, 3
HELD = 500  # images of the synthetic client, 60 % of which it trains on and memorises
RATE = 0.01  # of every module


@dataclass(frozen=True)
class Setup:
    """Network and stream of a measurement."""

    model: str
    model_options: str
    samples: int
    batch: int
    image_size: int = SIDE
    classes: int = CLASSES
    memorised: int = HELD * 6 // 10

    @property
    def batchnorm(self) -> bool:
        """Tell whether methods that adapt BatchNorm fit."""
        return MODELS[self.model].normalisation_with(assignments(self.model_options, "model-options")) == "batch"


@dataclass(frozen=True)
class Cost:
    """Of one sample: medians over the turns, and `ratio`, processor time over that of `none` in the same turn.

    `forward` and `backward` are how many images went through the encoder for each image that was predicted.
    """

    milliseconds: float
    processor_milliseconds: float
    ratio: float
    forward: float
    backward: float


def random_images(count: int, device: torch.device = CPU, seed: int = 1) -> Tensor:
    """Return random images [count, 3, S, S] in the memory format that runs use, channels-last."""
    x = torch.rand(count, 3, SIDE, SIDE, generator=Generator().manual_seed(seed))
    return x.to(device).contiguous(memory_format=torch.channels_last)


def make_setup(model: str, options: str | None, samples: int, batch: int) -> Setup:
    """Return the setup; without `options`, a network with a choice of normalization gets BatchNorm."""
    choice = MODELS[model].normalisation_option
    return Setup(model, f"{choice}=batch" * bool(choice) if options is None else options, samples, batch)


def measure(setup: Setup, repeats: int = REPEATS, only: Collection[str] = ADAPTERS) -> dict[str, Cost]:
    """Return adapter → cost for all (or `only`) that fit the network, in turns; a first batch of each warms up.

    `none`, which the others are compared with, is always among them.

    Raises
    ------
    SettingsError
        The network's options do not fit.
    """
    x = random_images(setup.samples)
    wanted = {name: info for name, info in ADAPTERS.items() if name in {"none", *only}}
    fitting = [name for name, info in wanted.items() if setup.batchnorm or "batchnorm" not in info.needs]
    needs = {need for name in fitting for need in ADAPTERS[name].needs}
    plain = Client.of(setup, False, needs)
    turning = Client.of(setup, True, needs) if "rotation_head" in needs else plain
    clients = {name: turning if "rotation_head" in ADAPTERS[name].needs else plain for name in fitting}
    passes = {name: count_passes(one, name, x, setup.batch) for name, one in clients.items()}
    ready = {name: one.adapter(name) for name, one in clients.items()}
    for adapter in ready.values():
        adapter.predict(x[: setup.batch])
    turns = [{name: timed(adapter, x, setup.batch) for name, adapter in ready.items()} for _ in range(repeats)]
    costs = {}
    for name in ready:
        clock, processor = ([1000 * turn[name][which] / len(x) for turn in turns] for which in (0, 1))
        ratio = averages.median(turn[name][1] / turn["none"][1] for turn in turns)
        costs[name] = Cost(averages.median(clock), averages.median(processor), ratio, *passes[name])
    return costs


@dataclass(frozen=True)
class Client:
    """A synthetic client after training: random images, a random network, and what adapters may need."""

    device: Device
    statistics: Statistics
    rates: Mapping[str, Mapping[str, float]]
    neighbours: Neighbours

    @classmethod
    def of(
        cls, setup: Setup, rotation_head: bool, needs: Collection[str] = ON_REQUEST, where: torch.device = CPU
    ) -> Client:
        """Make one with the pooled statistics that are needed; SettingsError if the network's options do not fit."""
        draw = np.random.default_rng(0)
        held = setup.memorised * 10 // 6
        pixels = draw.integers(256, size=(held, 3, SIDE, SIDE), dtype=np.uint8)
        labels = np.arange(held, dtype=np.int64) % CLASSES
        world = Federation.create(Images("random", pixels, labels, tuple(map(str, range(CLASSES)))), 1, "iid")
        options: dict[str, Any] = dict(assignments(setup.model_options, "model-options"))
        options |= {"image_size": SIDE, "rotation_head": rotation_head, "seed": 1}
        try:
            model = build(setup.model, CLASSES, **options).to(where).to(memory_format=torch.channels_last)
        except ValueError as error:
            raise SettingsError(f"model-options = {setup.model_options!r}: {error}") from error
        settings = Settings(dataset="cifar10", clients=1, adapt_batch_size=setup.batch, device=where.type)
        networks = NetworkStore(private_folder(settings) / "networks")
        memory = MemoryState(), MemoryState()
        device = Device(world, 0, model, *memory, settings, where, "both", networks)
        arrays = {name: value.numpy(force=True).copy() for name, value in model.global_state().items()}
        means = summarize(device, 1, "cost", arrays, [need for need in ON_REQUEST if need in needs]).statistics
        private = device.state.load("cost", 1)
        assert private is not None, "statistics have just been stored"
        statistics = join_statistics(private, means, 1, device.device)
        rates = {"all": dict.fromkeys(zero_rates(model), RATE)}
        return cls(device, statistics, rates, memorize(model, world, 0, settings, device.device))

    def adapter(self, name: str) -> Adapter:
        """Return an adapter with default options."""
        row, gains = AdapterRow(name, name), None
        known = self.device.settings, self.statistics, self.rates, self.neighbours
        context = AdapterContext(self.device.model, *known)
        if chooses(row):
            samples = Labelled(self.neighbours.x, self.neighbours.y, True)
            gains = gains_of(row, context, samples)
        return make_adapter(row, context, gains)


def count_passes(client: Client, name: str, x: Tensor, batch: int) -> tuple[float, float]:
    """Return how many images go through the encoder for each image predicted: forward and backward.

    Adapters copy the network, so the hook is registered before they are made.
    """
    seen = [0, 0]

    def note(encoder: nn.Module, inputs: tuple[Tensor, ...], z: Tensor) -> None:
        seen[0] += len(z)
        if z.requires_grad:
            z.register_hook(count_backward)

    def count_backward(gradient: Tensor) -> None:
        seen[1] += len(gradient)

    hook = client.device.model.encoder.register_forward_hook(note)
    try:
        adapter = client.adapter(name)
        seen[:] = 0, 0
        timed(adapter, x, batch)
    finally:
        hook.remove()
    return seen[0] / len(x), seen[1] / len(x)


def timed(adapter: Adapter, x: Tensor, batch: int) -> tuple[float, float]:
    """Return the seconds that a stream takes from `reset` on, on the clock and of the processor."""
    adapter.reset()
    start, processor = clock(x.device), time.process_time()
    for part in x.split(batch):
        adapter.predict(part)
    return clock(x.device) - start, time.process_time() - processor


#: Adapters with dozens of passes per sample; not measured in batches of 512.
SLOW = frozenset({"memo", "ttt", "fedthe_plus"})
#: (adapter, batch) → largest multiple of the bare forward pass.
TARGETS = {("btfl", 512): 1.15, ("fedthe", 512): 1.5, ("btfl", 1): 2.0, ("fedthe", 1): 4.0}
#: Batch → samples of the stream.
STREAMS = {1: 64, 32: 256, 512: 2048}
BARE = "the bare forward pass"


def adapters(quick: bool) -> Measured:
    """Measure every adapter that fits the papers' CNN, in batches of 1, 32 and 512; ratios are of processor time."""
    found = []
    for batch, samples in STREAMS.items():
        for slow in (False, True) if batch <= 32 else (False,):
            names = [name for name in ADAPTERS if (name in SLOW) == slow]
            length = min(samples, 2 if quick else 32) if slow else (batch if quick else samples)
            costs = measure(make_setup("cnn", "", length, batch), 1 if quick else 5, names)
            bare = costs.pop("none").processor_milliseconds
            for name, cost in costs.items():
                ours, target = cost.processor_milliseconds, TARGETS.get((name, batch))
                found.append(Ratio(f"{name}, batch {batch}", cost.ratio, "ms a sample", ours, bare, BARE, target))
    return Measured(found)


def methods(quick: bool) -> Measured:
    """Measure all adapters on the papers' CNN with BatchNorm, which all of them fit."""
    setup, repeats = make_setup("cnn", None, BATCH if quick else SAMPLES, BATCH), 1 if quick else REPEATS
    costs = measure(setup, repeats, {"btfl"} if quick else ADAPTERS)
    bare = costs["none"].processor_milliseconds
    ratios = [
        Ratio(name, cost.ratio, "ms a sample", cost.processor_milliseconds, bare, BARE) for name, cost in costs.items()
    ]
    details = {name: asdict(cost) for name, cost in costs.items()}
    return Measured(ratios, {**asdict(setup), "repeats": repeats, "adapters": details})


#: Adapter → row of BTFL's Table 3; TTT and MEMO start from the fine-tuned network there, at the same cost.
TABLE_3 = {"ttt": "ttt[base=personalised]", "memo": "memo[base=personalised]", "fedthe": "fedthe", "btfl": "btfl"}
NETWORKS = ("cnn", "resnet20-gn", "cct-4/3x2")


def seconds(quick: bool) -> Measured:
    """Measure 1,000 samples one at a time on three networks, as multiples of BTFL (BTFL, Table 3).

    The paper measured on a GPU, so only multiples are comparable.
    """
    samples, repeats = (1, 1) if quick else (20, 2)
    ratios, details = [], {}
    for network in NETWORKS[: 1 if quick else None]:
        costs = measure(make_setup(network, "", samples, 1), repeats, TABLE_3)
        ours = {name: costs[name].processor_milliseconds for name in TABLE_3}  # = seconds for 1,000 samples
        paper = values("btfl", "3", model=network)
        for name, row in TABLE_3.items():
            than = f"BTFL; the paper: {paper[row] / paper['btfl']:.1f} times BTFL"
            what, unit = f"{name}, {network}", "s for 1,000 samples"
            ratios.append(Ratio(what, ours[name] / ours["btfl"], unit, ours[name], ours["btfl"], than))
        details[network] = {name: asdict(cost) for name, cost in costs.items()}
    return Measured(ratios, {"samples": samples, "repeats": repeats, "costs": details})


BBN_TARGET = 3.5  # BBN over the plain pass
PLAIN = "a forward and backward pass"


@dataclass(frozen=True)
class Timing:
    """Median seconds of BBN on a batch, on the clock and of the processor; each ratio is the median over the turns.

    `ratio` is the time over that of the plain pass in the same turn, `target` what it may be at most.
    """

    name: str
    seconds: float
    processor_seconds: float
    ratio: float
    processor_ratio: float
    target: float | None


def bbn(quick: bool) -> Measured:
    """Compare BBN, with and without random views, with a plain forward and backward pass of the batch.

    The plain pass is the network's own, in evaluation mode, with the gradient of a cross-entropy for all parameters.
    The three take turns in one process, so that a change in load affects them all.
    """
    model, batch, repeats = ("shallow-cnn", 4, 1) if quick else ("resnet20-bn", 200, 7)  # the paper's batch
    plain, *others = timings = bbn_timings(model, batch, repeats)
    ratios = [
        Ratio(f"{one.name}, batch {batch}", one.ratio, "s a batch", one.seconds, plain.seconds, PLAIN, one.target)
        for one in others
    ]
    details = {"model": model, "batch": batch, "classes": CLASSES, "image_size": SIDE, "repeats": repeats}
    return Measured(ratios, {**details, "timings": [asdict(one) for one in timings]})


def bbn_timings(name: str, batch: int, repeats: int) -> list[Timing]:
    """Time the plain pass, BBN and BBN without views on `batch` random images, in turns."""
    model = build(name, CLASSES, image_size=SIDE, seed=0).to(memory_format=torch.channels_last)
    x = random_images(batch, seed=0)
    labels = torch.arange(batch) % CLASSES
    adapters = {"BBN": BBN(model), "BBN without views": BBN(model, augment=_same)}
    tasks: dict[str, Callable[[], object]] = {PLAIN: lambda: plain_pass(model, x, labels)}
    tasks |= {name: lambda adapter=adapter: adapter.predict(x) for name, adapter in adapters.items()}  # type: ignore[misc]
    _, *turns = [[clock_and_processor(task) for task in tasks.values()] for _ in range(repeats + 1)]  # _ warms up
    timings = []
    for i, task in enumerate(tasks):
        clock, processor = ([turn[i][which] for turn in turns] for which in (0, 1))
        over_clock, over_processor = ([turn[i][which] / turn[0][which] for turn in turns] for which in (0, 1))
        seconds, processor_seconds = averages.median(clock), averages.median(processor)
        ratio, processor_ratio = averages.median(over_clock), averages.median(over_processor)
        target = BBN_TARGET if task == "BBN" else None
        timings.append(Timing(task, seconds, processor_seconds, ratio, processor_ratio, target))
    return timings


def plain_pass(model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor | None]:
    """Return the gradients of the cross-entropy for all parameters, None for those that the output does not use."""
    loss = nn.functional.cross_entropy(model(x), labels)
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def _same(x: Tensor, generator: Generator) -> Tensor:
    return x
