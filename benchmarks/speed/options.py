"""Options of a training step (memory format, bfloat16, fused SGD, compilation, CUDA graphs) over the plain step."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.sgd import sgd

from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.client.algorithms.training import autocast
from fedtta.models import build
from fedtta.models.accelerator import clock
from fedtta.models.cct import DropResidual

NETWORKS = ("cnn", "resnet20-gn", "resnet20-bn")
BATCH, CLASSES = 32, 10
RULE: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 5e-4,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
}


@dataclass(frozen=True)
class Options:
    """Options of a step."""

    channels_last: bool = False
    half: bool = False
    fused: bool = False
    compiled: bool = False
    graph: bool = False  # a CUDA graph of the whole step, replayed


PLAIN = Options()
WAYS = {
    "channels-last": Options(channels_last=True),
    "bfloat16": Options(half=True),
    "fused SGD": Options(fused=True),
    "channels-last, bfloat16": Options(channels_last=True, half=True),
    "all three": Options(channels_last=True, half=True, fused=True),
    "torch.compile": Options(compiled=True),
    "torch.compile, channels-last, bfloat16": Options(channels_last=True, half=True, compiled=True),
}
#: Options of a GPU only.
GPU_WAYS = {
    "CUDA graph": Options(graph=True),
    "CUDA graph, channels-last, bfloat16": Options(channels_last=True, half=True, graph=True),
}
WARM = 3  # steps before a graph is captured


def options(quick: bool) -> Measured:
    """Time each option and the plain step in turns; the ratio is of speeds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    repeats, steps = (1, 1) if quick else (7, 10)
    ways = WAYS | (GPU_WAYS if device.type == "cuda" else {})
    backend = "aot_eager" if quick else "inductor"  # the latter calls a C++ compiler for half a minute
    found = []
    for network in NETWORKS[: 1 if quick else None]:
        plain = TrainingStep(network, PLAIN, device)
        for title, way in ways.items():
            faster = TrainingStep(network, way, device, backend)
            turns = [(timed(plain, steps, device), timed(faster, steps, device)) for _ in range(repeats)]
            found.append(compared(f"{network}, {title}, {device.type}", turns))
    return Measured(found)


def compared(what: str, turns: Sequence[tuple[float, float]]) -> Ratio:
    """Return the speed over that of the plain step; a turn is the milliseconds of the plain step and of the other."""
    slow, quicker = (averages.median(turn[side] for turn in turns) for side in (0, 1))
    ratio = averages.median(turn[0] / turn[1] for turn in turns)
    return Ratio(what, ratio, "ms a step", quicker, slow, "contiguous, float32", least=True)


class TrainingStep:
    """Training steps on one fixed batch; the first is made on construction.

    Parameters
    ----------
    name : str
        Of the network.
    way : Options
    device : torch.device
        A CUDA device, if `way.graph`.
    backend : str
        Of `torch.compile`, if `way.compiled`.
    drop : bool
        Whether dropout and stochastic depth take part.
    """

    def __init__(
        self, name: str, way: Options, device: torch.device, backend: str = "inductor", drop: bool = True
    ) -> None:
        layout = torch.channels_last if way.channels_last else torch.contiguous_format
        draw = torch.Generator().manual_seed(0)
        self.way, self.device = way, device
        self.model = build(name, CLASSES, seed=0).to(device).to(memory_format=layout).train()
        for module in self.model.modules():
            if not drop and isinstance(module, nn.Dropout | DropResidual):
                module.eval()
        self.x = torch.rand(BATCH, 3, 32, 32, generator=draw).to(device).contiguous(memory_format=layout)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=draw).to(device)
        self.values: list[Tensor] = list(self.model.shared_parameters().values())
        self._velocity: list[Tensor | None] = [None] * len(self.values)
        self._forward: Callable[[Tensor], Tensor] = (
            torch.compile(self.model, backend=backend) if way.compiled else self.model
        )
        self._replay = captured(self._step) if way.graph else self._step
        self()

    def __call__(self) -> None:
        """Make a step."""
        self._replay()

    def _step(self) -> None:
        with autocast(self.device, self.way.half):
            logits = self._forward(self.x)
        for value in self.values:
            value.grad = None
        cross_entropy(logits.float(), self.labels).backward()
        gradients = [value.grad for value in self.values if value.grad is not None]
        with torch.no_grad():
            sgd(self.values, gradients, self._velocity, **RULE, foreach=False, fused=self.way.fused)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step as a CUDA graph that is replayed with one launch."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the milliseconds of a step, on a GPU until all have ended there."""
    start = clock(device)
    for _ in range(steps):
        step()
    return (clock(device) - start) / steps * 1000
