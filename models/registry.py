"""The model registry: every backbone by name, and `build`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fedtta.models import cct, cnn, resnet
from fedtta.models.external import build_external
from fedtta.models.info import COMMON_OPTIONS, ModelInfo, complete, is_whole
from fedtta.models.layers import Normalise
from fedtta.models.libraries import OPTIONS, is_external
from fedtta.models.preprocessing import Preprocessing
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


def build(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    *,
    preprocessing: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> TwoHead:
    """Build a two-head network on the CPU.

    Parameters
    ----------
    name : str
        A key of `MODELS`, or an external network: "timm:<name>", "torchvision:<name>", "package.module:function" (see
        `fedtta.models.libraries`).
    num_classes : int
        K, at least 1.
    in_channels, image_size : int
        Images are [B, in_channels, image_size, image_size], floats in [0, 1]; the encoder normalizes them.
    preprocessing : mapping, optional
        `Preprocessing.to_dict()` of the images' preprocessing. The network does not depend on it; model files keep it.
    classes : sequence of str, optional
        Class names, K of them, for model files as well.
    **options
        The common options `mean`, `std` (one number, or one per channel; 0.5 and 0.5 map [0, 1] onto [-1, 1]),
        `personal_bias` (False: the personal head has no bias), `rotation_head` (see `TwoHead`) and `seed`, and those of
        the backbone: see `MODELS[name].options`. Those of external networks are `pretrained` (a file of weights),
        `weights` ("default": the library's, downloaded), `features` ("relu": behind a ReLU, which BTFL needs), and the
        network's own. Initial weights are drawn from torch's global generator, or with `seed` from a separate one.

    Raises
    ------
    ValueError
        The name, an option or a size is not allowed; the message names it, its value and the allowed values.
    FileNotFoundError
        The file of pretrained weights does not exist.
    """
    settings = check_build(name, num_classes, in_channels, image_size, options)
    check_description(name, num_classes, in_channels, image_size, preprocessing, classes)
    with _generator(settings["seed"]), torch.device("cpu"):
        normalise = Normalise(settings["mean"], settings["std"], channels=in_channels)
        if is_external(name):
            own = {key: value for key, value in settings.items() if key not in COMMON_OPTIONS}
            heads = {key: settings[key] for key in ("personal_bias", "rotation_head")}
            shape = (in_channels, image_size, image_size)
            return build_external(name, shape, num_classes, classes, own, normalise, heads)
        info = MODELS[name]
        own = {key: settings[key] for key in info.own_options}
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
    check_name(name)
    owner = f"model {name!r}"
    for key, value in (
        ("num_classes", num_classes),
        ("in_channels", in_channels),
        ("image_size", image_size),
    ):
        if not is_whole(value, 1):
            raise ValueError(f"{owner}: {key}={value!r} is not allowed; it must be a whole number of at least 1")
    if not is_external(name):
        return complete(owner, MODELS[name].options, options)
    table = {**COMMON_OPTIONS, **OPTIONS}
    of_library = {key: value for key, value in options.items() if key not in table}
    return complete(owner, table, {key: value for key, value in options.items() if key in table}) | of_library


def check_name(name: str) -> None:
    """Raise ValueError, listing what exists, unless `name` is a model's or has the form of an external network's."""
    if not is_external(name) and name not in MODELS:
        forms = "timm:<name>, torchvision:<name>, <package.module>:<function>"
        raise ValueError(f"unknown model {name!r}; there are: {', '.join(MODELS)}, {forms}")


@dataclass(frozen=True)
class Abilities:
    """What methods ask of a network: has it BatchNorm layers, and are its features certain not to be negative."""

    batchnorm: bool
    features_nonnegative: bool


def abilities(name: str, in_channels: int, image_size: int, options: Mapping[str, Any]) -> Abilities:
    """Return what a network built with these options has; pretrained weights are neither read nor downloaded.

    Raises
    ------
    ValueError, ImportError
        The network cannot be built; see `build`.
    """
    check_build(name, 2, in_channels, image_size, options)  # those of weights, too
    return _abilities(name, in_channels, image_size, json.dumps(without_weights(options)))


@lru_cache(maxsize=16)
def _abilities(name: str, in_channels: int, image_size: int, options: str) -> Abilities:
    model = build(name, 2, in_channels, image_size, **{"seed": 0, **json.loads(options)})
    batchnorm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    return Abilities(batchnorm, model.features_nonnegative)


def without_weights(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `build` without pretrained weights, for a network whose values are loaded afterwards."""
    return {key: value for key, value in spec.items() if key not in ("pretrained", "weights")}


def check_description(
    name: str,
    num_classes: int,
    in_channels: int,
    image_size: int,
    preprocessing: Mapping[str, Any] | None,
    classes: Sequence[str] | None,
) -> None:
    """Check those arguments of `build` that describe the network's input and output.

    Raises
    ------
    ValueError
        `preprocessing` is none or makes images of another shape, or `classes` are not `num_classes` different names.
    """
    if preprocessing is not None:
        made = Preprocessing.from_dict(preprocessing)
        if (made.channels, made.image_size) != (in_channels, image_size):
            raise ValueError(
                f"model {name!r}: preprocessing makes {made.channels} channels of {made.image_size} pixels, the "
                f"network takes {in_channels} of {image_size}"
            )
    if classes is not None:
        names = [] if isinstance(classes, str) or not isinstance(classes, Sequence) else list(classes)
        if len(set(names)) != num_classes or not all(isinstance(one, str) and one for one in names):
            raise ValueError(f"model {name!r}: classes={classes!r} must be {num_classes} different names")


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
