"""Accuracy without labels.

Devin Guillory, Vaishaal Shankar, Sayna Ebrahimi, Trevor Darrell, Ludwig Schmidt: Predicting with Confidence on Unseen
Distributions. ICCV 2021.

Difference of confidences: on a shifted distribution T a network loses as much accuracy as it loses mean confidence.

    C(D) = mean over x in D of max_k p_k(x)
    Â(T) = A(S) - (C(S) - C(T))

Deviations: Â is clipped to [0, 1]; the slope is 1, which the paper also fits on labelled shifts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def confidences(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest probability [B] of each row [B, K]."""
    return probabilities.max(1).astype(np.float64)


def difference_of_confidences(accuracy: float, before: float, now: float) -> float:
    """Return the estimated accuracy on samples without labels, in [0, 1].

    Parameters
    ----------
    accuracy : float
        A(S), on labelled samples, in [0, 1].
    before : float
        C(S), the mean confidence on these.
    now : float
        C(T), the mean confidence on the samples without labels.
    """
    return min(1.0, max(0.0, accuracy - (before - now)))
