"""What a device knows besides weights when it adapts at test time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Statistics of the training data under the final global encoder.

    All of them are computed in evaluation mode, without augmentation, over a client's training split; the global
    ones are means over clients. A method reads what it needs; the rest may be None.

    Parameters
    ----------
    descriptor_local, descriptor_global : Tensor [d] or None
        Mean feature z (FedTHE, section 4.2: h^l, h^g).
    dle_local, dle_global : Tensor [d] or None
        Fraction of samples whose discretised feature is 0, raw, in [0, 1] (BTFL, section 4.1: p^l, p^g).
    entropy_local, entropy_global : float or None
        Mean entropy in nats of the personal and of the global head's predictions (BTFL: mean H_l, mean H_g).
    label_prior : Tensor [K] or None
        Frequency of each class in training, mean over clients (EM, BBSE).
    confusion : Tensor [K, K] or None
        Frequencies P(ŷ = i, y = j) on validation data, mean over clients (BBSE).
    block_scores : Tensor [blocks] or None
        Accuracy on validation data after adapting one block alone, mean over clients (Surgical).
    """

    descriptor_local: Tensor | None = None
    descriptor_global: Tensor | None = None
    dle_local: Tensor | None = None
    dle_global: Tensor | None = None
    entropy_local: float | None = None
    entropy_global: float | None = None
    label_prior: Tensor | None = None
    confusion: Tensor | None = None
    block_scores: Tensor | None = None

    def require(self, method: str, *names: str) -> None:
        """Raise ValueError naming every statistic that `method` needs and that is missing here."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{method} needs the statistics {', '.join(missing)}, which are None")


def discretise(z: Any) -> Any:
    """Return round(tanh z), ties to even (eq. 5): 1 where z > atanh(1/2) = 0.549..., else 0.

    Parameters
    ----------
    z : Tensor or array
        Not negative: features behind a ReLU.

    Returns
    -------
    Tensor or np.ndarray
        Of the kind, dtype and shape of z, with values in {0, 1}.
    """
    return torch.round(torch.tanh(z)) if isinstance(z, Tensor) else np.round(np.tanh(z))
