"""Dirty streams at full speed: `python -m tests.hostile.streams --seconds 3600` prints the memory as it goes on.

Some callers send good requests of all sizes, others what an agent must refuse: no message, wrong types and shapes, NaN,
damaged files, calls that are dropped half-way. The exit status is 1 if memory still grows in the second half.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

from fedtta.client.agent.core import Agent
from fedtta.client.agent.server import serve
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from tests.client.agent.fake import folder
from tests.client.agent.test_encoded import encoded, model_file
from tests.client.agent.world import config

GROWTH = 1.05  # of memory in the second half that is still flat
SIZES = (1, 2, 8, 64, 400, 2000)  # samples of a request


def resident() -> float:
    """Return this process's resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


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


def caller(address: str, shape: tuple[int, ...], seed: int, ended: Callable[[], bool], seen: Counter[str]) -> None:
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
    with folder() as short, tempfile.TemporaryDirectory() as place:
        path = Path(place)
        model_file(path / "m.safetensors")
        keys = {"adapter": "t3a", "model": str(path / "m.safetensors"), "save_every_samples": 256}
        agent = Agent(config(path, listen=f"unix:{short}/a", relay=f"unix:{short}/r", **keys))
        sockets, end = serve(agent, agent.config), time.monotonic() + chosen.seconds
        seen: Counter[str] = Counter()
        about = (sockets.listen, agent.status().shape)
        threads = [
            threading.Thread(target=caller, args=(*about, seed, lambda: time.monotonic() > end, seen))
            for seed in range(chosen.callers)
        ]
        for thread in threads:
            thread.start()
        sizes = [resident()]
        while time.monotonic() < end:
            time.sleep(chosen.seconds / 20)
            sizes.append(resident())
            print(f"{chosen.seconds - end + time.monotonic():6.0f} s {sizes[-1]:6.0f} MiB {dict(seen)}", flush=True)
        for thread in threads:
            thread.join()
        sockets.stop()
        lost = agent.close()
    half = sizes[len(sizes) // 2 :]
    return int(bool(lost) or max(half) > GROWTH * max(sizes[: len(sizes) // 2]))


if __name__ == "__main__":
    sys.exit(main())
