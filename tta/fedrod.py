"""FedRoD: "On Bridging Generic and Personalized Federated Learning for Image Classification", Chen & Chao, ICLR 2022.

The personal prediction adds the two heads' logits: softmax(global(z) + personal(z)). The personal head is trained for
that sum (`client.rules.fedrod`), so it is a correction of the global head and no classifier by itself. Nothing adapts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.heads import check_two_heads, two_heads
from tta.statistics import Statistics


class FedRoD(Adapter):
    """Predict with the sum of both heads' logits.

    There is no weight between the heads to report.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    record : bool
        Taken as everywhere; the report is empty.

    Raises
    ------
    ValueError
        The model has no two heads of one shape.
    """

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        check_two_heads(model, "fedrod")
        super().__init__(model, record=record)

    def _predict(self, x: Tensor) -> Tensor:
        _, logits_global, logits_personal = two_heads(self.model, x)
        return torch.softmax(logits_global + logits_personal, 1)  # (B, K)
