"""A GPU's memory: how much of it this process plans with, and work in parts that fit.

What is planned with depends on the GPU and on this process's share of it alone, and not on what is free: how many
samples or clients are computed at once may decide the last bits of a result, and would differ from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)
T = TypeVar("T")
ON_CPU = 8 * 2**30  # bytes; the same on every machine, as are the bits
#: What errors of libraries say that take memory of the GPU themselves; cuDNN has another name for it since version 9.
LIBRARIES = (
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)  # fmt: skip


@dataclass
class Plan:
    """What part of its GPU this process plans with: its share, and a half less for each time that it ran out."""

    share: float = 1.0
    left: float = 1.0


PLAN = Plan()


def take_share(share: float) -> None:
    """Set this process's share of its GPU, above 0; other processes may have the rest."""
    PLAN.share = min(share, 1.0)


def budget(device: torch.device) -> int:
    """Return how many bytes of a device's memory this process may plan with."""
    if device.type == "cpu":
        return ON_CPU
    return int(PLAN.left * PLAN.share * torch.cuda.mem_get_info(device)[1])


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the GPU's memory does not suffice: torch's own, or one of cuBLAS or cuDNN."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in LIBRARIES)
    )


def in_parts(count: int, most: int, work: Callable[[slice], T]) -> list[T]:
    """Call `work` on slices of range(count), at most `most` long; return its results in their order.

    A slice for which the GPU's memory does not suffice is repeated in halves. From then on this process plans with half
    as much.

    Raises
    ------
    RuntimeError
        It does not suffice for one alone (`is_out_of_memory`).
    """
    results: list[T] = []
    done = 0
    while done < count:
        most = min(most, count - done)
        try:
            results.append(work(slice(done, done + most)))
        except RuntimeError as error:
            if most == 1 or not is_out_of_memory(error):
                raise
        else:
            done += most
            continue
        # Here, since the exception has held what was computed so far.
        torch.cuda.empty_cache()
        most //= 2
        PLAN.left /= 2
        LOG.warning("out of GPU memory: %d at once from now on, which may change the last bits of results", most)
    return results


def saved_bytes(forward: Callable[[], Any], weights: list[Tensor]) -> int:
    """Return how many bytes `forward` saves for a backward pass, those of the weights aside."""
    known, saved = {value.data_ptr() for value in weights}, 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 0 if tensor.data_ptr() in known else tensor.nbytes
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        forward()
    return saved
