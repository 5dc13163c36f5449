"""The light agent beside the one in torch: memory, start, latency, difference of the probabilities, accuracy.

    python -m fedtta.benchmarks speed --parts light

The three agents of an adapter, torch, onnx and onnx in int8, run at once on the papers' CNN
(`fedtta.benchmarks.speed.served`) and are asked in turns, so that a change in load affects all; each starts alone. The
export is there before the start, as after the first one on a device.
"""

from __future__ import annotations

import os
import statistics as averages
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from fedtta.benchmarks.speed.agent import resident
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.benchmarks.speed.served import fabricate as fabricated
from fedtta.benchmarks.speed.served import running, sample_images, sample_labels
from fedtta.benchmarks.speed.streams import PATIENCE, batches, requests, unary
from fedtta.client.agent.live import as_floats
from fedtta.client.agent.scans import SCANNING
from fedtta.client.served import NETWORK
from fedtta.client.serving import Served
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.models.export import export_encoder
from fedtta.simulation.deployment import sockets_folder

ADAPTERS = ("none", "btfl", "fedthe")
SAMPLES, REPEATS = 600, 3
CALIBRATION = 128  # images, of those that are predicted afterwards
BATCH = 32
CLOSE = 1e-5  # largest allowed difference of probabilities
MEMORY, READY = 120.0, 2.0  # MiB and seconds at most


@dataclass(frozen=True)
class Runtime:
    """One agent's figures.

    `ready` is seconds from the start of the process to its socket, `processor` those that it computed meanwhile;
    `start_mib` and `mib` are resident memory at the start and after all requests; p50, p99 and `batch_ms` are
    milliseconds of requests of one image and of `BATCH`; `difference` is that of the probabilities from torch's.
    """

    adapter: str
    runtime: str
    ready: float
    processor: float
    start_mib: float
    mib: float
    p50: float
    p99: float
    batch_ms: float
    difference: float
    accuracy: float


def light(quick: bool) -> Measured:
    """Measure every adapter; the ratios are of the light agents' figures over those of the one in torch.

    Raises
    ------
    RunError
        An agent did not start, answer or stop as it should.
    """
    samples, repeats = (64, 1) if quick else (SAMPLES, REPEATS)
    served, found = fabricated(), []
    with sockets_folder() as folder:
        for adapter in ADAPTERS[1:2] if quick else ADAPTERS:
            found.append(_measured(folder / adapter, served, adapter, samples, repeats))
    ratios = [ratio for heavy, *lighter in found for one in lighter for ratio in _ratios(one, heavy)]
    details = {"samples": samples, "repeats": repeats, "runtimes": [asdict(one) for three in found for one in three]}
    return Measured(ratios, details)


def _ratios(one: Runtime, heavy: Runtime) -> list[Ratio]:
    """Return the rows of a light agent; its targets are numbers, of which `ratio` is the share."""
    name = f"{one.adapter}, {one.runtime}"
    close = Ratio(
        f"{name}: difference over {CLOSE:g}", one.difference / CLOSE, "", one.difference, CLOSE, "allowed", 1.0
    )
    return [
        Ratio(f"{name}: memory over {MEMORY:g} MiB", one.mib / MEMORY, "MiB", one.mib, heavy.mib, "torch", 1.0),
        Ratio(f"{name}: start over {READY:g} s", one.ready / READY, "s", one.ready, heavy.ready, "torch", 1.0),
        Ratio(f"{name}: p50", one.p50 / heavy.p50, "ms", one.p50, heavy.p50, "torch", 1.0),
        Ratio(f"{name}: p99", one.p99 / heavy.p99, "ms", one.p99, heavy.p99, "torch"),
        Ratio(f"{name}: batch {BATCH}", one.batch_ms / heavy.batch_ms, "ms", one.batch_ms, heavy.batch_ms, "torch"),
        *([close] if one.runtime == "onnx" else []),  # int8 rounds: its accuracy counts
        Ratio(f"{name}: accuracy", one.accuracy / heavy.accuracy, "", one.accuracy, heavy.accuracy, "torch"),
    ]  # fmt: skip


def _measured(folder: Path, served: Served, adapter: str, samples: int, repeats: int) -> list[Runtime]:
    """Start the agents of an adapter and ask all of them the same; the first one is that in torch."""
    pixels, labels = sample_images(samples), sample_labels(samples)
    folder.mkdir()
    own = folder / "own.npz"
    np.savez(own, x=pixels[:CALIBRATION].transpose(0, 2, 3, 1))
    chosen: dict[str, Mapping[str, Any]] = {
        "torch": {},
        "onnx": {"runtime": "onnx"},
        "onnx int8": {"runtime": "onnx", "precision": "int8", "data": f"npz:{own}"},
    }

    def export(model: Path, calibration: NDArray[np.float32] | None) -> None:
        export_encoder(served.network, served.shape, model / NETWORK, calibration)

    calibrations = {"torch": None, "onnx": None, "onnx int8": as_floats(pixels[:CALIBRATION])}
    with ExitStack() as stack:
        agents = []
        for number, (runtime, keys) in enumerate(chosen.items()):
            place, calibration = folder / str(number), calibrations[runtime]
            begun = running(
                place, served, {"adapter": adapter, **keys},
                prepare=None if runtime == "torch" else partial(export, calibration=calibration),
            )  # fmt: skip
            address, pid = stack.enter_context(begun)
            stub = agent_pb2_grpc.PredictorStub(stack.enter_context(grpc.insecure_channel(address)))
            while SCANNING in stub.Status(pb.StatusRequest()).data_notes:
                time.sleep(0.1)
            agents.append((stub, pid, start_seconds(pid, Path(address.removeprefix("unix:")))))
        single, joint = requests(batches(pixels, 1)), requests(batches(pixels, BATCH))
        answers = [np.concatenate([_probabilities(stub, one) for one in single]) for stub, _, _ in agents]
        turns = [[(unary(stub, single), unary(stub, joint)) for stub, _, _ in agents] for _ in range(repeats)]
        found = []
        for number, (runtime, (_, pid, start)) in enumerate(zip(chosen, agents, strict=True)):
            times = [1000 * second for turn in turns for second in turn[number][0]]
            together = averages.median(1000 * second for turn in turns for second in turn[number][1])
            p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
            difference = float(abs(answers[number] - answers[0]).max())
            accuracy = float((answers[number].argmax(1) == labels).mean())
            figures = (*start, resident(pid), p50, p99, together, difference, accuracy)
            found.append(Runtime(adapter, runtime, *figures))
        return found


def start_seconds(pid: int, socket: Path) -> tuple[float, float, float]:
    """Return how long a process took to bind its socket, the processor time until now, and its memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
    ready = age - (time.time() - socket.stat().st_mtime)
    return ready, (int(fields[11]) + int(fields[12])) / ticks, resident(pid)


def _probabilities(stub: agent_pb2_grpc.PredictorStub, request: pb.PredictRequest) -> NDArray[np.float32]:
    reply = stub.Predict(request, timeout=PATIENCE)
    return np.frombuffer(reply.probabilities, "<f4").reshape(reply.samples, reply.classes)
