"""Memory and time of a device's own data: many image files, scanned, then read in one epoch in random order.

`python -m fedtta.benchmarks.speed.sources 100000` measures another number of files than the part of `speed`, and prints
it.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fedtta.benchmarks.speed.federation import resident
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.data.images import Pixels
from fedtta.data.sources import own_data
from fedtta.models.preprocessing import Preprocessing

IMAGES, EDGE, BATCH, CACHE_MB = 10_000, 224, 64, 128
MIB = 1 << 20
#: Memory that a process may need beyond the cache: lists of 100,000 files, and a batch.
BEYOND = 256


@dataclass(frozen=True)
class Epoch:
    """Memory in MiB and seconds of one process."""

    images: int
    cache_mib: int
    before_mib: float
    scanned_mib: float
    peak_mib: float
    scan_seconds: float
    rescan_seconds: float
    epoch_seconds: float


def sources(quick: bool, images: int = IMAGES) -> Measured:
    """Measure the growth of this process over the bound: the cache and what may be needed beyond it."""
    images, edge, cache_mb = (60, 16, 1) if quick else (images, EDGE, CACHE_MB)
    with tempfile.TemporaryDirectory() as folder:
        epoch = read_epoch(Path(folder), images, edge, cache_mb)
    growth, bound = epoch.peak_mib - epoch.before_mib, float(epoch.cache_mib + BEYOND)
    title = f"{epoch.images:,} images of {edge} x {edge}, scanned and read once"
    than = f"a cache of {epoch.cache_mib} and {BEYOND} beyond it"
    return Measured([Ratio(title, growth / bound, "MiB", growth, bound, than, 1.0)], asdict(epoch))


def read_epoch(folder: Path, count: int, edge: int, cache_mb: int) -> Epoch:
    """Write, scan and read `count` images, and scan them again."""
    write_images(folder / "site", count, edge)
    before = resident() / MIB
    memory: list[float] = []

    def scanned() -> Pixels:
        data = own_data(
            f"folder:{folder / 'site'}",
            classes=("a", "b"),
            preprocessing=Preprocessing(image_size=edge),
            cache_mb=cache_mb,
            index_file=folder / "index.json",
        )
        memory.append(resident() / MIB)
        return data.images.pixels

    def read(pixels: Pixels) -> None:
        order = np.random.default_rng(0).permutation(len(pixels))
        for start in range(0, len(order), BATCH):
            pixels[order[start : start + BATCH]]
            memory.append(resident() / MIB)

    start = time.perf_counter()
    pixels = scanned()
    after_scan = time.perf_counter()
    read(pixels)
    after_epoch = time.perf_counter()
    scanned()
    end = time.perf_counter()
    seconds = (after_scan - start, end - after_epoch, after_epoch - after_scan)
    return Epoch(count, cache_mb, before, memory[0], max(memory), *seconds)


def write_images(folder: Path, count: int, edge: int) -> None:
    """Write JPEG files in two class folders, each with content of its own."""
    draw = np.random.default_rng(0)
    encoded = []
    for _ in range(16):
        coarse = draw.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((edge, edge)).save(buffer, "jpeg")
        encoded.append(buffer.getvalue())
    for name in "ab":
        (folder / name).mkdir(parents=True)
    for i in range(count):
        content = encoded[i % len(encoded)] + i.to_bytes(4)  # bytes behind the end of a JPEG file are ignored
        (folder / "ab"[i % 2] / f"{i:06}.jpg").write_bytes(content)


if __name__ == "__main__":
    print(sources(quick=False, images=int(sys.argv[1])))
