"""A client's own labelled data, as training and validation want them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client.training import Augment, TrainingSet
from data import DATASETS, Federation, crop_flip
from models import TwoHead
from settings import Settings
from tta.contrastive import ContrastiveViews


def training_set(federation: Federation, partition: int, settings: Settings, device: torch.device) -> TrainingSet:
    """Return a client's training split on its device, with the training augmentation of the data set."""
    indices = federation.splits[partition].train
    images = federation.images
    labels = torch.from_numpy(images.labels[indices])
    return TrainingSet(
        indices,
        torch.from_numpy(images.pixels[indices]).to(device),
        labels.to(device),
        torch.bincount(labels, minlength=len(images.classes)).to(device),
        _augmentation(settings),
    )


def labelled(
    federation: Federation, indices: NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [n, C, H, W] in [0, 1] and labels [n] of a federation on a device."""
    x = federation.images.batch(indices, device).contiguous(memory_format=torch.channels_last)
    return x, torch.from_numpy(federation.images.labels[indices]).to(device)


def _augmentation(settings: Settings) -> Augment | None:
    """Return what makes random views of training images; None for none."""
    if not settings.augment:
        return None
    if settings.views == "contrastive":
        return contrastive_views(settings)
    return partial(crop_flip, flip=DATASETS[settings.dataset].flip)


def contrastive_views(settings: Settings) -> ContrastiveViews:
    """Return what makes FedICON's views of the run's data set."""
    known = DATASETS[settings.dataset]
    return ContrastiveViews.for_data(flip=known.flip, crop=known.crop)


@torch.no_grad()
def validate(
    model: TwoHead, federation: Federation, partition: int, batch_size: int, device: torch.device, personal: bool
) -> dict[str, Any]:
    """Count what the global head, and with `personal` the personal one, get right on a client's validation split."""
    indices = federation.splits[partition].validation
    heads = {"validation-correct": model.head}
    if personal:
        heads["personal-validation-correct"] = model.personal_head
    right = dict.fromkeys(heads, 0)
    for chosen in np.array_split(indices, max(1, len(indices) // batch_size)):
        labels = torch.from_numpy(federation.images.labels[chosen]).to(device)
        z = model.features(federation.images.batch(chosen, device))
        for name, head in heads.items():
            right[name] += int((head(z).argmax(1) == labels).sum())
    return {"validation-total": len(indices), **right}
