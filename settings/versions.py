"""Versions of installed packages and of Python."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import lru_cache


@lru_cache(maxsize=8)
def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: found[name] for name in packages if name in found}}


def versions(*packages: str) -> dict[str, str]:
    """Return Python's version and those of the packages, as far as they are installed."""
    return dict(_installed(packages))
