"""Networks of libraries and functions (`fedtta.models.libraries`) as two-head networks.

The last `nn.Linear` is taken off: what enters it are the features, and its weights start the global head if they are
pretrained and belong to the same classes. Whether features and layer really compose the network is checked on a batch.

BatchNorm layers that contain an activation (timm's `BatchNormAct2d`) become a plain BatchNorm layer followed by that
activation, since methods replace BatchNorm layers and their statistics.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fedtta.models.libraries import LIBRARIES, OPTIONS, Source, make_network
from fedtta.models.two_head import TwoHead
from fedtta.models.weights import BODY, Loaded, load_matching, read_weights

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm

NONNEGATIVE = (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.Softmax)
#: Layers that keep the sign of their input, apart from those with "pool" in their name.
SIGN_KEEPING = (nn.Identity, nn.Flatten, nn.modules.dropout._DropoutNd)
#: With less than this share of the encoder's numbers, a file of pretrained weights belongs to another network.
LEAST_LOADED = 0.5

log = logging.getLogger(__name__)


class Repeat(nn.Module):
    """Grayscale images [B, 1, H, W] as the 3 channels [B, 3, H, W] that a network of a library takes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the images, repeated."""
        return x.expand(-1, 3, -1, -1)


@dataclass(frozen=True)
class Encoder:
    """An encoder without input normalization, and the classifier that was taken off, if there was one."""

    body: nn.Module
    feature_dim: int
    features_nonnegative: bool
    head: nn.Linear | None


def build_external(
    name: str,
    shape: tuple[int, int, int],
    num_classes: int,
    classes: Sequence[str] | None,
    options: Mapping[str, Any],
    normalise: nn.Module,
    heads: Mapping[str, bool],
) -> TwoHead:
    """Build a two-head network from an external one.

    Parameters
    ----------
    name : str
        See `fedtta.models.libraries`.
    shape : (int, int, int)
        C, S, S of the images.
    num_classes : int
        K.
    classes : sequence of str or None
        Class names, to compare with those of a pretrained head.
    options : mapping
        `fedtta.models.libraries.OPTIONS`, and the network's own.
    normalise : nn.Module
        The first layer.
    heads : mapping
        `personal_bias` and `rotation_head` of `TwoHead`.

    Returns
    -------
    TwoHead
        Its `notes` say which pretrained weights were loaded and which were not; they are logged, too.

    Raises
    ------
    ValueError
        There is no such network or it does not fit; weights cannot be read, downloaded or loaded.
    FileNotFoundError
        The file of pretrained weights does not exist.
    ImportError
        timm is missing.
    """
    owner, path = f"model {name!r}", options.get("pretrained")
    download = options.get("weights") == "default"
    if path is not None and download:
        raise ValueError(f"{owner}: pretrained={path!r} and weights='default' exclude each other")
    own = {key: value for key, value in options.items() if key not in OPTIONS}
    source = make_network(name, shape, num_classes, own, download)
    weights, known = read_weights(Path(path)) if path is not None else ({}, source.classes)
    same_classes = known is None or classes is None or tuple(known) == tuple(classes)
    of_two_heads = any(key.startswith(BODY) for key in weights)
    head_name = "" if source.feature_dim is not None else _classifier(owner, source.network)

    notes = [f"{owner}: the library's weights are loaded"] if download else []
    keep = source.pretrained and same_classes
    if weights and not of_two_heads:
        head = f"{head_name}."
        fitting = {key: value for key, value in weights.items() if same_classes or not key.startswith(head)}
        loaded = load_matching(source.network, fitting)
        notes.append(_note(f"{owner}: {path}", loaded, source.network, head))
        keep = f"{head}weight" in loaded.names
    repeats = shape[0] == 1 and name.startswith(LIBRARIES)
    encoder = _encoder(owner, source, head_name, (3, *shape[1:]) if repeats else shape)
    model = _two_heads(encoder, num_classes, normalise, repeats, options.get("features") == "relu", heads)
    if of_two_heads:
        starts = ("encoder.", "head.") if same_classes else ("encoder.",)
        loaded = load_matching(model, {key: value for key, value in weights.items() if key.startswith(starts)})
        notes.append(_note(f"{owner}: {path}", loaded, model, ("head.", "personal_head.", "rotation_head.")))
        keep = "head.weight" in loaded.names
    elif keep := keep and encoder.head is not None and encoder.head.out_features == num_classes:
        _copy_head(model.head, encoder.head)
    if weights or download:
        notes.append(f"{owner}: the pretrained head is {'kept' if keep else 'replaced by a new one'}")
    model.input_shape, model.notes = shape, tuple(notes)
    for note in notes:
        log.log(logging.WARNING if "not loaded" in note else logging.INFO, note)
    return model.train()


def _two_heads(
    encoder: Encoder, num_classes: int, normalise: nn.Module, repeats: bool, rectified: bool, heads: Mapping[str, bool]
) -> TwoHead:
    """Put two heads on an encoder, and in front of it normalization and, for grayscale images, the repetition."""
    layers = OrderedDict[str, nn.Module](normalise=normalise)
    if repeats:
        layers["colour"] = Repeat()
    layers["body"] = encoder.body
    if rectified:
        layers["relu"] = nn.ReLU()
    nonnegative = encoder.features_nonnegative or rectified
    return TwoHead(nn.Sequential(layers), encoder.feature_dim, num_classes, **heads, features_nonnegative=nonnegative)


def _classifier(owner: str, network: nn.Module) -> str:
    """Return the name of the linear layer that a network ends in: timm's classifier, else the last linear layer."""
    linear = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    get_classifier = getattr(network, "get_classifier", None)  # timm
    if get_classifier is not None:
        stated = get_classifier()
        linear = {name: layer for name, layer in linear.items() if layer is stated}
    if not linear or "" in linear:
        raise ValueError(f"{owner}: does not end in a linear layer, so it has no features to put two heads on")
    return list(linear)[-1]


def _encoder(owner: str, source: Source, head_name: str, shape: tuple[int, ...]) -> Encoder:
    """Take the classifier off and check the rest on a batch.

    Raises
    ------
    ValueError
        The network does not take these images, a BatchNorm layer cannot be split, its features are no [B, d], or
        classifier and features do not compose the network.
    """
    network = source.network.eval()
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    head: nn.Linear | None = None
    with _given_images(owner, shape):
        logits = network(x) if head_name else None
    if head_name:
        head = cast(nn.Linear, network.get_submodule(head_name))
        _replace(network, head_name, nn.Identity())
    _split_batchnorm(owner, network)
    with _given_images(owner, shape):
        z, last = _traced(network, x)
    width = source.feature_dim if head is None else head.in_features
    if not isinstance(z, Tensor) or width is None or z.shape != (2, width):
        got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(f"{owner}: features must be [B, {width}], the network gives {got} for a batch of 2")
    if head is not None:
        with torch.no_grad():
            if not isinstance(logits, Tensor) or not torch.allclose(head(z), logits, rtol=1e-3, atol=1e-4):
                raise ValueError(f"{owner}: {head_name} is not its last layer, so two heads cannot take its place")
    _check_training(owner, network, x, width)
    return Encoder(network, width, isinstance(last, NONNEGATIVE) and bool((z >= 0).all()), head)


def _check_training(owner: str, network: nn.Module, x: Tensor, width: int) -> None:
    """Raise ValueError unless features in training mode are [B, d], too: some networks return more than those then.

    The network and torch's generator, which dropout draws from, are left as they are.
    """
    with _given_images(f"{owner}, in training mode,", tuple(x.shape[1:])), torch.random.fork_rng(devices=[]):
        z = copy.deepcopy(network).train()(x)
    if not isinstance(z, Tensor) or z.shape != (len(x), width):
        got = list(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(f"{owner}: features must be [B, {width}], in training mode the network gives {got}")


@contextmanager
def _given_images(owner: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Run a network's code without gradients; an error in it says that the network does not take these images."""
    try:
        with torch.no_grad():
            yield
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        raise ValueError(f"{owner} does not take images {list(shape)}: {error or type(error).__name__}") from error


def _traced(network: nn.Module, x: Tensor) -> tuple[Any, nn.Module | None]:
    """Return the network's output, and the last layer that ran, apart from those that keep the sign of their input."""
    ran: list[nn.Module] = []
    leaves = [layer for layer in network.modules() if not list(layer.children())]
    handles = [layer.register_forward_hook(lambda layer, *_: ran.append(layer)) for layer in leaves]
    try:
        z = network(x)
    finally:
        for handle in handles:
            handle.remove()
    deciding = [
        layer for layer in ran if not isinstance(layer, SIGN_KEEPING) and "pool" not in type(layer).__name__.lower()
    ]
    return z, deciding[-1] if deciding else None


def _split_batchnorm(owner: str, network: nn.Module) -> None:
    """Replace BatchNorm layers that do more than normalize by a plain one and what else they do."""
    for name, layer in list(network.named_modules()):
        plain = {nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward}
        if not isinstance(layer, BatchNorm) or type(layer).forward in plain:
            continue
        if type(layer).__name__ != "BatchNormAct2d" or not type(layer).__module__.startswith("timm."):
            kind = type(layer).__name__
            raise ValueError(f"{owner}: {name} ({kind}) is a BatchNorm layer with a forward function of its own")
        norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        norm.load_state_dict({key: value for key, value in layer.state_dict().items() if "." not in key})
        split = OrderedDict(norm=norm, drop=cast(nn.Module, layer.drop), act=cast(nn.Module, layer.act))
        _replace(network, name, nn.Sequential(split).train(layer.training))


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, layer)


@torch.no_grad()
def _copy_head(head: nn.Linear, other: nn.Linear) -> None:
    """Copy weights and bias; a layer without bias has one of zero."""
    head.weight.copy_(other.weight)
    head.bias.copy_(torch.zeros_like(head.bias) if other.bias is None else other.bias)


def _note(owner: str, loaded: Loaded, network: nn.Module, heads: str | tuple[str, ...]) -> str:
    """Return what was loaded; ValueError if it is too little of the encoder to be its weights."""
    state = {name: value for name, value in network.state_dict().items() if not name.startswith(heads)}
    total = sum(value.numel() for value in state.values())
    found = sum(value.numel() for name, value in state.items() if name in loaded.names)
    if found < LEAST_LOADED * total:
        raise ValueError(f"{owner}: not the weights of this network: {loaded}")
    return f"{owner}: {loaded}"
