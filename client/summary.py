"""A client's statistics under the received encoder (FedTHE, section 4.2; BTFL, section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.checks import check_means, check_ranges
from models import TwoHead
from tta import Statistics
from tta.statistics import ON_REQUEST, discretise

OWN = "statistics."  # before the names of the client's own statistics in its private state
STATISTICS_ROUND = "statistics-round"  # under which round's model they were computed


@torch.no_grad()
def summarise(model: TwoHead, pixels: Tensor, batch_size: int) -> dict[str, NDArray[np.float64]]:
    """Compute the statistics in evaluation mode, without augmentation, over the training split.

    Parameters
    ----------
    model : TwoHead
        The received network with the client's personal head.
    pixels : Tensor uint8 [n, C, H, W]
        The training split, n at least 1.

    Returns
    -------
    dict, float64
        `descriptor` [d]: mean feature z. `dle` [d]: fraction of samples with ẑ_i = 0, ẑ = round(tanh z), raw.
        `entropy_local`, `entropy_global` [1]: mean entropy in nats of the personal and the global head.

    Raises
    ------
    ValueError
        There is no sample, or a feature is negative or NaN (the discretisation needs a ReLU before the heads).
    """
    if len(pixels) == 0:
        raise ValueError("statistics need at least one training sample")
    model.eval()
    sums: dict[str, Tensor] = {}
    for batch in pixels.split(batch_size):
        z = model.features(batch.float() / 255)  # (B, d)
        if not bool((z >= 0).all()):
            raise ValueError("a feature is negative or no number: statistics need a ReLU before the heads")
        parts = {
            "descriptor": z.double().sum(0),
            "dle": (discretise(z) == 0).double().sum(0),
            "entropy_local": _entropy(model.personal_head(z)).sum(0, keepdim=True),
            "entropy_global": _entropy(model.head(z)).sum(0, keepdim=True),
        }
        sums = {name: sums.get(name, 0) + value for name, value in parts.items()}
    return {name: (value / len(pixels)).cpu().numpy() for name, value in sums.items()}


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of softmax(logits) [B, K] → [B], in float64."""
    log_p = logits.double().log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def own_statistics(local: Mapping[str, NDArray[Any]], round: int) -> dict[str, NDArray[Any]]:
    """Return a client's statistics as its private state keeps them, tagged with the round of the model."""
    return {**{f"{OWN}{name}": value for name, value in local.items()}, STATISTICS_ROUND: np.array(round)}


def join_statistics(
    private: Mapping[str, NDArray[Any]],
    means: Mapping[str, NDArray[Any]],
    round: int,
    device: torch.device,
    trains: bool = True,
) -> Statistics:
    """Join the client's own statistics of a round with the means over clients.

    A client that never `trains` has none of its own: it gets the pooled means (`client.pooled`) alone.

    Raises
    ------
    ValueError
        A client that trains has none of that round, or the means do not fit.
    """
    pooled = {name: value for name, value in means.items() if name in ON_REQUEST}
    check_ranges(pooled)
    if not trains:
        return Statistics.combine({}, pooled, device)
    if int(private.get(STATISTICS_ROUND, np.array(-1))) != round:
        raise ValueError(f"this client has no statistics of round {round}")
    own = {name.removeprefix(OWN): value for name, value in private.items() if name.startswith(OWN)}
    check_means({name: value for name, value in means.items() if name not in ON_REQUEST}, own)
    return Statistics.combine(own, means, device)
