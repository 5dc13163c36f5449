"""Dirty streams at full speed: `python -m tests.hostile.streams --seconds 3600` prints the memory as it goes on.

Some callers send good requests of all sizes, others what an agent must refuse: no message, wrong types and shapes, NaN,
damaged files, calls that are dropped half-way. The exit status is 1 if memory still grows in the second half.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from tests.client.agent.fake import folder
from tests.client.agent.test_encoded import encoded, model_file
from tests.client.agent.test_main import ROOT, START, command

GROWTH = 1.05  # of memory from the first half to the second that is still flat
LOOKS = 40  # at memory
SIZES = (1, 2, 8, 64, 400, 2000)  # samples of a request


def memory(process: int) -> float:
    """Return a process's own resident memory in MiB, without pages of files, which the system takes back at will."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 2**10


def images(draw: random.Random, shape: tuple[int, ...]) -> pb.Images:
    """Return images of one of many kinds, right or wrong."""
    size = draw.choice(SIZES)
    pixels = np.full((size, *shape), draw.randrange(256), np.uint8)
    pixels[:, 0, 0] = np.arange(shape[-1])
    kind = draw.randrange(8)
    if kind == 0:
        return protobuf.to_images(np.full((3, *shape), np.nan, np.float32))
    if kind == 1:
        return protobuf.to_images(pixels[:, :, :-1])
    if kind == 2:
        return pb.Images(kind=pb.Images.FLOAT32, shape=[1 << 40, *shape], values=b"0000")
    if kind == 3:
        return protobuf.to_files([encoded("PNG"), encoded("PNG")[: draw.randrange(1, 60)]])
    if kind == 4:
        return protobuf.to_files([encoded("JPEG")] * draw.randrange(1, 9))
    if kind == 5:
        return protobuf.to_images(pixels.astype(np.float32) / np.float32(255))
    return protobuf.to_images(pixels)


def caller(seed: int, address: str, shape: tuple[int, ...], ended: Callable[[], bool], seen: Counter[str]) -> None:
    """Send requests until the end, one after the other."""
    draw = random.Random(seed)
    while not ended():
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(address) as line:
            stub = agent_pb2_grpc.PredictorStub(line)
            requests = [pb.PredictRequest(images=images(draw, shape)) for _ in range(draw.randrange(1, 20))]
            way = draw.randrange(5)
            if way == 0:
                garbage = draw.randbytes(draw.randrange(1, 4000))
                line.unary_unary("/fedtta.agent.v1.Predictor/Predict")(garbage, timeout=60)
            elif way == 1:  # dropped half-way
                replies = stub.PredictStream(iter(requests), timeout=60)
                next(replies)
                replies.cancel()
            elif way == 2:
                for reply in stub.PredictStream(iter(requests), timeout=60):
                    seen["refused" if reply.error else "predicted"] += 1
            else:
                for request in requests:
                    try:
                        stub.Predict(request, timeout=60)
                        seen["predicted"] += 1
                    except grpc.RpcError as error:
                        seen[error.code().name] += 1


def main() -> int:
    """Run the streams and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--callers", type=int, default=6)
    chosen = parser.parse_args()
    seen: Counter[str] = Counter()
    with folder() as path:
        model_file(path / "m.safetensors")
        keys = {"name": "0", "state-dir": "s", "device": "cpu", "adapter": "t3a", "model": "m.safetensors"}
        (path / "device.toml").write_text("".join(f'{key} = "{value}"\n' for key, value in keys.items()))
        address, sizes = f"unix:{path}/s/agent.sock", []
        with subprocess.Popen(command(path), cwd=ROOT, stderr=subprocess.DEVNULL) as agent:
            with grpc.insecure_channel(address) as line:
                stub = agent_pb2_grpc.PredictorStub(line)
                shape = tuple(stub.Status(pb.StatusRequest(), timeout=START, wait_for_ready=True).shape)
            end = time.monotonic() + chosen.seconds
            about = (address, shape, lambda: time.monotonic() > end, seen)
            threads = [threading.Thread(target=caller, args=(seed, *about)) for seed in range(chosen.callers)]
            for thread in threads:
                thread.start()
            while time.monotonic() < end:
                time.sleep(chosen.seconds / LOOKS)
                sizes.append(memory(agent.pid))
                print(f"{chosen.seconds - end + time.monotonic():6.0f} s {sizes[-1]:6.0f} MiB {dict(seen)}", flush=True)
            for thread in threads:
                thread.join()
            agent.terminate()
            status = agent.wait(START)
    first, second = (statistics.median(part) for part in (sizes[LOOKS // 8 : LOOKS // 2], sizes[LOOKS // 2 :]))
    print(f"median of the first half {first:.0f} MiB, of the second {second:.0f} MiB; exit status {status}")
    return int(status != 0 or second > GROWTH * first)


if __name__ == "__main__":
    sys.exit(main())
