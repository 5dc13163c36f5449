"""Pretrained weights from a local file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedtta.models.arrays import all_finite

COUNTER = "num_batches_tracked"  # missing in older weight files and in files of `save_model`
HEADS = ("fc.", "head.", "personal_head.")  # classifiers of torchvision's networks and of `TwoHead`
BODY = "encoder.body."  # prefix of the encoder's names in a `TwoHead`
NAMED = 4  # names listed in an error message


def load_weights(network: nn.Module, path: Path, model: str) -> None:
    """Copy the weights of a .safetensors, .pth or .pt file into the encoder `network`.

    The file holds the names of `network.state_dict()` or those of a whole `TwoHead`, as `save_model` writes and
    `TwoHead.state_dict()` returns them. Its classifiers (`fc`, `head`, `personal_head`) are ignored, so the number of
    classes may differ.

    Parameters
    ----------
    network : nn.Module
    path : Path
    model : str
        Name of the network in messages.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file cannot be read, its names or shapes differ from the network's, or a value is not finite; the message
        names the file. Nothing is loaded in this case.
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
    """Return the first names as a list, and the number of further names."""
    first, more = sorted(names)[:NAMED], len(names) - NAMED
    return f"{first} and {more} more" if more > 0 else f"{first}"


def _read(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a weight file, on the CPU; code in the file is not run."""
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
    except Exception as error:  # the error type depends on where the archive is damaged
        raise ValueError(f"{path}: cannot be read as weights: {error}") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: holds no mapping from names to tensors")
    return dict(content)
