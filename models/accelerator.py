"""What a GPU asks for where a CPU does not: a clock that waits for it, and a stream whose work goes first.

A GPU works through what it has been given while the program goes on. All work of one stream is done in order; work of
two streams is done side by side, and nothing orders it unless one of them waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

HIGHEST = -1  # priority of a CUDA stream; 0 is that of the default stream, in which training runs


def clock(device: torch.device | str) -> float:
    """Return `time.perf_counter()` when the device has done what this thread has given it.

    Without waiting, a time on a GPU would be that of giving it the work. On a CPU there is nothing to wait for.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


@contextmanager
def ahead(device: torch.device, received: bool = False) -> Iterator[None]:
    """Let a GPU do this block's work before work that other threads have given it; on a CPU, do nothing.

    The block runs on the process's one stream of high priority. Tensors can be shared with other streams because

    - all blocks run on this one stream, which is in order whatever thread a block runs in,
    - the host waits for the stream when a block ends, also after an error: what it has used may then be read, changed
      and freed by anyone, and
    - a block that reads what this thread has made outside, such as the weights of a new network, says so by `received`:
      the stream then waits for this thread's work so far. A block that does not say so waits for no training.

    Parameters
    ----------
    device : torch.device
    received : bool
        Whether the block reads tensors that were made outside such blocks since the last one that said so.
    """
    if device.type != "cuda":
        yield
        return
    stream, outside = _first_stream(device), torch.cuda.current_stream(device)
    if received and outside != stream:
        stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


@cache
def _first_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=HIGHEST)
