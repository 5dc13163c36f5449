"""FedRoD: "On Bridging Generic and Personalized Federated Learning for Image Classification", Chen & Chao, ICLR 2022.

Two heads on one encoder, trained in the same steps. The global head and the encoder have a loss that is robust to class
imbalance (balanced softmax; `LocalContext.objective`). The personal head has plain cross-entropy on the sum of both
logits, CE(global(z) + personal(z), y), in which encoder and global head are constants; it never leaves the device.

Decisions
- Both losses use the values before the step: one forward pass, one optimizer.
- Both heads are linear, as in FedTHE's comparison (ICLR 2023, appendix C.2). The personal one may have no bias.
- What the client predicts with is the sum of the logits: `fedtta.tta.heads.FedRoD`.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedtta.client.algorithms.base import LocalAlgorithm, LocalContext, minimise, train_epochs
from fedtta.client.algorithms.training import optimizer, smallest_batch


class FedRoD(LocalAlgorithm):
    """Encoder, global head and personal head together."""

    heads: ClassVar[frozenset[str]] = frozenset({"residual_head"})

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; the loss is that of the global head."""
        smallest, model = smallest_batch(local.model, local.settings), local.model
        weights = list(model.parameters())
        descent = optimizer(weights, local.settings)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            z = local.outputs(model.features, x)  # (B, d)
            logits = model.head(z)
            both = logits.detach() + model.personal_head(z.detach())
            loss = local.loss(logits, labels)
            minimise(loss + functional.cross_entropy(both, labels), weights, descent)
            return loss.detach()

        model.train()
        trained = [*weights, *model.buffers()]
        loss = train_epochs(local, "FedRoD", local.settings.local_epochs, step, trained, smallest)
        model.eval()
        return loss

    def personalize(self, local: LocalContext) -> None:
        """Leave the network as it is: the personal head is part of it."""
        local.model.eval()


ALGORITHMS = {"fedrod": FedRoD()}
