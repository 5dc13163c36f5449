"""What both simulations with Ray ask of it."""

from __future__ import annotations

import os

from client.compute import resolve_device
from settings import Settings

#: Options of a worker: one that is dead is started again and does what it was doing once more, to the same bits.
REVIVE = {"max_restarts": -1, "max_task_retries": 1}


def share_gpu(settings: Settings) -> tuple[Settings, float]:
    """Return the settings for the workers, and each worker's share of the GPU (0 on a CPU)."""
    device = resolve_device(settings.device)
    if device.type == "cpu":
        return settings, 0.0
    if device.index is not None:
        # Ray shows each worker the GPU that it was given as its first and only one
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device.index)
        settings = settings.replace(device="cuda")
    return settings, settings.num_gpus or 1 / settings.workers
