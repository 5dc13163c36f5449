"""Networks by the names of libraries and functions, each as its library makes it.

    timm:<name>                 a network of timm (pip install 'fedtta[timm]')
    torchvision:<name>          a classification network of torchvision
    <package.module>:<function> a function of an installed package or of the working folder

A function is called with those of the arguments `num_classes`, `in_channels`, `image_size` that it takes, and with the
model's other options. It returns an encoder and its feature dimension d, or an encoder with an attribute `feature_dim`,
or a whole network that ends in a linear layer. Model files and a server's requests name functions, so a function must
allow that by an attribute:

    def make_net(num_classes: int, width: int = 32) -> nn.Module: ...
    make_net.is_network = True
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from fedtta.models.info import Option, choice, optional_path

Constants: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]

#: Options that every external network has beside the common ones; others go to the function that makes the network.
OPTIONS: Mapping[str, Option] = {
    "pretrained": optional_path(),
    "weights": choice("none", "default"),
    "features": choice("plain", "relu"),
}
#: Networks of these take RGB images.
LIBRARIES = ("timm:", "torchvision:")
IMAGENET: Constants = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: Constants = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
#: Torchvision's networks whose weights were trained on `HALF`. The first two convert images to it from `IMAGENET` by
#: themselves, by an option that depends on whether weights are downloaded: a network without them would be another one.
CONVERTING = ("googlenet", "inception_v3")
ON_HALF = (*CONVERTING, "efficientnet_v2_l")


@dataclass(frozen=True)
class Source:
    """A network as its library makes it.

    Parameters
    ----------
    network : nn.Module
        With its classifier; without one if `feature_dim` is given.
    feature_dim : int or None
        d of a network that is an encoder already.
    classes : tuple of str, or None
        Names of the classes that its pretrained weights know; None: not known.
    pretrained : bool
        Whether it has pretrained weights.
    """

    network: nn.Module
    feature_dim: int | None = None
    classes: tuple[str, ...] | None = None
    pretrained: bool = False


def is_external(name: object) -> bool:
    """Return whether `name` has the form of an external network's name, "<library>:<name>"."""
    return isinstance(name, str) and ":" in name


def make_network(
    name: str, shape: tuple[int, int, int], num_classes: int, own: Mapping[str, Any], download: bool
) -> Source:
    """Make the network `name`.

    Parameters
    ----------
    name : str
        See the module.
    shape : (int, int, int)
        C, S, S of the images.
    num_classes : int
        K; downloaded weights keep the number of classes that they were trained on.
    own : mapping
        Options of the network's own.
    download : bool
        Download the library's default weights.

    Raises
    ------
    ValueError
        There is no such network, it cannot be made, or its weights cannot be downloaded.
    ImportError
        timm is missing.
    """
    library, _, rest = name.partition(":")
    try:
        if library == "timm":
            return _from_timm(rest, shape[1], num_classes, own, download)
        if library == "torchvision":
            return _from_torchvision(rest, shape[1], num_classes, own, download)
        if download:
            raise ValueError("weights='default' is for networks of timm and torchvision; a function loads its own")
        return _from_function(library, rest, shape, num_classes, own)
    except ImportError:
        raise
    except Exception as error:  # whatever the library, a download or the function raises
        why = "the weights could not be downloaded; pretrained=<file> loads a file: " if _offline(error) else ""
        raise ValueError(f"model {name!r}: {why}{error or type(error).__name__}") from error


def normalization(name: str, options: Mapping[str, Any], channels: int = 3) -> Constants | None:
    """Return the mean and standard deviation of the images that pretrained weights were trained on.

    Parameters
    ----------
    name : str
        A model's name.
    options : mapping
        Its options; without `pretrained` and `weights = "default"` there are no pretrained weights.
    channels : int
        3, or 1: the averages over R, G and B.

    Returns
    -------
    (mean, std), one number per channel, or None
        Of timm's networks as timm states them, of torchvision's ImageNet's or `HALF`; None where nothing is known.
    """
    if options.get("pretrained") is None and options.get("weights", "none") != "default":
        return None
    found = None
    if name.startswith("timm:"):
        config = _timm().get_pretrained_cfg(name.removeprefix("timm:"))
        found = (tuple(config.mean), tuple(config.std)) if config is not None else None
    elif name.startswith("torchvision:") or name in ("resnet18", "resnet50"):
        on_half = name.removeprefix("torchvision:") in ON_HALF and not options.get("transform_input")
        found = HALF if on_half else IMAGENET
    return None if found is None else (per_channel(found[0], channels), per_channel(found[1], channels))


def per_channel(numbers: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return constants of an image for `channels`: one number for all; R, G and B averaged for grayscale images."""
    if channels == 1 and len(numbers) == 3:
        return (sum(numbers) / 3,)
    return tuple(numbers) * channels if len(numbers) == 1 else tuple(numbers)


def _offline(error: BaseException) -> bool:
    """Return whether an error was caused by the network connection or by a hub."""
    causes = [error, error.__cause__, error.__context__]
    return any(
        isinstance(one, ConnectionError | TimeoutError)
        or type(one).__module__.partition(".")[0] in ("urllib", "huggingface_hub", "requests", "httpx", "httpcore")
        for one in causes
    )


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError("networks of timm need timm: pip install 'fedtta[timm]'") from error
    return timm


def _from_timm(name: str, size: int, num_classes: int, own: Mapping[str, Any], download: bool) -> Source:
    timm = _timm()
    base = name.partition(".")[0]
    if not timm.is_model(base):
        raise ValueError(f"timm has no such network{_close(base, timm.list_models())}")
    config = timm.get_pretrained_cfg(name)
    fixed = {"img_size": size} if config is not None and config.fixed_input_size else {}
    if download and config is not None:
        num_classes = config.num_classes  # with its head
    network = timm.create_model(name, pretrained=download, num_classes=num_classes, **{**fixed, **own})
    return Source(network, pretrained=download)


def _from_torchvision(name: str, size: int, num_classes: int, own: Mapping[str, Any], download: bool) -> Source:
    from torchvision import models as networks

    names = networks.list_models(module=networks)
    if name not in names:
        raise ValueError(f"torchvision has no such classification network{_close(name, names)}")
    fixed: dict[str, Any] = {"image_size": size} if name.startswith("vit_") else {}
    if name in CONVERTING:
        fixed["transform_input"] = False
    if not download:
        made = networks.get_model(name, weights=None, num_classes=num_classes, **{**fixed, **own})
        return Source(_without_auxiliary(made, own))
    weights = networks.get_model_weights(name).DEFAULT
    network = _without_auxiliary(networks.get_model(name, weights=weights, **{**fixed, **own}), own)
    return Source(network, classes=tuple(weights.meta["categories"]), pretrained=True)


def _without_auxiliary(network: nn.Module, own: Mapping[str, Any]) -> nn.Module:
    """Take off the auxiliary classifiers of GoogLeNet and Inception v3, unless they are asked for.

    With them, the network returns a tuple of logits in training mode.
    """
    if getattr(network, "aux_logits", False) and not own.get("aux_logits"):
        setattr(network, "aux_logits", False)  # noqa: B010 (a plain attribute, which nn.Module does not declare)
        for name in ("aux1", "aux2", "AuxLogits"):
            if hasattr(network, name):
                setattr(network, name, None)
    return network


def _from_function(
    module: str, function: str, shape: tuple[int, int, int], num_classes: int, own: Mapping[str, Any]
) -> Source:
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError("a network is timm:<name>, torchvision:<name> or <package.module>:<function>")
    try:
        make: Callable[..., Any] | None = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported: {error}") from error
    if make is None:
        raise ValueError(f"{module} has no {function}")
    if getattr(make, "is_network", False) is not True:  # a model file must not be able to call any function
        raise ValueError(f"{function} does not say that it makes a network: set {function}.is_network = True")
    sizes = {"num_classes": num_classes, "in_channels": shape[0], "image_size": shape[1]}
    taken = inspect.signature(make).parameters
    anything = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    if unknown := [key for key in own if key not in taken and not anything]:
        raise ValueError(f"{function} has no option {unknown[0]!r}; there are: {', '.join([*OPTIONS, *taken])}")
    made = make(**{key: value for key, value in sizes.items() if anything or key in taken}, **own)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Source(made[0], int(made[1]))
    if not isinstance(made, nn.Module):
        raise ValueError(f"{function} returned {type(made).__name__}; it must return a network or (encoder, d)")
    width = getattr(made, "feature_dim", None)
    return Source(made, width if isinstance(width, int) else None)


def _close(name: str, names: Sequence[str]) -> str:
    """Return similar names as the end of a message."""
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; similar ones: {', '.join(found)}" if found else ""
