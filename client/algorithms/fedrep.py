"""FedRep: "Exploiting Shared Representations for Personalized Federated Learning", Collins et al., ICML 2021.

Algorithm 1: a client trains its own head on the received encoder, then the encoder under that head; the encoder alone
is averaged (strategy: share all but "head.*"). The head is the network's `head`, personal because it does not travel.

Counts: many epochs for the head, one for the encoder, as in the paper; its published code trains the representation for
one of the local epochs. Here the head has `local-epochs`, which is 5 in the papers that compare with FedRep.
(FedTHE's code gives the encoder as many epochs as the head: `encoder_epochs=5`.)

Decisions
- While the head is trained the encoder is in evaluation mode: frozen means that its running statistics are, too.
- Each phase has a fresh optimizer of the run's own kind, with its rate, momentum and decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtta.client.algorithms.base import LocalAlgorithm, LocalContext, minimise, train_epochs
from fedtta.client.algorithms.training import optimizer, smallest_batch


class FedRep(LocalAlgorithm):
    """The head first, then the encoder.

    Parameters
    ----------
    encoder_epochs : int
        Epochs of the encoder a round, at least 1.

    Raises
    ------
    ValueError
        `encoder_epochs` is below 1.
    """

    def __init__(self, encoder_epochs: int = 1) -> None:
        if encoder_epochs < 1:
            raise ValueError(f"encoder_epochs = {encoder_epochs}; allowed is 1 or more")
        self.encoder_epochs = encoder_epochs

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; the loss is that of the encoder's last epoch."""
        smallest = smallest_batch(local.model, local.settings)
        self._train_head(local)
        model = local.model
        weights = list(model.encoder.parameters())
        descent = optimizer(weights, local.settings)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = local.loss(local.outputs(model, x), labels)
            minimise(loss, weights, descent)
            return loss.detach()

        model.train()
        trained = [*weights, *model.buffers()]
        loss = train_epochs(local, "training of the encoder", self.encoder_epochs, step, trained, smallest)
        model.eval()
        return loss

    def _train_head(self, local: LocalContext) -> None:
        model = local.model
        weights = list(model.head.parameters())
        descent = optimizer(weights, local.settings)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                z = local.outputs(model.features, x)  # (B, d)
            loss = local.loss(model.head(z), labels)
            minimise(loss, weights, descent)
            return loss.detach()

        model.eval()
        train_epochs(local, "training of the head", local.settings.local_epochs, step, weights)

    def personalize(self, local: LocalContext) -> None:
        """Leave the network as it is: the received encoder and the client's own head."""
        local.model.eval()


ALGORITHMS = {"fedrep": FedRep()}
