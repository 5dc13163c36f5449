"""Joint training with rotations to tell apart, for test-time training.

Sun et al., "Test-Time Training with Self-Supervision for Generalization under Distribution Shifts", ICML 2020, section
2: the encoder learns the main task and a self-supervised one together; here in every client's local training of FedAvg.
A batch's images are turned by a random multiple of 90 degrees each; the sum of both losses is minimised.
"""

from __future__ import annotations

from torch import Tensor

from client.rules.base import Local
from client.rules.joint import Joint
from client.training import train_network
from models import TwoHead
from tta.ttt import rotation_loss


class Rotation(Joint):
    """Train encoder, head and rotation head together."""

    def train(self, local: Local) -> float:
        """See `Rule.train`; the loss returned is the main task's."""
        weight = local.settings.rotation_weight

        def turned(model: TwoHead, x: Tensor) -> Tensor:
            return weight * rotation_loss(model, x, local.draw)

        return train_network(local.model, local.data, local.objective, local.settings, local.draw, turned)
