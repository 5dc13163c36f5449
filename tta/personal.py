"""The personal head alone: what a client has learned from its own data, whatever comes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.heads import check_two_heads, two_heads
from tta.statistics import Statistics


class Personal(Adapter):
    """Predict with the personal head.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    record : bool
        Keep the report: `weight`, 0 for every sample.
    """

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        check_two_heads(model, "personal")
        super().__init__(model, record=record)

    def _predict(self, x: Tensor) -> Tensor:
        _, _, logits_personal = two_heads(self.model, x)
        self._note(weight=torch.zeros(len(x), dtype=torch.float64))
        return torch.softmax(logits_personal, 1)
