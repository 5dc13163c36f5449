"""Provenance of a run: settings, code, versions, hardware."""

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


def describe(settings: Settings, bundle: str | None = None) -> dict[str, Any]:
    """Return start time (UTC), settings, code, versions and hardware, as JSON values.

    The code of a deployed run is its app bundle, with SHA-256 `bundle`; of any other run, the working copy at a commit.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {key: value for key, value in settings.flat().items() if key not in LOCAL},
        "versions": versions(*PACKAGES),
        "commit": commit(),
        "bundle": bundle,
        "hardware": hardware(),
    }


@cache
def commit() -> str | None:
    """Return the commit of the working copy when this process first asked, with '+changes' if any; None outside one.

    Results that a benchmark has written into `benchmarks/results` are no change.
    """
    try:
        return commit_of(Path(__file__))
    except (OSError, subprocess.SubprocessError):
        return None  # an app bundle or an installed copy has no history


def commit_of(file: Path) -> str:
    """Return the commit of the working copy that has this file; CalledProcessError if none has."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    git("ls-files", "--error-unmatch", file.name)  # an installed copy may lie in somebody else's repository
    results = ":(top,exclude)benchmarks/results/*.json"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", results)
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


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
