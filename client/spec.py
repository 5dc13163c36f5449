"""What a client's network is built from."""

from __future__ import annotations

from typing import Any

from data import DATASETS, Images
from settings import assignments


def network_spec(images: Images, model: str, options: str, dataset: str, image_size: int) -> dict[str, Any]:
    """Return the arguments of `models.build`, without the initial weights' seed unless `options` has one.

    Parameters
    ----------
    images : Images
        Their classes and channels count.
    model, options, dataset, image_size
        As in the settings.
    """
    channels = int(images.pixels.shape[1])
    mean, std = DATASETS[dataset].normalisation(channels)
    return {
        "name": model,
        "num_classes": len(images.classes),
        "in_channels": channels,
        "image_size": image_size,
        "mean": mean,
        "std": std,
        **assignments(options, "model-options"),
    }
