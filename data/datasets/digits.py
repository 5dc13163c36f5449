"""Handwritten digits embedded in scikit-learn: 1,797 grayscale images of 8 x 8, no download.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test
part).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .base import Dataset, Raw, Request

#: The sensor counts black pixels of 4 x 4 cells: values range from 0 to 16.
_FULL = 16.0
_FILE = "datasets/data/digits.csv.gz"  # in scikit-learn's folder; 64 pixels and the label per line


def load_digits(request: Request) -> Raw:
    """Return all 1,797 digits, values 0..16 scaled to 0..255 without rounding.

    The file is read from scikit-learn's folder without importing scikit-learn, which takes seconds; in a deployment
    every message is handled by a new process.

    Raises
    ------
    FileNotFoundError
        scikit-learn or its file of digits is missing.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("digits come with scikit-learn, which is not installed")
    path = Path(package.submodule_search_locations[0]) / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"digits: there is no file {path}")
    table = np.loadtxt(path, delimiter=",")  # [N, 65]
    pixels = (table[:, :-1] * (255.0 / _FULL)).astype(np.float32).reshape(-1, 1, 8, 8)
    return Raw(pixels, table[:, -1].astype(np.int64), tuple(str(digit) for digit in range(10)))


DIGITS = Dataset(
    "scikit-learn's 1,797 handwritten digits, 8 x 8 grayscale, embedded: no download",
    load_digits,
    mean=(0.3053, 0.3053, 0.3053),
    std=(0.3236, 0.3236, 0.3236),
    classes=10,
    flip=False,
    crop=0.6,
)
