"""No adaptation: the global head as it is (the FedAvg row of every table)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.statistics import Statistics


class NoAdaptation(Adapter):
    """Predict with the network's own output.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; for a two-head model those of the global head.
    statistics : Statistics or None
        Not used.
    record : bool
        Keep the report: `weight`, 1 for every sample.
    """

    def __init__(self, model: nn.Module, statistics: Statistics | None = None, record: bool = True) -> None:
        super().__init__(model, record=record)

    def _predict(self, x: Tensor) -> Tensor:
        logits = self.model(x)  # (B, K)
        self._note(weight=torch.ones(len(x), dtype=torch.float64))
        return torch.softmax(logits, 1)
