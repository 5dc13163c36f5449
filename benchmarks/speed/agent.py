"""The resident agent over a bare forward pass: latency, throughput, 50 simultaneous streams, memory.

Real agents (`python -m fedtta.client.agent`) on Unix sockets, one after another, each starting from a state directory
with the papers' CNN (`fedtta.benchmarks.speed.served`). The bare forward pass of the same images in this process
alternates with the requests, so that a change in load affects both. All run on the CPU with one torch thread each and
the agent's default settings. Memory depends on the installed torch build.
"""

from __future__ import annotations

import copy
import statistics as averages
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.benchmarks.speed.served import CPU, SETTINGS, fabricate, running, sample_images
from fedtta.benchmarks.speed.streams import Load, batches, many_streams, one_stream, requests, unary
from fedtta.client.agent.live import as_floats, checked
from fedtta.client.serving import Served
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.server.events import RunError
from fedtta.simulation.deployment import sockets_folder

BATCHES = (1, 32)
STREAMS = 50
SAMPLES = 3200
REPEATS = 5
#: Adapter, and whether its guard is on.
CASES = (("none", False), ("fedthe", True), ("fedthe", False), ("btfl", True), ("btfl", False))
WARM_UP = 3  # requests of each size before anything is timed
IMPORTS = "import torch, grpc; print(open('/proc/self/status').read())"


@dataclass(frozen=True)
class Latency:
    """Requests of one batch size, one after another, and the same in one stream.

    `forward_p50_ms` is the bare forward pass, and `over_forward` the median over the turns of the requests' seconds
    over its seconds; both rates are samples a second.
    """

    batch: int
    requests: int
    p50_ms: float
    p99_ms: float
    per_second: float
    forward_p50_ms: float
    over_forward: float
    stream_per_second: float


@dataclass(frozen=True)
class Case:
    """One agent: its resident memory in MiB when it has started and at the end, and how fast it was."""

    adapter: str
    guard: bool
    start_mib: float
    end_mib: float
    latencies: list[Latency]
    load: Load


def agent(quick: bool) -> Measured:
    """Measure every case; ratios are seconds of requests over those of the bare forward pass.

    Raises
    ------
    RunError
        As `measure`.
    """
    samples, repeats = (max(STREAMS, *BATCHES), 1) if quick else (SAMPLES, REPEATS)
    torch.set_num_threads(1)  # the command restores the number
    served, pixels = fabricate(), sample_images(samples)
    with sockets_folder() as folder:
        cases = [
            measure(folder / str(number), served, *case, pixels, repeats)
            for number, case in enumerate(CASES[:1] if quick else CASES)
        ]
    details = {"model": SETTINGS.model, "image_shape": list(served.shape), "classes": len(served.classes)}
    details |= {"samples": samples, "repeats": repeats, "imports_mib": imported()}
    details |= {"torch_build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"}
    return Measured(ratios(cases), {**details, "cases": [asdict(case) for case in cases]})


def ratios(cases: Sequence[Case]) -> list[Ratio]:
    """Return the seconds of requests over those of the bare forward pass."""
    return [
        Ratio(
            f"{case.adapter}, guard {_on(case.guard)}, batch {one.batch}",
            one.over_forward,
            "ms",
            one.p50_ms,
            one.forward_p50_ms,
            "the bare forward pass; medians",
        )
        for case in cases
        for one in case.latencies
    ]


def measure(
    folder: Path,
    served: Served,
    adapter: str,
    guard: bool,
    pixels: NDArray[np.uint8],
    repeats: int,
    device: torch.device = CPU,
) -> Case:
    """Start an agent in a new folder, measure all of it, and stop it; it and the bare pass compute on `device`.

    Raises
    ------
    RunError
        It did not start, answer or stop as it should, its guard held the adapter back, or streams at once lost,
        reordered or were refused something.
    """
    try:
        with running(folder, served, {"adapter": adapter, "guard": guard, "device": device.type}) as (address, pid):
            moved = replace(served, network=copy.deepcopy(served.network).to(device))
            before = resident(pid)
            with grpc.insecure_channel(address) as channel:
                stub = agent_pb2_grpc.PredictorStub(channel)
                latencies = [latency(stub, moved, pixels, batch, repeats) for batch in BATCHES]
                load = loaded(stub, address, pixels)
            return Case(adapter, guard, before, resident(pid), latencies, load)
    except (grpc.RpcError, RunError) as error:
        problem = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else error
        raise RunError(f"{adapter}, guard {_on(guard)}: {problem}") from error


def latency(
    stub: agent_pb2_grpc.PredictorStub, served: Served, pixels: NDArray[np.uint8], batch: int, repeats: int
) -> Latency:
    """Time requests of one batch size and the forward pass, in turns, after some that warm up; then streams."""
    parts = batches(pixels, batch)
    asked = requests(parts)
    unary(stub, asked[:WARM_UP])
    forward(served, parts[:WARM_UP])
    turns = [(unary(stub, asked), forward(served, parts)) for _ in range(repeats)]
    streamed = averages.median(one_stream(stub, asked) for _ in range(repeats))
    ours, bare = ([second for turn in turns for second in turn[which]] for which in (0, 1))
    p50, p99 = (1000 * float(value) for value in np.percentile(ours, (50, 99)))
    ratio = averages.median(sum(seconds) / sum(floor) for seconds, floor in turns)
    rates = batch * len(ours) / sum(ours), batch * len(asked) / streamed
    return Latency(batch, len(ours), p50, p99, rates[0], 1000 * averages.median(bare), ratio, rates[1])


@torch.no_grad()
def forward(served: Served, parts: Sequence[NDArray[np.uint8]]) -> list[float]:
    """Return the seconds of the network's forward pass for each batch; making the tensors is not counted."""
    seconds = []
    for part in parts:
        x = served.images(as_floats(checked(part, served.shape)))
        start = time.perf_counter()
        served.network(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def loaded(stub: agent_pb2_grpc.PredictorStub, address: str, pixels: NDArray[np.uint8]) -> Load:
    """Send samples in many streams at once.

    Raises
    ------
    RunError
        Replies were lost, reordered or refusals, or the agent has not seen every sample once.
    """
    before = stub.Status(pb.StatusRequest()).samples
    load = many_streams(address, pixels, STREAMS)
    seen = stub.Status(pb.StatusRequest()).samples - before
    if load.trouble or seen != len(pixels):
        problem = load.trouble or "nothing lost or reordered"
        raise RunError(f"{STREAMS} streams: {problem}; the agent has seen {seen} of {len(pixels)} samples")
    return load


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return _resident(Path(f"/proc/{pid}/status").read_text(encoding="ascii"))


def imported() -> float:
    """Return the resident memory in MiB of a Python process that has imported torch and gRPC, and nothing else."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    return _resident(done.stdout)


def _resident(status: str) -> float:
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def _on(guard: bool) -> str:
    return "on" if guard else "off"
