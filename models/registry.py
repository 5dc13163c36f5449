"""Backbones by name: what there is, which options each has, and how to build one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from models import cct, cnn, resnet_bn, resnet_gn, resnext29, shallow_cnn, torchvision_resnet, wide_resnet
from models.normalise import Normalise
from models.options import Option, complete, flag, is_whole, optional_seed, per_channel
from models.two_head import TwoHead

Normalisation = Literal["batch", "group", "layer"]

#: Options that every model has.
COMMON_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "mean": per_channel(0.5),
        "std": per_channel(0.5, positive=True),
        "personal_bias": flag(False),
        "rotation_head": flag(False),
        "seed": optional_seed(),
    }
)


@dataclass(frozen=True)
class ModelInfo:
    """What the registry knows about one backbone.

    Parameters
    ----------
    summary : str
        One line for people.
    encoder : Callable
        (in_channels, image_size, **own options) → (encoder without normalisation of its input, d).
    own_options : Mapping
        The options that only this backbone has.
    normalisation : "batch", "group", "layer" or None
        Its normalisation layers with default options.
    normalisation_option : str or None
        The option whose value replaces `normalisation`, if there is one.
    """

    summary: str
    encoder: Callable[..., tuple[nn.Module, int]]
    own_options: Mapping[str, Option]
    normalisation: Normalisation | None
    normalisation_option: str | None = None

    @property
    def options(self) -> Mapping[str, Option]:
        """Return every option of this model, common ones included."""
        return {**COMMON_OPTIONS, **self.own_options}

    def normalisation_with(self, options: Mapping[str, Any]) -> Normalisation | None:
        """Return the normalisation layers of a model built with `options`.

        Methods that adapt BatchNorm layers work with "batch" only.
        """
        if self.normalisation_option is None:
            return self.normalisation
        return options.get(self.normalisation_option, self.normalisation)


MODELS: Mapping[str, ModelInfo] = MappingProxyType(
    {
        "cnn": ModelInfo(
            "two 5x5 convolutions and fully connected layers of 64, d = 64 (FedTHE, BTFL, FedICON)",
            cnn.encoder,
            cnn.OPTIONS,
            normalisation=None,
            normalisation_option="norm",
        ),
        "resnet20-gn": ModelInfo(
            "ResNet-20 with GroupNorm, d = 64 width (FedTHE, BTFL)",
            resnet_gn.encoder,
            resnet_gn.OPTIONS,
            normalisation="group",
        ),
        "resnet20-bn": ModelInfo(
            "CIFAR ResNet-8 to -110 with BatchNorm, d = 4 width (pFedBBN)",
            resnet_bn.encoder,
            resnet_bn.OPTIONS,
            normalisation="batch",
        ),
        "cct-4/3x2": ModelInfo(
            "compact convolutional transformer, d = 128 (FedTHE, BTFL)",
            cct.encoder,
            cct.OPTIONS,
            normalisation="layer",
        ),
        "resnet18": ModelInfo(
            "torchvision's ResNet-18 with BatchNorm, d = 512 (ATP, FedICON)",
            torchvision_resnet.resnet18,
            torchvision_resnet.OPTIONS,
            normalisation="batch",
        ),
        "resnet50": ModelInfo(
            "torchvision's ResNet-50 with BatchNorm, d = 2048",
            torchvision_resnet.resnet50,
            torchvision_resnet.OPTIONS,
            normalisation="batch",
        ),
        "wide-resnet": ModelInfo(
            "Wide ResNet-28-10, -16-2, ... with BatchNorm, d = 64 width (pFedBBN)",
            wide_resnet.encoder,
            wide_resnet.OPTIONS,
            normalisation="batch",
        ),
        "resnext29": ModelInfo(
            "ResNeXt-29 32x4d with BatchNorm, d = 1024 (pFedBBN)",
            resnext29.encoder,
            resnext29.OPTIONS,
            normalisation="batch",
        ),
        "shallow-cnn": ModelInfo(
            "ATP's five-layer CNN with BatchNorm, d = 64",
            shallow_cnn.encoder,
            shallow_cnn.OPTIONS,
            normalisation="batch",
        ),
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
        Images are [B, in_channels, image_size, image_size], floats in [0, 1]; the encoder normalises them
        itself.
    **options
        The common `mean`, `std` (a number, or one a channel; 0.5 and 0.5 map [0, 1] onto [-1, 1]),
        `personal_bias` (False: the personal head has no bias), `rotation_head` (see `TwoHead`) and `seed`, and the
        backbone's own: see `MODELS[name].options`. Initial weights come from torch's global generator, or with `seed`
        from a generator of their own.

    Raises
    ------
    ValueError
        The name, an option or a size is not allowed; the message names it, its value and what is allowed.
    FileNotFoundError
        A file of pretrained weights is not there.
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
    """Check the arguments of `build` one by one and return all options, defaults filled in.

    What only the backbone can tell (a size too small for it, options that do not go together) is checked in
    `build`.

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
    """Seed the generator inside the block and leave it as it was afterwards; None changes nothing."""
    if seed is None:
        yield
        return
    # Only the CPU's generator is touched: torch.manual_seed would also seed every accelerator.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield
