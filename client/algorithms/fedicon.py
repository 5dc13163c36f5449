"""FedICON's two kinds of rounds ("Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning", 2023).

Encoder rounds (section 3.2, eq. 2): a contrastive loss over two random views of every image, encoder only. Classifier
rounds: the head, by cross-entropy, on the frozen encoder; at the end each client makes the head its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedtta.client.algorithms.base import LocalAlgorithm, LocalContext, minimise, train_epochs
from fedtta.client.algorithms.training import contrastive_views, optimizer, smallest_batch
from fedtta.settings import Settings
from fedtta.tta.contrastive import self_contrastive, supervised_contrastive


class Contrastive(LocalAlgorithm):
    """Train the encoder so that views of one class, or of one image, lie together.

    Parameters
    ----------
    labels : bool
        Use labels (eq. 2); without them only the views of one image belong together (eq. 5; FedICON-us).
    """

    def __init__(self, labels: bool) -> None:
        self.labels = labels

    def train(self, local: LocalContext) -> float:
        """Train the encoder for `local_epochs`; see `LocalAlgorithm.train`."""
        model, smallest = local.model, smallest_batch(local.model, local.settings)
        views = contrastive_views(local.settings)
        weights = list(model.encoder.parameters())
        descent = optimizer(weights, local.settings)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            both = torch.cat([views(x, local.draw), views(x, local.draw)])
            loss = self._loss(local.outputs(model.features, both), labels, local.settings)
            minimise(loss, weights, descent)
            return loss.detach()

        model.train()
        plain = replace(local, data=replace(local.data, augment=None))  # the two views take its place
        trained = [*weights, *model.buffers()]
        loss = train_epochs(plain, "contrastive training", local.settings.local_epochs, step, trained, smallest)
        model.eval()
        return loss

    def _loss(self, z: Tensor, labels: Tensor, settings: Settings) -> Tensor:
        """Return the loss of z [2B, d], first views first."""
        temperatures = settings.temperature, settings.base_temperature or None
        if self.labels:
            return supervised_contrastive(z, labels.repeat(2), *temperatures)
        first, second = z.chunk(2)
        return self_contrastive(first, second, *temperatures)

    def personalize(self, local: LocalContext) -> None:
        """Leave the encoder as it is: it is the classifier that becomes the client's own."""
        local.model.eval()


class Classifier(LocalAlgorithm):
    """Train the head on the frozen encoder."""

    def train(self, local: LocalContext) -> float:
        """Train the head for `local_epochs`; see `LocalAlgorithm.train`."""
        return _train_head(local, local.settings.local_epochs)

    def personalize(self, local: LocalContext) -> None:
        """Make the head the client's own: `classifier_epochs` more, on its data alone."""
        _train_head(local, local.settings.classifier_epochs)


def _train_head(local: LocalContext, epochs: int) -> float:
    """Train the global head on the frozen encoder; return the mean loss of the last epoch (NaN without any)."""
    model = local.model.eval()
    weights = list(model.head.parameters())
    descent = optimizer(weights, local.settings)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            z = local.outputs(model.features, x)
        loss = local.loss(model.head(z), labels)
        minimise(loss, weights, descent)
        return loss.detach()

    return train_epochs(local, "training of the classifier", epochs, step, weights)


ALGORITHMS = {
    "supervised_contrastive": Contrastive(labels=True),
    "self_contrastive": Contrastive(labels=False),
    "classifier": Classifier(),
}
