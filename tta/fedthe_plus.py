"""FedTHE+: Test-Time Robust Personalization for Federated Learning (Liangze Jiang, Tao Lin; ICLR 2023).

Section 4.3 and appendix B, Algorithm 2: FedTHE finds the head weight e* of a sample (lines 1 to 8), then MEMO
tunes encoder, head and personal head on it (lines 9, 10) and the tuned weights predict it with the same e*:

    w ← w - η ∇_w H(1/V Σ_v p(e* ŷ^g(x_v; w) + (1-e*) ŷ^l(x_v; w))),   16 views, 3 steps of SGD at 5e-4

The tuning is forgotten after each sample. e* and the history come from the untuned weights, so the state of
the stream is FedTHE's, and tuning on a sample cannot change the weight of a later one.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from fedtta.tta.augmix import AugMix
from fedtta.tta.base import Adapter
from fedtta.tta.fedthe import FedTHE
from fedtta.tta.heads import two_heads
from fedtta.tta.memo import Readout, Tuning, tune_and_predict
from fedtta.tta.statistics import Statistics
from fedtta.tta.views import Augment


class FedTHEPlus(Adapter):
    """Choose the head weight of every sample, tune all weights on it, then predict it.

    Parameters
    ----------
    model : nn.Module
        A two-head network. All its parameters are tuned (as copies), whatever their `requires_grad`.
    statistics : Statistics
        `descriptor_local` and `descriptor_global`, [d] each.
    alpha, beta, steps, lr, objective, history
        See `FedTHE`; with `history="batch"` results depend on the batches.
    views, tune_steps, tune_lr, augment, seed, mode, chunk
        See `Tuning`; no augment means `AugMix()`, which needs images [B, C, H, W].
    record : bool
        Keep the report: FedTHE's `weight` and `similarity`, [n] each, and `loss` [n, tune_steps], the
        marginal entropy (nats) of each sample before each step.

    Raises
    ------
    ValueError
        A statistic is missing, of the wrong shape or not finite, or an option is out of range.
    """

    name = "fedthe_plus"
    paper = "Test-Time Robust Personalization for Federated Learning (ICLR 2023)"
    adapts = "the weight of the global head, then all parameters for one sample"
    needs = frozenset({"personal_head", "descriptor", "gradients"})
    views = AugMix

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        alpha: float = 0.1,
        beta: float = 0.3,
        steps: int = 20,
        lr: float = 0.1,
        objective: Literal["slw", "em", "fa", "half"] = "slw",
        history: Literal["sample", "batch"] = "sample",
        views: int = 16,
        tune_steps: int = 3,
        tune_lr: float = 5e-4,
        augment: Augment | None = None,
        seed: int = 0,
        mode: Literal["auto", "loop", "vmap"] = "auto",
        chunk: int | None = None,
        record: bool = True,
    ) -> None:
        self._fedthe = FedTHE(model, statistics, alpha, beta, steps, lr, objective, history)
        super().__init__(model, record=record)
        self.per = self._fedthe.per
        self.tuning = Tuning(views, tune_steps, tune_lr, augment or AugMix(), seed, mode, chunk)
        self._readout = Readout(model, "mix")
        self._position = 0

    def _predict(self, x: Tensor) -> Tensor:
        trial = copy.copy(self._fedthe)  # replaces ours once nothing below has raised
        trial._records = {}
        weight = trial.weigh(*two_heads(self.model, x))  # e*, [B]
        logits, losses = tune_and_predict(self._readout, x, weight.to(x.dtype), self._position, self.tuning)
        self._note(**trial._columns(), loss=losses)
        self._fedthe = trial
        self._position += len(x)
        return logits.softmax(1)

    def _reset(self) -> None:
        self._fedthe.reset()
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        return {**self._fedthe._state(), "position": torch.tensor(self._position)}

    def _load(self, state: dict[str, Tensor]) -> None:
        history = dict(state)
        position = int(history.pop("position"))
        self._fedthe.load_state_dict(history)
        self._position = position
