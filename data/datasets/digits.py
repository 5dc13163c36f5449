"""Handwritten digits, embedded in scikit-learn: 1,797 grey pictures of 8 x 8, no download.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(its test part).
"""

from __future__ import annotations

import numpy as np

from .raw import Raw, Request

#: The sensor counts black pixels of 4 x 4 cells: values run from 0 to 16.
_FULL = 16.0


def load_digits(request: Request) -> Raw:
    """Return all 1,797 digits, values 0..16 scaled to 0..255 without rounding."""
    from sklearn import (
        datasets,
    )  # lazily: scikit-learn takes a second to import, and only this source needs it

    digits = datasets.load_digits()
    pixels = (digits.images * (255.0 / _FULL)).astype(np.float32)[:, None]  # [N, 1, 8, 8]
    return Raw(pixels, digits.target.astype(np.int64), tuple(str(digit) for digit in range(10)))
