"""Time and memory of the server's work in one collaborative round, given random arrays.

The weights W of each rule (FedAMP, pFedGraph, pFedBBN with its distances) and the mixtures (equation 9), for many
clients. Every result is checked on a few clients against the formula in plain numpy before it is timed.

Seconds are on the clock, with processor seconds beside them: their ratio is the number of cores in use. Memory is the
peak of numpy's allocations during the call, results included, above the inputs (`tracemalloc`, in a separate call,
since tracing costs time), without buffers of the linear algebra library; `process_peak_bytes` includes everything.
"""

from __future__ import annotations

import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.strategies.arrays import mix
from fedtta.strategies.distances import off_diagonal_median
from fedtta.strategies.fedamp import fedamp_weights
from fedtta.strategies.pfedbbn import bn_distance, similarity_weights
from fedtta.strategies.pfedgraph import pfedgraph_weights, project_simplex

MIB = 1 << 20
CHANNELS = (64, 128, 256, 512)
#: Arrays that the shared numbers are cut into, as a network's are.
ARRAYS = 40
TOLERANCE = 1e-6
Shared = list[dict[str, NDArray[np.float32]]]
Statistics = list[dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]]


@dataclass(frozen=True)
class Inputs:
    """Replies of a round: shared arrays, the arrays they started from, and statistics by layer."""

    shared: Shared
    start: dict[str, NDArray[np.float32]]
    statistics: Statistics

    @property
    def numbers(self) -> NDArray[np.float64]:
        """Return the first clients' shared numbers as a matrix, for checks."""
        return np.stack([np.concatenate(list(client.values())) for client in self.shared[:CHECKED]]).astype(np.float64)


#: Clients that results are checked on.
CHECKED = 8


@dataclass(frozen=True)
class Cost:
    """Of one step: seconds on the clock and of the processor, and peak bytes above the inputs."""

    step: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def mixing(quick: bool) -> Measured:
    """Measure all steps; the ratios are peak memory over that of the inputs."""
    clients, size, layers = (CHECKED, 1000, 4) if quick else (1000, 50_000, 20)
    inputs = make_inputs(clients, size, layers)
    costs = measure(inputs)
    held = clients * size * 4 / MIB
    ratios = [
        Ratio(
            f"{one.step}, {clients:,} clients", one.peak_bytes / MIB / held, "MiB", one.peak_bytes / MIB, held, "inputs"
        )
        for one in costs
    ]
    channels = sum(len(mean) for mean, _ in inputs.statistics[0].values())
    details = {"clients": clients, "numbers": size, "layers": layers, "channels": channels, "dtype": "float32"}
    details |= {"process_peak_bytes": process_peak(), "costs": [asdict(cost) for cost in costs]}
    return Measured(ratios, details)


def make_inputs(clients: int, numbers: int, layers: int, seed: int = 0) -> Inputs:
    """Draw clients in ten groups: near their group's centre, and less near the start."""
    draw = np.random.default_rng(seed)
    start = draw.standard_normal(numbers, dtype=np.float32)
    centres = start + 0.1 * draw.standard_normal((10, numbers), dtype=np.float32)
    borders = [numbers * i // ARRAYS for i in range(1, ARRAYS)]
    sizes = [CHANNELS[i * len(CHANNELS) // layers] for i in range(layers)]

    def cut(row: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        return {f"array{i}": part for i, part in enumerate(np.split(row, borders))}

    def observe() -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        means = [draw.standard_normal(size, dtype=np.float32) for size in sizes]
        return {f"layer{i}": (mean, np.abs(mean) + 1) for i, mean in enumerate(means)}

    shared = [cut(centres[i % 10] + 0.1 * draw.standard_normal(numbers, dtype=np.float32)) for i in range(clients)]
    return Inputs(shared, cut(start), [observe() for _ in range(clients)])


def measure(inputs: Inputs) -> list[Cost]:
    """Check and time every step.

    Raises
    ------
    RuntimeError
        A result is not what the formula says.
    """
    shared, clients = inputs.shared, len(inputs.shared)
    costs = []

    def timed(step: str, work: Callable[[], Any]) -> Any:
        result, cost = cost_of(step, work)
        costs.append(cost)
        return result

    amp = timed("W of FedAMP", lambda: fedamp_weights(shared))
    graph = timed("W of pFedGraph", lambda: pfedgraph_weights(shared, inputs.start, np.ones(clients)))
    distance = timed("D of pFedBBN", lambda: bn_distance(inputs.statistics))
    weights = timed("W of pFedBBN", lambda: similarity_weights(distance))
    _check_distance(distance, inputs.statistics)
    for name, matrix in (("FedAMP", amp), ("pFedGraph", graph), ("pFedBBN", weights)):
        _agree(f"rows of W of {name}", matrix.sum(1), 1.0)
    _check_weights(inputs)
    mixed = timed("mixtures", lambda: mix(amp, shared))
    for name in (f"array{ARRAYS - 1}", "array0"):
        rows = np.stack([client[name] for client in shared]).astype(np.float64)
        for i in (0, clients - 1):
            _agree(f"mixture of client {i}, {name}", mixed[i][name], (amp[i][:, None] * rows).sum(0))
    return costs


def cost_of(step: str, work: Callable[[], Any]) -> tuple[Any, Cost]:
    """Run `work` twice, once on the clock and once traced; return its result and what it cost."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    del result
    tracemalloc.start()
    try:
        result = work()
        peak = tracemalloc.get_traced_memory()[1]  # tracing began with this call: inputs are not in it
    finally:
        tracemalloc.stop()
    return result, Cost(step, clock, processor, peak)


def process_peak() -> int:
    """Return the most memory, in bytes, that this process has had at any time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _check_distance(distance: NDArray[np.float64], statistics: Statistics) -> None:
    """Compare D with equation 7 pair by pair."""
    for i in range(CHECKED):
        for j in range(CHECKED):
            norms = [
                np.linalg.norm(statistics[i][layer][part].astype(np.float64) - statistics[j][layer][part])
                for layer in statistics[0]
                for part in (0, 1)
            ]
            _agree(f"D of clients {i} and {j}", distance[i, j], np.mean(norms))


def _check_weights(inputs: Inputs) -> None:
    """Compare the two rules over shared arrays with their formulas, on the first clients alone."""
    theta = inputs.numbers  # (CHECKED, P)
    start = np.concatenate(list(inputs.start.values())).astype(np.float64)
    squared = ((theta[:, None] - theta[None]) ** 2).sum(2)
    expected = np.exp(-squared / off_diagonal_median(squared)) / CHECKED
    np.fill_diagonal(expected, 0)
    np.fill_diagonal(expected, 1 - expected.sum(1))
    _agree("W of FedAMP", fedamp_weights(inputs.shared[:CHECKED]), expected)
    moved = (theta - start) / np.linalg.norm(theta - start, axis=1, keepdims=True)
    expected = project_simplex(1 / CHECKED + 0.625 * moved @ moved.T)
    _agree("W of pFedGraph", pfedgraph_weights(inputs.shared[:CHECKED], inputs.start, np.ones(CHECKED)), expected)


def _agree(what: str, ours: Any, expected: Any) -> None:
    """Raise RuntimeError unless all numbers agree to `TOLERANCE`."""
    error = float(np.abs(np.asarray(ours, np.float64) - expected).max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"{what}: differs from the formula by {error:.2g}")
