"""BBSE: predictions are corrected for the label prior of each batch, which the source's confusions reveal.

Detecting and Correcting for Label Shift with Black Box Predictors (Lipton, Wang, Smola, ICML 2018), as a baseline of
Adaptive Test-Time Personalization (ATP, NeurIPS 2023), which corrects predictions where the paper trains again. The
estimator, its equation and what happens where the confusion matrix cannot be inverted are in `label_shift`.

Deviations:

- ATP's published code divides C's columns by their sums, takes p_t = C^+ μ, projects it onto the simplex, mixes in
  0.001 of the uniform distribution and multiplies predictions by p_t itself, which supposes a uniform source. Here
  they are multiplied by w = p_t/p_s, cut off at 0, as in the paper.
- The paper estimates over the whole test set, this per batch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.bn_adapt import check_finite
from tta.heads import check_choice
from tta.label_shift import bbse_weights, required, reweighted
from tta.statistics import Statistics

PREDICTIONS = ("hard", "soft")


class BBSE(Adapter):
    """Estimate each batch's label prior by BBSE and predict with it; nothing is carried from batch to batch.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; `models.TwoHead` predicts with its global head.
    statistics : Statistics
        Its `confusion` [K, K] is needed: P(ŷ = i, y = j) on validation data, row i, column j.
    predictions : "hard" or "soft"
        μ is the frequency of each predicted class, or the mean probability. For "soft" the confusion should hold mean
        probabilities too: E[p_i(x), y = j].
    rtol : float
        Relative cut-off of C's singular values, in [0, 1).
    record : bool
        Keep the report: `shift` [n], the distance ½ Σ_y |w(y) - 1| p_s(y), for every sample that of its batch.

    Raises
    ------
    ValueError
        An option is out of range, or there is no confusion matrix or one that is no distribution.
    """

    per: ClassVar[Literal["sample", "batch"]] = "batch"

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        predictions: Literal["hard", "soft"] = "hard",
        rtol: float = 1e-6,
        record: bool = True,
    ) -> None:
        check_choice("predictions", predictions, PREDICTIONS)
        if not 0 <= rtol < 1:
            raise ValueError(f"rtol={rtol} is outside [0, 1)")
        self._confusion = required(statistics, "confusion", "BBSE", 2)
        super().__init__(model, record=record)
        self.predictions, self.rtol = predictions, rtol

    def _predict(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        check_finite("the network's output", logits)
        confusion = self._confusion.to(logits.device)
        classes = logits.shape[1]
        if classes != len(confusion):
            raise ValueError(f"confusion has {len(confusion)} classes, the network's output {classes}")
        if len(x) == 0:
            return torch.softmax(logits, 1)
        if self.predictions == "hard":
            predicted = torch.bincount(logits.argmax(1), minlength=classes).double() / len(x)
        else:
            predicted = torch.softmax(logits.double(), 1).mean(0)
        weights = bbse_weights(confusion, predicted, self.rtol)
        self._note(shift=((weights - 1).abs() @ confusion.sum(0) / 2).expand(len(x)))
        return reweighted(logits, weights)
