"""What kNN-Per needs of a client: its training images' features, and validation images to choose a weight on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from client.local_data import labelled
from data import Federation
from models import TwoHead
from settings import Settings
from tta.knn_per import Datastore, KNNPer, choose_weight


@dataclass(frozen=True)
class Neighbours:
    """What a client memorises under one network.

    Parameters
    ----------
    store : Datastore
        Features and labels of the training split.
    x, y : Tensor [n, C, H, W], [n]
        The validation split.
    """

    store: Datastore
    x: Tensor
    y: Tensor

    def best_weight(self, adapter: KNNPer, batch_size: int) -> float:
        """Return the weight of the vote that is right most often on the validation split; ValueError without one."""
        if not len(self.y):
            raise ValueError("knn_per: this client has no validation samples to choose weight on; set knn_per[weight=]")
        parts = [adapter.parts(part) for part in self.x.split(batch_size)]
        votes, heads = (torch.cat(column) for column in zip(*parts, strict=True))
        return choose_weight(votes, heads, self.y)


@torch.no_grad()
def memorise(
    model: TwoHead, federation: Federation, partition: int, settings: Settings, device: torch.device
) -> Neighbours:
    """Return what a client memorises under the network as it is, in evaluation mode."""
    model.eval()
    split = federation.splits[partition]
    x, y = labelled(federation, split.train, device)
    z = torch.cat([model.features(part) for part in x.split(settings.eval_batch_size)])
    return Neighbours(Datastore(z, y), *labelled(federation, split.validation, device))
