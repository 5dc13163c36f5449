"""One test-time round on one client: adapt to the next batch, share what was learned, keep the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.state import Arrays
from tta.collaborator import Collaborator, Share


@dataclass(frozen=True)
class Adapted:
    """What a round gave.

    Parameters
    ----------
    probabilities : Tensor [B, K]
    shared, domain, start : dict
        What other clients may mix; the statistics that describe the client's domain, `<layer>.mean` and
        `<layer>.variance`; and what `shared` was before anything was adapted.
    state : dict
        What the next round goes on from; it stays on the device.
    seconds : float
        Of the adaptation.
    """

    probabilities: Tensor
    shared: Arrays
    domain: Arrays
    start: Arrays
    state: Arrays
    seconds: float


def adapt(
    adapter: Collaborator,
    x: Tensor,
    share: Share,
    state: Arrays | None,
    received: Mapping[str, NDArray[Any]] | None,
) -> Adapted:
    """Go on from `state`, take over `received`, adapt to `x` and predict it.

    Parameters
    ----------
    adapter : Collaborator
        Fresh from the network.
    x : Tensor [B, C, H, W]
        The next batch; no labels.
    state : dict or None
        The adapter's state after its last round; None at the beginning.
    received : mapping or None
        The client's mixture; None where there is none yet.

    Raises
    ------
    ValueError
        As `Collaborator.load_shared`, `load_state_dict` and `predict`.
    """
    start = _arrays(adapter.shared(share))
    if state is not None:
        adapter.load_state_dict({name: torch.from_numpy(value).to(x.device) for name, value in state.items()})
    if received is not None:
        adapter.load_shared({name: torch.tensor(value, device=x.device) for name, value in received.items()})
    began = time.perf_counter()
    probabilities = adapter.predict(x)
    seconds = time.perf_counter() - began
    domain = {
        f"{layer}.{part}": value.detach().cpu().numpy().copy()
        for layer, moments in adapter.domain().items()
        for part, value in zip(("mean", "variance"), moments, strict=True)
    }
    return Adapted(probabilities, _arrays(adapter.shared(share)), domain, start, _arrays(adapter.state_dict()), seconds)


def score(probabilities: Tensor, labels: NDArray[np.int64], classes: int) -> dict[str, list[int]]:
    """Count right predictions and samples of each class: `correct` [K], `total` [K]. Labels come in here only."""
    right = probabilities.argmax(1).cpu().numpy() == labels
    return {
        "correct": np.bincount(labels[right], minlength=classes).tolist(),
        "total": np.bincount(labels, minlength=classes).tolist(),
    }


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}
