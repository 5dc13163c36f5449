"""Data sets: one file per source, and a registry that loads them by name."""

from .base import Dataset
from .registry import DATASETS, ROOT_VARIABLE, load, load_natural

__all__ = ["DATASETS", "ROOT_VARIABLE", "Dataset", "load", "load_natural"]
