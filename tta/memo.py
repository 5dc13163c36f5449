"""MEMO: before predicting a sample, tune all weights until its augmented views agree; then forget the tuning.

MEMO: Test Time Robustness via Adaptation and Augmentation (Zhang, Levine, Finn, NeurIPS 2022), as a baseline
of Test-Time Robust Personalization for Federated Learning (Jiang and Lin, ICLR 2023, appendix B, Algorithm 3;
32 views, 3 steps of SGD at 5e-4, appendix C.1). Marginal entropy, views and descent are in `tuning`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tta.augmix import AugMix
from tta.base import Adapter
from tta.heads import check_choice
from tta.statistics import Statistics
from tta.tuning import Augment, Readout, Tuning, marginal_entropy, tune_and_predict

__all__ = ["MEMO", "marginal_entropy"]


class MEMO(Adapter):
    """Marginal entropy minimisation with one test point: every sample starts from the given weights.

    Parameters
    ----------
    model : nn.Module
        The network; a `TwoHead` where `head` is "personal". All its parameters are tuned (as copies),
        whatever their `requires_grad`.
    statistics : Statistics or None
        Not needed.
    head : str
        Which head predicts and is tuned: "global" (`model(x)`) or "personal".
    views, steps, lr, augment, seed, mode, chunk
        See `Tuning`; no augment means `AugMix()`, which needs images [B, C, H, W].
    record : bool
        Keep the report: "loss" [n, steps], the marginal entropy (nats) of each sample before each step.
    """

    per: ClassVar[Literal["sample", "batch"]] = "sample"

    def __init__(
        self,
        model: nn.Module,
        statistics: Statistics | None = None,
        head: Literal["global", "personal"] = "global",
        views: int = 32,
        steps: int = 3,
        lr: float = 5e-4,
        augment: Augment | None = None,
        seed: int = 0,
        mode: Literal["auto", "loop", "vmap"] = "auto",
        chunk: int | None = None,
        *,
        record: bool = True,
    ) -> None:
        super().__init__(model, record=record)
        check_choice("head", head, ("global", "personal"))
        self.tuning = Tuning(views, steps, lr, augment or AugMix(), seed, mode, chunk)
        self._readout = Readout(model, head)
        self._position = 0

    def _predict(self, x: Tensor) -> Tensor:
        unused = x.new_ones(len(x))  # there is nothing to mix
        logits, losses = tune_and_predict(self._readout, x, unused, self._position, self.tuning)
        self._note(loss=losses)
        self._position += len(x)
        return logits.softmax(1)

    def _reset(self) -> None:
        self._position = 0

    def _state(self) -> dict[str, Tensor]:
        return {"position": torch.tensor(self._position)}

    def _load(self, state: dict[str, Tensor]) -> None:
        self._position = checked_position(state["position"])


def checked_position(value: Tensor) -> int:
    """Return a stream position from a state.

    Raises
    ------
    ValueError
        It is not one non-negative integer.
    """
    if value.shape != () or value.is_floating_point() or int(value) < 0:
        raise ValueError(f"position must be one non-negative integer, got {value}")
    return int(value)
