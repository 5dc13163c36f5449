"""The plain average of the two heads: the row that every adaptive mixture has to beat."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.heads import check_choice, check_number, check_two_heads, two_heads
from tta.statistics import Statistics

MIXES = ("probabilities", "logits")


class FixedMix(Adapter):
    """Mix the two heads with one weight for all samples.

    Parameters
    ----------
    model : nn.Module
        A two-head network.
    statistics : Statistics or None
        Not used.
    e : float
        Weight of the global head, in [0, 1].
    mix : "probabilities" or "logits"
        e p(ŷ^g) + (1-e) p(ŷ^l), or p(e ŷ^g + (1-e) ŷ^l).
    record : bool
        Keep the report: `weight`, e for every sample.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        e: float = 0.5,
        mix: Literal["probabilities", "logits"] = "probabilities",
        record: bool = True,
    ) -> None:
        check_two_heads(model, "fixed_mix")
        check_number("e", e, 0, 1)
        check_choice("mix", mix, MIXES)
        super().__init__(model, record=record)
        self.e = e
        self.mix = mix

    def _predict(self, x: Tensor) -> Tensor:
        return self.interpolate(*two_heads(self.model, x))

    def interpolate(self, z: Tensor, logits_global: Tensor, logits_personal: Tensor) -> Tensor:
        """Return what `predict` returns, given the network's outputs z [B, d] and logits [B, K]."""
        if self.mix == "logits":
            probabilities = torch.softmax(self.e * logits_global + (1 - self.e) * logits_personal, 1)
        else:
            first, second = torch.softmax(logits_global, 1), torch.softmax(logits_personal, 1)
            probabilities = self.e * first + (1 - self.e) * second
        self._note(weight=torch.full((len(z),), self.e, dtype=torch.float64))
        return probabilities
