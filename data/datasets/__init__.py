"""Where pictures come from: one file a source, and a registry that knows them by name."""

from .registry import DATASETS, ROOT_VARIABLE, Dataset, load, load_natural

__all__ = ["DATASETS", "ROOT_VARIABLE", "Dataset", "load", "load_natural"]
