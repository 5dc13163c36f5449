"""Local training objectives by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

#: (logits [B, K], labels [B], class counts [K] of the client's training split) → mean loss.
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy; `counts` plays no part."""
    return functional.cross_entropy(logits, labels)


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy on logits + ln(count_k + 1).

    The client's label prior is put into the logits during training, so that the trained head is free of it (Ren et al.
    2020; FedTHE trains its global head so, section 4.2, footnote 3).
    """
    return functional.cross_entropy(logits + torch.log(counts.to(logits) + 1), labels)


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": cross_entropy,
    "balanced_softmax": balanced_softmax,
}


def objective(name: str) -> Objective:
    """Return the objective called `name`; ValueError lists what exists."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; there are: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
