"""Provenance of a run: settings, commit, versions, hardware."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedtta.settings import Settings
from fedtta.settings.versions import versions

#: Settings that name a folder of one machine and have no effect on the result.
LOCAL = ("state-dir",)
PACKAGES = ("flwr", "ray", "torch", "torchvision", "numpy", "scipy")


def describe(settings: Settings) -> dict[str, Any]:
    """Return start time (UTC), settings, commit, versions and hardware, as JSON values."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {key: value for key, value in settings.flat().items() if key not in LOCAL},
        "versions": versions(*PACKAGES),
        "commit": commit(),
        "hardware": hardware(),
    }


@cache
def commit() -> str | None:
    """Return the commit of the working copy when this process first asked, with '+changes' if any; None outside one."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # an app bundle or an installed copy has no history
    return run.stdout.strip() or None


def hardware() -> str:
    """Return processor, cores and GPUs in one line."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([f"{_processor()}, {os.cpu_count()} cores", *(gpus or ["no GPU"])])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
