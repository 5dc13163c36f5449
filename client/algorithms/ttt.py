"""FedAvg training with rotations to tell apart, for test-time training.

Sun et al., "Test-Time Training with Self-Supervision for Generalization under Distribution Shifts", ICML 2020, section
2: the encoder learns the main task and a self-supervised one together; here in every client's local training of FedAvg.
A batch's images are turned by a random multiple of 90 degrees each; the sum of both losses is minimised.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedtta.client.algorithms.base import LocalContext
from fedtta.client.algorithms.fedavg import FedAvg
from fedtta.client.algorithms.training import train_network
from fedtta.models import TwoHead
from fedtta.tta.ttt import rotation_loss


class TTT(FedAvg):
    """Train encoder, head and rotation head together."""

    heads: ClassVar[frozenset[str]] = frozenset({"personal_head", "rotation_head"})
    stackable: ClassVar[bool] = False  # the cohort knows nothing of the rotation loss

    def train(self, local: LocalContext) -> float:
        """See `LocalAlgorithm.train`; the loss returned is the main task's."""
        weight = local.settings.rotation_weight

        def turned(model: TwoHead, x: Tensor) -> Tensor:
            return weight * rotation_loss(model, x, local.draw)

        return train_network(
            local.model, local.data, local.objective, local.settings, local.draw, local.proximal_mu, turned
        )


ALGORITHMS = {"ttt": TTT()}
