"""Server and clients on one machine: one function for every engine, and Flower's own CLI."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `simulate`, and with it torch and Ray, when it is asked for: a misspelt setting is refused without."""
    if name == "simulate":
        from simulation.engine import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
