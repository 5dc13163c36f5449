"""Pretrained weights from a local file: a safetensors file, or a torch file that is read without running code.

The usual wrappings are taken off: a mapping under "state_dict", "model" and the like, and prefixes such as "module."
that all names share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedtta.models.arrays import all_finite
from fedtta.models.constants import HEAD_PREFIX, PERSONAL_PREFIX, ROTATION_PREFIX

COUNTER = "num_batches_tracked"  # missing in older weight files and in files of `save_model`
HEADS = ("fc.", HEAD_PREFIX, PERSONAL_PREFIX, ROTATION_PREFIX)  # of torchvision's networks and of `TwoHead`
BODY = "encoder.body."  # prefix of the encoder's names in a `TwoHead`
NAMED = 4  # names listed in a message
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
#: Where training programs put the weights in a file: timm, Lightning, DeiT, MAE, torchvision's references.
WRAPPINGS = ("state_dict", "model_state_dict", "model", "module", "network", "net")
#: Prefixes of all names: of DataParallel, torch.compile and Lightning.
PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.")
#: Where class names may stand in a file.
CLASSES = ("classes", "class_names")


@dataclass(frozen=True)
class Loaded:
    """What of a file fits a network: names loaded; missing in the file; unknown to the network; of another shape."""

    names: frozenset[str]
    missing: frozenset[str]
    unknown: frozenset[str]
    misshapen: frozenset[str]

    def __str__(self) -> str:
        """Return it as a sentence."""
        total = len(self.names) + len(self.missing) + len(self.misshapen)
        parts = [f"{len(self.names)} of {total} tensors loaded"]
        for what, names in (
            ("not in the file", self.missing),
            ("of another shape", self.misshapen),
            ("unknown to the network", self.unknown),
        ):
            if names:
                parts.append(f"not loaded, {what}: {_some(set(names))}")
        return "; ".join(parts)


def load_matching(network: nn.Module, weights: Mapping[str, Tensor]) -> Loaded:
    """Copy those weights into `network` whose names and shapes fit, and say which.

    Raises
    ------
    ValueError
        A value that fits is not finite. Nothing is loaded in this case.
    """
    mine = network.state_dict()
    fitting = {name: value for name, value in weights.items() if name in mine and value.shape == mine[name].shape}
    for name, value in fitting.items():
        if value.is_floating_point() and not all_finite([value]):
            raise ValueError(f"{name} holds values that are not finite")
    network.load_state_dict({**mine, **fitting})
    needed = {name for name in mine if not name.endswith(COUNTER)}
    return Loaded(
        frozenset(fitting),
        frozenset(needed - set(weights)),
        frozenset(set(weights) - set(mine)),
        frozenset(set(weights) & set(mine) - set(fitting)),
    )


def load_weights(network: nn.Module, path: Path, model: str) -> None:
    """Copy the weights of a file (see `read_weights`) into the encoder `network`.

    The file holds the names of `network.state_dict()` or those of a whole `TwoHead`, as `save_model` writes and
    `TwoHead.state_dict()` returns them. Its heads (`fc`, `head`, `personal_head`, `rotation_head`) are ignored, so
    the number of classes may differ.

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
    weights = {name: value for name, value in read_weights(path)[0].items() if not name.startswith(HEADS)}
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


def read_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Read a file of weights, on the CPU; code in the file is not run.

    Returns
    -------
    dict of str to Tensor
        Without wrappings.
    tuple of str, or None
        Class names, if the file has them: a model file of this project, or a torch file with "classes".

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        It cannot be read, or holds no mapping from names to tensors.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown kind of weights {path.suffix!r}; there are: {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of pretrained weights at {path}")
    content: Any
    classes: Any = None
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
            classes = stated_spec(path).get("classes")
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # many programs save their arguments, too
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the error type depends on where the archive is damaged
        raise ValueError(f"{path}: cannot be read as weights: {error}") from error
    while isinstance(content, Mapping) and (inner := _wrapped(content)) is not None:
        classes = classes or next((content[key] for key in CLASSES if key in content), None)
        content = inner
    if not isinstance(content, Mapping) or not content or not all(_is_weight(*item) for item in content.items()):
        raise ValueError(f"{path}: holds no mapping from names to tensors")
    weights = dict(content)
    while prefix := next((one for one in PREFIXES if all(name.startswith(one) for name in weights)), ""):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    named = isinstance(classes, list | tuple) and all(isinstance(one, str) for one in classes)
    return weights, tuple(classes) if named else None


def stated_spec(path: Path | str) -> dict[str, Any]:
    """Return the arguments of `build` that a model file of this project states; empty for other safetensors files.

    Raises
    ------
    FileNotFoundError, ValueError
        The file does not exist, or cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            spec: dict[str, Any] = json.loads((file.metadata() or {}).get("spec", "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot be read as weights: {error}") from error
    return spec


def _wrapped(content: Mapping[Any, Any]) -> Any:
    """Return the mapping that holds the weights inside `content`; None if `content` itself does."""
    return next((content[key] for key in WRAPPINGS if isinstance(content.get(key), Mapping)), None)


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)
