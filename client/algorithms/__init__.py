"""Local algorithms: what a client does in a round of training, one file each.

A file declares its algorithms by name in `ALGORITHMS`; every file of this folder is found.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fedtta.client.algorithms.base import LocalAlgorithm, LocalContext
from fedtta.client.algorithms.fedavg import FedAvg

__all__ = ["ALGORITHMS", "FedAvg", "LocalAlgorithm", "LocalContext", "find_algorithm"]

#: Every local algorithm by name.
ALGORITHMS: dict[str, LocalAlgorithm] = {}
for _found in iter_modules(__path__):
    ALGORITHMS |= getattr(import_module(f"{__name__}.{_found.name}"), "ALGORITHMS", {})


def find_algorithm(name: str) -> LocalAlgorithm:
    """Return a local algorithm by name; ValueError lists what exists."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown local algorithm {name!r}; there are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
