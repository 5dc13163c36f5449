"""Ditto: "Ditto: Fair and Robust Federated Learning Through Personalization", Li et al., ICML 2021, Algorithm 1.

The global model w is trained as in FedAvg. Beside it each client trains a model v of its own,
v ← v - η (∇f(v) + λ (v - w_t)), pulled towards the w_t that it received, and tests with v.

Defaults: λ = `ditto-lambda` = 1 and no weight decay for v, as in FedTHE (ICLR 2023, appendix C). v has as many epochs
as w, its own shuffling (drawn after that of w, which is then exactly FedAvg's) and a fresh optimizer a round.

Decisions
- v is encoder and head with all BatchNorm statistics; the pull is on what has a gradient.
- v starts as the first w_t that the client receives.
- With momentum or Adam the pull goes through the optimizer like the rest of the gradient. (FedTHE's code adds it after
  the step, where it has no effect.)
"""

from __future__ import annotations

from torch import Tensor

from fedtta.client.algorithms.base import (
    LocalAlgorithm,
    LocalContext,
    keep_network,
    kept_network,
    minimise,
    train_epochs,
)
from fedtta.client.algorithms.training import optimizer, proximal_term, smallest_batch, train_network
from fedtta.models import TwoHead

PREFIX = "ditto."


class Ditto(LocalAlgorithm):
    """A personal model that stays near the global one; private tensors: "ditto.<name>" for all of v."""

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; the loss is that of the global model."""
        strength = local.settings.ditto_lambda  # λ
        personal = kept_network(local.model, local.own, PREFIX)
        received = [value.detach().clone() for value in local.model.shared_parameters().values()]
        loss = train_network(local.model, local.data, local.objective, local.settings, local.draw, local.proximal_mu)
        self._train_personal(local, personal, received, strength)
        local.own.update(keep_network(personal, PREFIX))
        return loss

    def _train_personal(self, local: LocalContext, personal: TwoHead, received: list[Tensor], strength: float) -> None:
        smallest = smallest_batch(local.model, local.settings)
        weights = list(personal.shared_parameters().values())
        descent = optimizer(weights, local.settings.replace(weight_decay=0.0))

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = local.loss(local.outputs(personal, x), labels)
            minimise(loss + proximal_term(weights, received, strength), weights, descent)
            return loss.detach()

        personal.train()
        trained = [*weights, *personal.buffers()]
        train_epochs(local, "Ditto's personal model", local.settings.local_epochs, step, trained, smallest)
        personal.eval()

    def personalize(self, local: LocalContext) -> None:
        """Load v; a client that has none yet tests with the received model."""
        local.model.load_global_state(kept_network(local.model, local.own, PREFIX).global_state())
        local.model.eval()


ALGORITHMS = {"ditto": Ditto()}
