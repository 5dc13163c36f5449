"""Versions of installed packages and of Python."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Return Python's version and those of the packages, as far as they are installed."""
    found = {name: _installed(name) for name in packages}
    return {"python": platform.python_version(), **{name: one for name, one in found.items() if one is not None}}
