"""ATP: Adaptive Test-Time Personalization for Federated Learning (Bao, Wei, Wang, He; NeurIPS 2023).

Source clients learn how fast, and in which direction, each module l of a network should adapt without labels; target
clients then adapt with these rates α. Section 4, Algorithms 1 and 2:

    h[l] = -∂/∂w[l] mean_b H(p(f(x_b; w_G)))       a parameter, eq. 4
    h[l] = batch statistic - running statistic     a BatchNorm mean or variance, eq. 5
    w = w_G + α[l] h[l]                            eq. 6; every batch starts from w_G
    α ← α - η <h[l], ∂CE(f(X; w), Y)/∂w[l]> / √numel[l]     eq. 7, on labelled batches of source clients

What the paper leaves open. Both kinds of h come from one forward pass in evaluation mode, so that a layer's batch
statistic is that of its input when nothing before it is adapted. The batch variance is the unbiased one; with fewer
than two values its direction is zero. A running variance is clamped at 0 after the step, and w is the point at which
eq. 7 is evaluated: the clamp is not differentiated. An empty batch has zero directions and is no batch of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tta.atp_modules import (
    Adapt,
    call_with,
    check_rates,
    finite_logits,
    module_tensors,
    modules,
    moved_modules,
    zero_rates,
)
from tta.atp_steps import Refinement, Tensors, adapted, directions, refine, refine_with_loss
from tta.base import Adapter
from tta.heads import check_choice

__all__ = [
    "ATP",
    "Adapt",
    "Refinement",
    "adapted",
    "call_with",
    "check_rates",
    "directions",
    "modules",
    "refine",
    "refine_with_loss",
    "zero_rates",
]


class ATP(Adapter):
    """Adapt every module of the network by its learned rate, to each batch anew or to the stream so far.

    Defined per batch (the paper's default: 20 samples). The network itself is never changed, and every batch starts
    from it. With all rates zero the predictions are exactly the network's own.

    Parameters
    ----------
    model : nn.Module
        w_G; gives logits [B, K], for a two-head model those of the global head.
    rates : mapping
        α, learned with `refine`: see `check_rates`.
    mode : str
        "batch" (Algorithm 2, TTBA): each batch adapts on its own directions. "online" (OTTA): on the mean of the
        directions of all batches so far, this one included; the clamp comes after the mean.
    adapt : str
        "params" or "stats" (the variants of Table 4) take the rates of all other modules as zero.
    record : bool
        Keep the report: `update_norms` [batches, D], the norm ‖α[l] h[l]‖ of every batch's step in every module, in
        the order of `names`, before the clamp; online, h is the mean.

    Raises
    ------
    ValueError
        A rate is missing, unknown or not finite, or an option is unknown.
    """

    per: ClassVar[Literal["sample", "batch"]] = "batch"

    def __init__(
        self,
        model: nn.Module,
        rates: Mapping[str, float],
        mode: Literal["batch", "online"] = "batch",
        *,
        adapt: Adapt = "all",
        record: bool = True,
    ) -> None:
        super().__init__(model, record=record)
        check_choice("mode", mode, ("batch", "online"))
        self.mode = mode
        self.adapt = adapt
        moved = set(moved_modules(model, adapt))
        #: α by module; 0 where `adapt` leaves a module alone.
        self.rates = {name: rate if name in moved else 0.0 for name, rate in check_rates(model, rates).items()}
        #: Names of the D modules, in order of definition.
        self.names = list(self.rates)
        self._mean: Tensors = {}  # online: the mean direction of the stream so far
        self._batches = 0  # online: how many it is a mean of
        self.reset()

    def _predict(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return self.model(x).softmax(1)  # no batch of the stream
        if self.mode == "batch" and not any(self.rates.values()):
            self._note_norms(None)
            return finite_logits(self.model(x), "the network's output").softmax(1)
        h = directions(self.model, x, self.adapt)
        batches = self._batches + 1
        if self.mode == "online":
            h = {name: torch.lerp(mean, h[name], 1 / batches) for name, mean in self._mean.items()}
        w = adapted(self.model, h, self.rates)
        logits = finite_logits(call_with(self.model, w, x), "the adapted network's output")
        self._note_norms(h)
        if self.mode == "online":
            self._mean, self._batches = h, batches
        return logits.softmax(1)

    def _note_norms(self, h: Mapping[str, Tensor] | None) -> None:
        """Record ‖α[l] h[l]‖ of a batch; None stands for a step that all rates make zero."""
        if not self.record:
            return
        norms = torch.zeros(len(self.names), dtype=torch.float64)
        if h is not None:
            lengths = torch.stack([torch.linalg.vector_norm(h[name]).double() for name in self.names])
            norms = lengths.cpu() * torch.tensor(list(self.rates.values()), dtype=torch.float64).abs()
        self._note(update_norms=norms[None])  # [1, D]

    def _reset(self) -> None:
        self._batches = 0
        if self.mode == "online":
            own = module_tensors(self.model)
            self._mean = {name: torch.zeros_like(value, requires_grad=False) for name, value in own.items()}

    def _state(self) -> dict[str, Tensor]:
        if self.mode == "batch":
            return {}
        mean = {f"mean.{name}": value for name, value in self._mean.items()}
        return {"batches": torch.tensor(self._batches), **mean}

    def _load(self, state: dict[str, Tensor]) -> None:
        if self.mode == "batch":
            return
        batches = state["batches"]
        if batches.shape != () or batches.is_floating_point() or int(batches) < 0:
            raise ValueError(f"batches must be one non-negative integer, got {batches}")
        mean = {}
        for name, old in self._mean.items():
            value = state[f"mean.{name}"]
            if value.shape != old.shape:
                raise ValueError(f"mean.{name}: shape {tuple(value.shape)} does not fit {tuple(old.shape)}")
            mean[name] = value.detach().to(old, copy=True)
        self._mean, self._batches = mean, int(batches)
