"""The weights that a network starts with: He's normal draw, or a file that the user has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.finite import all_finite

COUNTER = "num_batches_tracked"  # older weight files, and our own, have none
HEADS = ("fc.", "head.", "personal_head.")  # of torchvision's networks and of `TwoHead`
BODY = "encoder.body."  # an encoder's names as part of a `TwoHead`
NAMED = 4  # names shown in an error


def he_normal(network: nn.Module) -> None:
    """Draw the weights of all convolutions from He's normal distribution by fan-out (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def load_weights(network: nn.Module, path: Path, model: str) -> None:
    """Copy the weights of a .safetensors, .pth or .pt file into the encoder `network`.

    The file has the names of `network.state_dict()`, or those of a whole `TwoHead`: what `save_model` writes and
    `TwoHead.state_dict()` returns. Classifiers in it (`fc`, `head`, `personal_head`) are ignored, so the number of
    classes may differ.

    Parameters
    ----------
    network : nn.Module
    path : Path
    model : str
        The network's name in messages.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file cannot be read, its names or shapes are not the network's, or a value is not finite; the message
        names the file, and nothing is loaded then.
    """
    weights = {name: value for name, value in _read(path).items() if not name.startswith(HEADS)}
    if all(name.startswith(BODY) for name in weights):
        weights = {name.removeprefix(BODY): value for name, value in weights.items()}
    mine = network.state_dict()
    needed = {name for name in mine if not name.endswith(COUNTER)}
    missing, unknown = needed - set(weights), set(weights) - set(mine)
    if missing or unknown:
        raise ValueError(f"{path}: not {model}'s weights: missing {_some(missing)}, unknown {_some(unknown)}")
    for name, value in weights.items():
        if value.shape != mine[name].shape:
            raise ValueError(f"{path}: {name} has shape {tuple(value.shape)}, expected {tuple(mine[name].shape)}")
        if not all_finite([value]):
            raise ValueError(f"{path}: {name} holds values that are not finite")
    network.load_state_dict({**mine, **weights})


def _some(names: set[str]) -> str:
    """Return the first names as a list, and how many more there are."""
    first, more = sorted(names)[:NAMED], len(names) - NAMED
    return f"{first} and {more} more" if more > 0 else f"{first}"


def _read(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a .safetensors, .pth or .pt file, on the CPU; no code in it is run."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ValueError(f"{path}: unknown kind of weights {path.suffix!r}; there are: .safetensors, .pth, .pt")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of pretrained weights at {path}")
    content: object
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises whatever its parser meets first
        raise ValueError(f"{path}: cannot be read as weights: {error}") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: holds no mapping from names to tensors")
    return dict(content)
