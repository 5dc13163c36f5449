"""Server and clients on one machine: Flower's Ray-backed simulation behind one function."""

from simulation.ray import simulate

__all__ = ["simulate"]
