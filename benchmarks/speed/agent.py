"""`agent`: what the resident agent adds to a forward pass: latency, predictions a second, many streams at once, memory.

Real agents (`python -m client.agent`) on Unix sockets, one after another, each starting from a state directory with the
papers' CNN in it (`benchmarks.served`). The bare forward pass of the same pictures in this process takes turns with the
requests, so that a change in the machine's load meets both. All on the CPU, one torch thread each, and otherwise as an
agent is by default: it saves what it learns meanwhile. Memory is that of the torch build that is installed: a CPU
build's where this runs with one.
"""

from __future__ import annotations

import argparse
import statistics as averages
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, provenance, write_json
from benchmarks.served import SETTINGS, fabricate, pictures, running
from benchmarks.streams import Load, batches, many_streams, one_stream, requests, unary
from client.agent import agent_pb2 as pb
from client.agent import agent_pb2_grpc
from client.agent.live import images
from client.agent.serving import Served
from server.errors import RunError
from simulation.agents import sockets_folder

BATCHES = (1, 32)
STREAMS = 50
SAMPLES = 3200
REPEATS = 5
#: Adapter, and whether the guard watches it; in none there is nothing to watch.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `agent`."""
    text = f"in each turn of each batch size, and dealt to the streams (default: {SAMPLES})"
    parser.add_argument("--samples", type=_samples, default=SAMPLES, help=text)
    parser.add_argument("--repeats", type=_positive, default=REPEATS, help=f"turns (default: {REPEATS})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of agent.json (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Start agents, measure, print and write `agent.json`.

    Raises
    ------
    RunError
        As `measure`; nothing is written then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        served, pixels = fabricate(), pictures(arguments.samples)
        with sockets_folder() as folder:
            cases = [
                measure(folder / str(number), served, *case, pixels, arguments.repeats)
                for number, case in enumerate(CASES)
            ]
    finally:
        torch.set_num_threads(threads)
    build, imports = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU", imported()
    console.print(rendered(cases))
    console.print(rendered_load(cases, build, imports))
    content = {"model": SETTINGS.model, "image_shape": served.shape, "classes": len(served.classes)}
    content |= {"samples": arguments.samples, "repeats": arguments.repeats, "torch_build": build, **provenance()}
    content |= {"imports_mib": imports, "cases": [asdict(case) for case in cases]}
    path = write_json(arguments.out / "agent.json", content)
    console.print(f"Written: {path}", highlight=False)


def measure(folder: Path, served: Served, adapter: str, guard: bool, pixels: NDArray[np.uint8], repeats: int) -> Case:
    """Start an agent in a new folder, measure all of it, and stop it.

    Raises
    ------
    RunError
        It did not start, answer or stop as it should, its guard held the adapter back, or streams at once lost,
        reordered or were refused something.
    """
    try:
        with running(folder, served, {"adapter": adapter, "guard": guard}) as (address, pid):
            before = resident(pid)
            with grpc.insecure_channel(address) as channel:
                stub = agent_pb2_grpc.PredictorStub(channel)
                latencies = [latency(stub, served, pixels, batch, repeats) for batch in BATCHES]
                load = loaded(stub, address, pixels)
            return Case(adapter, guard, before, resident(pid), latencies, load)
    except (grpc.RpcError, RunError) as error:
        told = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else error
        raise RunError(f"{adapter}, guard {_on(guard)}: {told}") from error


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
    ratio = averages.median(sum(taken) / sum(floor) for taken, floor in turns)
    rates = batch * len(ours) / sum(ours), batch * len(asked) / streamed
    return Latency(batch, len(ours), p50, p99, rates[0], 1000 * averages.median(bare), ratio, rates[1])


@torch.no_grad()
def forward(served: Served, parts: Sequence[NDArray[np.uint8]]) -> list[float]:
    """Return the seconds of the network's forward pass for each batch; making the tensors is not counted."""
    taken = []
    for part in parts:
        x = torch.from_numpy(images(part, served.shape)).contiguous(memory_format=torch.channels_last)
        start = time.perf_counter()
        served.network(x)
        taken.append(time.perf_counter() - start)
    return taken


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
        told = load.trouble or "nothing lost or reordered"
        raise RunError(f"{STREAMS} streams: {told}; the agent has seen {seen} of {len(pixels)} samples")
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


def rendered(cases: Sequence[Case]) -> Table:
    """Return the table of latencies for a terminal."""
    title = "Agent on a Unix socket, requests one after another; the CNN on 32x32x3, one thread"
    grid = Table(title=title, caption="forward: the bare forward pass in this process, in turns with the requests")
    columns = ("adapter", "guard", "batch", "p50 ms", "p99 ms", "predictions/s", "forward p50 ms", "over forward")
    for column in (*columns, "one stream/s"):
        grid.add_column(column, justify="left" if column in ("adapter", "guard") else "right")
    for case in cases:
        for one in case.latencies:
            times = f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", f"{one.per_second:,.0f}", f"{one.forward_p50_ms:.2f}"
            who = case.adapter, _on(case.guard), str(one.batch)
            grid.add_row(*who, *times, f"{one.over_forward:.2f}", f"{one.stream_per_second:,.0f}")
    return grid


def rendered_load(cases: Sequence[Case], build: str, imports: float) -> Table:
    """Return the table of streams at once and memory for a terminal."""
    caption = f"torch's {build} build; Python with torch and gRPC imported, and nothing else: {imports:.0f} MiB"
    grid = Table(title=f"{STREAMS} streams at once, and resident memory", caption=caption)
    columns = ("adapter", "guard", "predictions/s", "requests", "lost", "reordered", "refused")
    for column in (*columns, "MiB at start", "MiB at end"):
        grid.add_column(column, justify="left" if column in ("adapter", "guard") else "right")
    for case in cases:
        load = case.load
        counts = (f"{count:,}" for count in (load.requests, load.lost, load.reordered, load.refused))
        memory = f"{case.start_mib:.0f}", f"{case.end_mib:.0f}"
        grid.add_row(case.adapter, _on(case.guard), f"{load.per_second:,.0f}", *counts, *memory)
    return grid


def _on(guard: bool) -> str:
    return "on" if guard else "off"


def _samples(text: str) -> int:
    least = max(STREAMS, *BATCHES)
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number, {least} or more: one a stream")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number, 1 or more")
    return int(text)
