"""Encoder and global head trained together: FedAvg (McMahan et al., AISTATS 2017), and what differs from it elsewhere.

FedProx, q-FFL and GMA differ on the server or by a term of the loss; FedPer (Arivazhagan et al., 2019), FedBN (Li et
al., ICLR 2021) and local training by what is shared. FedAvg+FT (FedTHE, section 5; FedICON, appendix) tunes all
parameters of the final global model for `finetune-epochs` (default 1) on the client's training split before it tests.

Decisions
- Fine-tuning has the optimizer, rate, objective and augmentation of local training, and no pull of FedProx: it is meant
  to leave the global model.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedtta.client.algorithms.base import LocalAlgorithm, LocalContext, minimise, train_epochs
from fedtta.client.algorithms.training import optimizer, smallest_batch, train_network


class FedAvg(LocalAlgorithm):
    """Local training as in FedAvg.

    Parameters
    ----------
    finetune : bool
        Whether the client tunes the final model before it tests; False for methods whose network is personal as it is
        (FedPer, FedBN, local training).
    """

    heads: ClassVar[frozenset[str]] = frozenset({"personal_head"})
    stackable: ClassVar[bool] = True

    def __init__(self, finetune: bool = True) -> None:
        self.finetune = finetune

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; this is `fedtta.client.algorithms.training.train_network`."""
        return train_network(local.model, local.data, local.objective, local.settings, local.draw, local.proximal_mu)

    def personalize(self, local: LocalContext) -> None:
        """Tune encoder and head on the training split, or leave them as they are."""
        epochs = local.settings.finetune_epochs
        if not self.finetune or not epochs:
            local.model.eval()
            return
        smallest, model = smallest_batch(local.model, local.settings), local.model
        weights = list(model.shared_parameters().values())
        descent = optimizer(weights, local.settings)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = local.loss(local.outputs(model, x), labels)
            minimise(loss, weights, descent)
            return loss.detach()

        model.train()
        train_epochs(local, "fine-tuning", epochs, step, [*weights, *model.buffers()], smallest)
        model.eval()


#: "personalized" trains like "fedavg" and tests the network as it is (FedPer, FedBN, local training).
ALGORITHMS = {"fedavg": FedAvg(), "personalized": FedAvg(finetune=False)}
