"""Model files: the weights of a network and its `build` arguments, in one safetensors file.

The arguments include the preprocessing of images and the class names; older files lack both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.models.arrays import load_arrays, save_arrays
from fedtta.models.constants import PERSONAL_PREFIX
from fedtta.models.registry import build, check_build, check_description, without_weights
from fedtta.models.two_head import TwoHead

FORMAT = "fedtta-model"
VERSION = 1

SIZES = {"in_channels": 3, "image_size": 32}  # the defaults of `build`
DESCRIPTION = ("preprocessing", "classes")


def save_model(
    path: str | os.PathLike[str], model: TwoHead, spec: Mapping[str, Any], *, personal: bool = False
) -> None:
    """Write a network's `global_state()` and its `build` arguments.

    Parameters
    ----------
    path : path-like
        The file; replaced atomically (see `save_arrays`).
    model : TwoHead
        The network, on any device, in float16, float32 or float64.
    spec : Mapping
        The arguments of `fedtta.models.build` as JSON values: "name", "num_classes", and any of "in_channels",
        "image_size", "preprocessing", "classes" and the options.
    personal : bool
        Write the personal head too. Such a file must not leave its device.

    Raises
    ------
    ValueError
        `spec` holds no valid arguments of `build`, its number of classes differs from the model's, or a weight is not
        finite or of another type. Nothing is written in this case.
    """
    _check_spec(spec, str(path))
    if spec["num_classes"] != model.num_classes:
        raise ValueError(f"{path}: spec says num_classes={spec['num_classes']}, the model has {model.num_classes}")
    state = model.global_state()
    if personal:
        state |= {name: value for name, value in model.state_dict().items() if name.startswith(PERSONAL_PREFIX)}
    metadata = {"format": FORMAT, "version": str(VERSION), "spec": json.dumps(dict(spec))}
    save_arrays(path, {name: _to_array(path, name, value) for name, value in state.items()}, metadata)


def load_model(path: str | os.PathLike[str]) -> tuple[TwoHead, dict[str, Any]]:
    """Read a file written by `save_model`: the network on the CPU in evaluation mode, and its spec.

    If the file has no personal head, the head is drawn from the spec's seed (0 without one); torch's global generator
    is not changed. A file of pretrained weights named in the spec is not needed.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file is corrupt, truncated, of another format or version, holds a value that is not finite, or its names
        or shapes do not match its spec; the message names the file.
    """
    path = Path(path)
    arrays, metadata = load_arrays(path)
    spec = _read_spec(path, metadata)
    arguments = {**without_weights(spec), "seed": spec.get("seed") or 0}
    try:
        model = build(**arguments)
        _load(model, arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return model.eval(), spec


def _read_spec(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the build arguments in a file's metadata; ValueError for another format or version."""
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: format {metadata.get('format')!r} is not {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise ValueError(f"{path}: version {metadata.get('version')!r} cannot be read; this program reads {VERSION}")
    try:
        spec = json.loads(metadata["spec"])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: its spec cannot be read: {error}") from error
    _check_spec(spec, str(path))
    return spec


def _check_spec(spec: object, owner: str) -> None:
    """Raise ValueError, naming `owner`, unless `build` takes these arguments and JSON can hold them."""
    if not isinstance(spec, Mapping) or not {"name", "num_classes"} <= set(spec):
        raise ValueError(f"{owner}: spec must be a mapping with at least 'name' and 'num_classes', got {spec!r}")
    own = ("name", "num_classes", *SIZES, *DESCRIPTION)
    options = {key: value for key, value in spec.items() if key not in own}
    sizes = {key: spec.get(key, default) for key, default in SIZES.items()}
    description: dict[str, Any] = {key: spec.get(key) for key in DESCRIPTION}
    try:
        check_build(spec["name"], spec["num_classes"], options=options, **sizes)
        check_description(spec["name"], spec["num_classes"], **sizes, **description)
        json.dumps(dict(spec), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{owner}: {error}") from error


def _to_array(path: str | os.PathLike[str], name: str, value: Tensor) -> NDArray[Any]:
    if value.dtype not in (torch.float16, torch.float32, torch.float64):
        raise ValueError(f"{path}: {name} has type {value.dtype}; there are: float16, float32, float64")
    return value.detach().cpu().numpy()


def _load(model: TwoHead, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy the arrays of a file into a new network, which is converted to their floating-point type."""
    types = sorted({str(array.dtype) for array in arrays.values()})
    if types not in (["float16"], ["float32"], ["float64"]):
        raise ValueError(f"expected arrays of one floating-point type, got {types}")
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    model.to(next(iter(state.values())).dtype)
    personal = {name: value for name, value in state.items() if name.startswith(PERSONAL_PREFIX)}
    model.load_global_state({name: value for name, value in state.items() if name not in personal})
    if personal:
        head = {name.removeprefix(PERSONAL_PREFIX): value for name, value in personal.items()}
        _check_personal(model, head)
        model.personal_head.load_state_dict(head)


def _check_personal(model: TwoHead, head: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `head` has the names and shapes of the model's personal head."""
    expected = {name: tuple(value.shape) for name, value in model.personal_head.state_dict().items()}
    got = {name: tuple(value.shape) for name, value in head.items()}
    if got != expected:
        raise ValueError(f"the personal head does not fit: expected {expected}, got {got}")
