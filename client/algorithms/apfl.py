"""APFL: "Adaptive Personalized Federated Learning", Deng, Kamani and Mahdavi, 2020 (arXiv 2003.13461), Algorithm 1.

A client keeps a local model v and tests with the mixture v̄ = α v + (1-α) w: α weighs the local model, and α = 0
is FedAvg. On each batch, from the values before it:
w ← w - η ∇f(w), the global model as in FedAvg;  v ← v - η α ∇f(v̄);
and on the first batch of a round, from the second batch on in effect, α ← clip(α - η <v - w, ∇f(v̄)>, 0, 1).

Defaults: α starts at 0.5 (FedTHE's code) and moves once a round, with the local rate (FedTHE, ICLR 2023, appendix C.2).
The first batch decides, as in the published codes: there w is the global model, so α weighs client against server.

Decisions and deviations
- Weights are mixed, as in the paper; FedTHE's code mixes logits instead.
- FedTHE's code weighs the global model with α (α times its logits, 1-α times the personal model's), but moves α along
  <v - w, ·>, as if it weighed the local one: α moves away from the model that helps. `apfl-weighs = "global"` does so,
  too: v̄ = α w + (1-α) v, v ← v - η (1-α) ∇f(v̄), α as above. Until α leaves 0.5, both readings are one.
- The published codes add 0.02 α to the slope of α; the paper has no such term, and neither is it here.
- v̄ has BatchNorm statistics of its own, from its own passes. Running statistics are not mixed.
- w and v have an optimizer of the run's kind each; weight decay acts on v, not on v̄. α always moves by a plain step.
- v starts as the first w that the client receives, so that α stays where it starts in that round.
- Tested is v̄ with the final received w: Algorithm 1 right after the last synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtta.client.algorithms.base import (
    LocalAlgorithm,
    LocalContext,
    gradients,
    keep_network,
    kept_network,
    minimise,
    train_epochs,
)
from fedtta.client.algorithms.training import optimizer, smallest_batch
from fedtta.models import TwoHead

PREFIX, ALPHA = "apfl.", "apfl.alpha"


class APFL(LocalAlgorithm):
    """A mixture of a local and the global model; private tensors: "apfl.alpha" [1] and "apfl.<name>" for all of v.

    Parameters
    ----------
    alpha : float
        α at the start, in [0, 1].

    Raises
    ------
    ValueError
        `alpha` is outside [0, 1].
    """

    def __init__(self, alpha: float = 0.5) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha = {alpha!r}; allowed is a number from 0 to 1")
        self.alpha = alpha

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; the loss is that of the global model."""
        smallest, settings = smallest_batch(local.model, local.settings), local.settings
        mixture = self._mixture(local)
        w, v = list(mixture.w.values()), list(mixture.v.values())
        descent_w, descent_v = optimizer(w, settings), optimizer(v, settings)
        first = True

        def step(x: Tensor, labels: Tensor) -> Tensor:
            nonlocal first
            slopes = mixture.slopes(local, x, labels)  # ∇f(v̄), before w moves
            towards = mixture.slope_of_alpha(slopes)
            loss = local.loss(local.outputs(local.model, x), labels)
            minimise(loss, w, descent_w)
            for value, slope in zip(v, slopes, strict=True):
                value.grad = None if slope is None else mixture.share.to(slope) * slope
            descent_v.step()
            if first:
                mixture.alpha.copy_((mixture.alpha - settings.learning_rate * towards).clamp(0, 1))
            first = False
            return loss.detach()

        local.model.train()
        mixture.personal.train()
        trained = [*w, *v, *local.model.buffers(), *mixture.personal.buffers(), mixture.alpha]
        loss = train_epochs(local, "APFL", settings.local_epochs, step, trained, smallest)
        local.model.eval()
        local.own.update({**keep_network(mixture.personal, PREFIX), ALPHA: mixture.alpha.reshape(1).clone()})
        return loss

    @torch.no_grad()
    def personalize(self, local: LocalContext) -> None:
        """Turn w into v̄, with v̄'s BatchNorm statistics; a client without a v keeps w."""
        if ALPHA in local.own:
            mixture = self._mixture(local)
            mixed = mixture.weights()
            local.model.load_global_state(mixture.personal.global_state())
            for name, value in mixed.items():  # each tensor once, also one that several layers share
                mixture.w[name].copy_(value)
        local.model.eval()

    def _mixture(self, local: LocalContext) -> _Mixture:
        """Return v, w and α as the client has them.

        Raises
        ------
        ValueError
            α or v is missing, does not fit or is out of range.
        """
        kept = {name for name in local.own if name.startswith(PREFIX)}
        alpha = local.own.get(ALPHA) if kept else torch.tensor([self.alpha], dtype=torch.float64)
        if alpha is None or alpha.shape != (1,) or not 0 <= float(alpha) <= 1:
            raise ValueError(f"{ALPHA} = {alpha}; expected is one number from 0 to 1")
        if kept == {ALPHA}:
            raise ValueError(f"{ALPHA} is there, but no model that belongs to it")
        personal = kept_network(local.model, local.own, PREFIX)
        number = alpha.detach().to(local.data.labels.device, torch.float64).reshape(()).clone()
        weighs_local = local.settings.apfl_weighs == "local"
        return _Mixture(number, personal, _trained(local.model), _trained(personal), weighs_local)


def _trained(network: TwoHead) -> dict[str, nn.Parameter]:
    """Return the parameters of encoder and head by name, but for frozen ones, which w and v have in common."""
    return {name: value for name, value in network.shared_parameters().items() if value.requires_grad}


@dataclass
class _Mixture:
    """α [], the network that holds v and the BatchNorm statistics of v̄, and the parameters w and v by name."""

    alpha: Tensor
    personal: TwoHead
    w: dict[str, nn.Parameter]
    v: dict[str, nn.Parameter]
    weighs_local: bool = True

    @property
    def share(self) -> Tensor:
        """The share [] of v in v̄: α, or 1-α where α weighs the global model."""
        return self.alpha if self.weighs_local else 1 - self.alpha

    def weights(self) -> dict[str, Tensor]:
        """Return v̄ as new tensors, detached."""
        share = self.share
        pairs = {name: (v.detach(), self.w[name].detach()) for name, v in self.v.items()}
        return {name: share.to(v) * v + (1 - share).to(w) * w for name, (v, w) in pairs.items()}

    def slopes(self, local: LocalContext, x: Tensor, labels: Tensor) -> list[Tensor | None]:
        """Return ∇f(v̄) on a batch, in the order of the parameters; the pass updates v̄'s BatchNorm statistics."""
        mixed = {name: value.requires_grad_() for name, value in self.weights().items()}
        logits = local.outputs(lambda batch: functional_call(self.personal, mixed, (batch,)), x)
        return gradients(local.loss(logits, labels), list(mixed.values()))

    @torch.no_grad()
    def slope_of_alpha(self, slopes: list[Tensor | None]) -> Tensor:
        """Return <v - w, ∇f(v̄)> [], the derivative of f(v̄) by the share of v."""
        total = torch.zeros_like(self.alpha)
        for (name, v), slope in zip(self.v.items(), slopes, strict=True):
            if slope is not None:
                total += ((v - self.w[name]).double() * slope.double()).sum()
        return total


ALGORITHMS = {"apfl": APFL()}
