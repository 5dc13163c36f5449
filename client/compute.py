"""Which processor a device computes on, and how."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from settings import SettingsError


def resolve_device(name: str) -> torch.device:
    """Turn the setting `device` into a torch device.

    Raises
    ------
    SettingsError
        A GPU is asked for by name and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingsError(
            f"device = {name!r}: this process sees {torch.cuda.device_count()} GPUs; allowed are auto, cpu"
            + "".join(f", cuda:{i}" for i in range(torch.cuda.device_count()))
        )
    return device


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[None]:
    """Return a bfloat16 autocast context, or one that does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
