"""EM: predictions are corrected for the label prior of each batch, which EM estimates.

Adjusting the outputs of a classifier to new a priori probabilities: a simple procedure (Saerens, Latinne, Decaestecker,
Neural Computation 2002), as a baseline of Adaptive Test-Time Personalization (ATP, NeurIPS 2023). The estimator and its
equation are in `label_shift`. The source prior is the mean label frequency of the clients that trained.

Deviations of ATP's published code, which we do not follow: two iterations (here until nothing moves, at most 100) and a
uniform source prior, whatever the training labels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tta.base import Adapter
from tta.bn_adapt import check_finite
from tta.heads import check_number
from tta.label_shift import em_prior_of_logs, required, reweighted
from tta.statistics import Statistics


class EM(Adapter):
    """Estimate each batch's label prior by EM and predict with it; nothing is carried from batch to batch.

    A batch of one sample says all it knows about its own class: its prediction nears certainty.

    Parameters
    ----------
    model : nn.Module
        Gives logits [B, K]; `models.TwoHead` predicts with its global head.
    statistics : Statistics
        Its `label_prior` [K], the source's p_s, is needed.
    iterations : int
        Of EM, at most, at least 1.
    tolerance : float
        EM stops when no entry of the prior moves by more; 0 or more.
    record : bool
        Keep the report: `shift` [n], the distance ½‖p_t - p_s‖₁ in [0, 1], for every sample that of its batch.

    Raises
    ------
    ValueError
        An option is out of range, or there is no label prior or one that is no distribution.
    """

    per: ClassVar[Literal["sample", "batch"]] = "batch"

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        *,
        iterations: int = 100,
        tolerance: float = 1e-6,
        record: bool = True,
    ) -> None:
        if iterations < 1:
            raise ValueError(f"iterations={iterations} must be at least 1")
        check_number("tolerance", tolerance, 0, 1)
        self._source = required(statistics, "label_prior", "EM", 1)
        super().__init__(model, record=record)
        self.iterations, self.tolerance = iterations, tolerance

    def _predict(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        check_finite("the network's output", logits)
        source = self._source.to(logits.device)
        if logits.shape[1] != len(source):
            raise ValueError(f"label_prior has {len(source)} classes, the network's output {logits.shape[1]}")
        if len(x) == 0:
            return torch.softmax(logits, 1)
        prior = em_prior_of_logs(logits.double().log_softmax(1), source, self.iterations, self.tolerance)
        self._note(shift=((prior - source).abs().sum() / 2).expand(len(x)))
        return reweighted(logits, torch.where(source > 0, prior / source, 0.0))
