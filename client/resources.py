"""What the clients of one process share: images and splits, the network, the processor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fedtta.data import DATASETS, Federation, Images, load
from fedtta.models import TwoHead, build
from fedtta.settings import Scalar, Settings, SettingsError, assignments, from_config


def federation_of(settings: Settings) -> Federation:
    """Return images and splits of all clients; the same settings give the same splits in every process."""
    return _federation(tuple(settings.select("data", "source").items()))


def network_spec(images: Images, settings: Settings) -> dict[str, Any]:
    """Return the arguments of `fedtta.models.build`; the seed of initial weights only if `model-options` has one."""
    channels = int(images.pixels.shape[1])
    mean, std = DATASETS[settings.dataset].normalisation(channels)
    return {
        "name": settings.model,
        "num_classes": len(images.classes),
        "in_channels": channels,
        "image_size": settings.image_size,
        "mean": mean,
        "std": std,
        **assignments(settings.model_options, "model-options"),
    }


def resolve_device(name: str) -> torch.device:
    """Turn the setting `device` into a torch device.

    Raises
    ------
    SettingsError
        A GPU is asked for by name and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingsError(
            f"device = {name!r}: this process sees {torch.cuda.device_count()} GPUs; allowed are auto, cpu"
            + "".join(f", cuda:{i}" for i in range(torch.cuda.device_count()))
        )
    return device


@lru_cache(maxsize=2)
def _federation(chosen: tuple[tuple[str, Scalar], ...]) -> Federation:
    """Load the images and divide them among the clients."""
    settings = from_config(dict(chosen))
    options: dict[str, Any] = dict(assignments(settings.dataset_options, "dataset-options"))
    images = load(
        settings.dataset,
        root=settings.data_dir or None,
        image_size=settings.image_size,
        download=settings.download,
        fraction=settings.fraction,
        seed=settings.seed,
        **options,
    )
    return Federation.create(
        images,
        settings.clients,
        scheme=settings.partition,
        alpha=settings.alpha,
        seed=settings.seed,
        step_ratio=settings.step_ratio,
        target_fraction=settings.target_fraction,
        domains=settings.domains,
        target_domain=settings.target_domain,
        unseen_domain=settings.unseen_domain,
        resample_splits=settings.split == "published",
        train_part=settings.train_part,
        test_part=settings.test_part,
    )


@lru_cache(maxsize=2)
def shared_network(federation: Federation, settings: Settings) -> TwoHead:
    """Build the network that this process uses for all clients; its weights are loaded for each request."""
    network = build(**{"seed": 0, **network_spec(federation.images, settings)})
    # convolutions run faster in this memory format, on CPUs as on GPUs; values are the same
    return network.to(resolve_device(settings.device)).to(memory_format=torch.channels_last)
