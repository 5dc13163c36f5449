"""The model registry: every backbone by name, and `build`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fedtta.models import cct, cnn, resnet
from fedtta.models.info import ModelInfo, complete, is_whole
from fedtta.models.layers import Normalise
from fedtta.models.two_head import TwoHead

MODELS: Mapping[str, ModelInfo] = MappingProxyType(
    {
        "cnn": cnn.CNN,
        "resnet20-gn": resnet.RESNET_GN,
        "resnet20-bn": resnet.RESNET_BN,
        "cct-4/3x2": cct.CCT,
        "resnet18": resnet.RESNET18,
        "resnet50": resnet.RESNET50,
        "wide-resnet": resnet.WIDE_RESNET,
        "resnext29": resnet.RESNEXT29,
        "shallow-cnn": cnn.SHALLOW_CNN,
    }
)


def build(name: str, num_classes: int, in_channels: int = 3, image_size: int = 32, **options: Any) -> TwoHead:
    """Build a two-head network on the CPU.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    num_classes : int
        K, at least 1.
    in_channels, image_size : int
        Images are [B, in_channels, image_size, image_size], floats in [0, 1]; the encoder normalizes them.
    **options
        The common options `mean`, `std` (one number, or one per channel; 0.5 and 0.5 map [0, 1] onto [-1, 1]),
        `personal_bias` (False: the personal head has no bias), `rotation_head` (see `TwoHead`) and `seed`, and those of
        the backbone: see `MODELS[name].options`. Initial weights are drawn from torch's global generator, or with
        `seed` from a separate generator.

    Raises
    ------
    ValueError
        The name, an option or a size is not allowed; the message names it, its value and the allowed values.
    FileNotFoundError
        The file of pretrained weights does not exist.
    """
    settings = check_build(name, num_classes, in_channels, image_size, options)
    info = MODELS[name]
    own = {key: settings[key] for key in info.own_options}
    with _generator(settings["seed"]), torch.device("cpu"):
        normalise = Normalise(settings["mean"], settings["std"], channels=in_channels)
        body, feature_dim = info.encoder(in_channels, image_size, **own)
        encoder = nn.Sequential(OrderedDict(normalise=normalise, body=body))
        return TwoHead(encoder, feature_dim, num_classes, settings["personal_bias"], settings["rotation_head"])


def check_build(
    name: str, num_classes: int, in_channels: int, image_size: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the arguments of `build` and return all options, defaults included.

    Constraints that only the backbone knows (a minimum size, incompatible options) are checked in `build`.

    Raises
    ------
    ValueError
        As `build`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are: {', '.join(MODELS)}")
    owner = f"model {name!r}"
    for key, value in (
        ("num_classes", num_classes),
        ("in_channels", in_channels),
        ("image_size", image_size),
    ):
        if not is_whole(value, 1):
            raise ValueError(f"{owner}: {key}={value!r} is not allowed; it must be a whole number of at least 1")
    return complete(owner, MODELS[name].options, options)


@contextmanager
def _generator(seed: int | None) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore it afterwards; None changes nothing."""
    if seed is None:
        yield
        return
    # Only the CPU's generator is touched: torch.manual_seed would also seed every accelerator.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield
