"""What every two-head method does first: the network, once, and its three outputs checked."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn


def check_two_heads(model: nn.Module, method: str) -> int:
    """Return d, the number of features; raise ValueError if `model` is not built like `models.TwoHead`."""
    missing = [name for name in ("features", "head", "personal_head") if not hasattr(model, name)]
    if missing:
        raise ValueError(f"{method} needs a two-head model; {type(model).__name__} has no {', '.join(missing)}")
    heads = cast(nn.Linear, model.head), cast(nn.Linear, model.personal_head)
    if heads[0].weight.shape != heads[1].weight.shape:
        shapes = [tuple(head.weight.shape) for head in heads]
        raise ValueError(f"{method}: head and personal_head differ in shape: {shapes[0]} and {shapes[1]}")
    return heads[0].in_features


def two_heads(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the network on `x [B, ...]`.

    Returns
    -------
    z : Tensor [B, d]
        Features.
    logits_global, logits_personal : Tensor [B, K]

    Raises
    ------
    ValueError
        The network gives a value that is not finite; the message names the samples.
    """
    z = cast(Tensor, model.features(x))  # type: ignore[operator]
    logits_global, logits_personal = model.head(z), model.personal_head(z)  # type: ignore[operator]
    finite = torch.isfinite(torch.cat((z, logits_global, logits_personal), 1)).all(1)  # [B]
    if not bool(finite.all()):
        bad = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(f"the network's output for samples {bad} of the batch is not finite")
    return z, logits_global, logits_personal


def statistic_vector(name: str, value: Tensor | None, features: int) -> np.ndarray:
    """Return the statistic `name` as float64 [d]; raise ValueError naming it if it is no finite vector of d values."""
    vector = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    if vector.shape != (features,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}, the model has {features} features")
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(f"{name} holds values that are not finite")
    return vector.numpy().copy()


def class_count(model: nn.Module, num_classes: int | None, least: int = 2) -> int:
    """Return K: as given, or `model.num_classes`; raise ValueError where there is neither, or K is below `least`."""
    known = getattr(model, "num_classes", None) if num_classes is None else num_classes
    if not isinstance(known, int):
        raise ValueError(f"num_classes is needed: {type(model).__name__} does not tell how many classes it has")
    if known < least:
        raise ValueError(f"num_classes={known} must be at least {least}")
    return known


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ValueError naming `name` unless `value` is finite and in [low, high] (or (low, high])."""
    inside = (low < value if open_low else low <= value) and value <= high
    if not (math.isfinite(value) and inside):
        raise ValueError(f"{name}={value} is outside {'(' if open_low else '['}{low}, {high}]")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError listing `choices` unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; there are: {', '.join(choices)}")
