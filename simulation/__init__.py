"""Simulations on one machine, and deployments of SuperLink, SuperNodes and agents as its processes."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `simulate` lazily: refusing a misspelt setting needs neither torch nor Flower."""
    if name == "simulate":
        from fedtta.simulation.engine import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
