"""Test-time learning of one client: rounds on its stream in which clients collaborate, and rates of adaptation (ATP).

A test-time round adapts to the next batch of the client's class-imbalanced corruption stream, shares what was learned
and keeps the rest. Rates are refined on the labelled validation split (Bao et al. 2023, Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.data import CorruptionStream, Federation, OwnStream, Rows, corruption_streams
from fedtta.messages.arrays import Arrays
from fedtta.models import TwoHead
from fedtta.models.accelerator import clock
from fedtta.models.arrays import to_device
from fedtta.settings import Scalar, Settings, from_config
from fedtta.tta.atp import Adapt, refine_with_loss
from fedtta.tta.checks import check_finite
from fedtta.tta.collaborator import Collaborator, Share

RENDERED = 1024  # batches kept; 200 CIFAR images take 0.6 MB


@dataclass(frozen=True)
class Adaptation:
    """The result of one test-time round.

    Parameters
    ----------
    probabilities : Tensor [B, K]
    shared, normalization, start : dict
        What other clients may mix; the statistics that describe the client's domain, `<layer>.mean` and
        `<layer>.variance`; and what `shared` was before any adaptation.
    state : dict
        The adapter's state for the next round; it stays on the device.
    seconds : float
        Of the adaptation.
    """

    probabilities: Tensor
    shared: Arrays
    normalization: Arrays
    start: Arrays
    state: Arrays
    seconds: float


def adapt(
    adapter: Collaborator,
    x: Tensor,
    share: Share,
    state: Arrays | None,
    received: Mapping[str, NDArray[Any]] | None,
) -> Adaptation:
    """Continue from `state`, load `received`, adapt to `x` and predict it.

    Parameters
    ----------
    adapter : Collaborator
        Fresh from the network.
    x : Tensor [B, C, H, W]
        The next batch; no labels.
    state : dict or None
        The adapter's state after its last round; None at the beginning.
    received : mapping or None
        The client's mixture of what clients shared; None where there is none yet.

    Raises
    ------
    ValueError
        As `Collaborator.load_shared`, `load_state_dict` and `predict`, or a probability is not finite.
    """
    start = _arrays(adapter.shared(share))
    if state is not None:
        adapter.load_state_dict({name: torch.from_numpy(value).to(x.device) for name, value in state.items()})
    if received is not None:
        adapter.load_shared({name: torch.tensor(value, device=x.device) for name, value in received.items()})
    began = clock(x.device)
    probabilities = adapter.predict(x)
    seconds = clock(x.device) - began
    check_finite("the prediction", probabilities)
    normalization = {
        f"{layer}.{part}": value.detach().cpu().numpy().copy()
        for layer, moments in adapter.domain().items()
        for part, value in zip(("mean", "variance"), moments, strict=True)
    }
    return Adaptation(
        probabilities, _arrays(adapter.shared(share)), normalization, start, _arrays(adapter.state_dict()), seconds
    )


def score(probabilities: Tensor, labels: NDArray[np.int64], classes: int) -> tuple[list[int], list[int]]:
    """Return correct predictions [K] and samples [K] of each class. Labels are used here only; -1 is none."""
    right = probabilities.argmax(1).cpu().numpy()[labels >= 0] == labels[labels >= 0]
    labels = labels[labels >= 0]
    return np.bincount(labels[right], minlength=classes).tolist(), np.bincount(labels, minlength=classes).tolist()


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def streams_of(settings: Settings, federation: Federation) -> CorruptionStream | OwnStream:
    """Return the streams of all clients over the data set's images, or that of a device with data of its own.

    They depend on the settings and the images alone.

    Raises
    ------
    ValueError
        As `fedtta.data.corruption_streams`.
    """
    if not federation.divided:
        return OwnStream(federation, settings.stream_batch, settings.stream_order == "sorted")
    return divided_streams(settings, federation)


def divided_streams(settings: Settings, federation: Federation) -> CorruptionStream:
    """Return the streams of a divided data set for all clients; raises as `fedtta.data.corruption_streams`."""
    return _streams(federation, tuple(settings.select("streams").items()))


@lru_cache(maxsize=2)
def _streams(federation: Federation, chosen: tuple[tuple[str, Scalar], ...]) -> CorruptionStream:
    settings = from_config(dict(chosen))
    return corruption_streams(
        federation.images,
        clients=federation.num_clients,
        size=settings.stream_size,
        mix=settings.stream_mix,
        concentration=settings.stream_concentration,
        order=None if settings.stream_order == "auto" else settings.stream_order,
        severity=settings.severity,
        batch=settings.stream_batch,
        orders=settings.stream_orders,
        seed=federation.seed,
    )


def batch_of(
    stream: CorruptionStream | OwnStream, client: int, round: int, device: torch.device
) -> tuple[Tensor, NDArray[np.int64], str]:
    """Return a client's batch of a round (from 1): images [B, C, H, W] in [0, 1], labels [B], the corruption.

    Images are rounded to bytes, as those of CIFAR-10-C are; labels are for scoring only.
    """
    if isinstance(stream, OwnStream):
        batch = stream.batch(round - 1, device)
        return batch.x.contiguous(memory_format=torch.channels_last), batch.y.cpu().numpy(), batch.corruption
    pixels, labels, corruption = _rendered(stream, client, round - 1, str(device))
    x = pixels.to(device).float().div_(255).contiguous(memory_format=torch.channels_last)
    return x, labels, corruption


@lru_cache(maxsize=RENDERED)
def _rendered(stream: CorruptionStream, client: int, round: int, device: str) -> tuple[Tensor, NDArray[np.int64], str]:
    batch = stream.batch(client, round, device)
    return (batch.x * 255).round().to(torch.uint8).cpu(), batch.y.cpu().numpy(), batch.corruption


@dataclass(frozen=True)
class Refinement:
    """Refined rates, and `loss` (nats) and `correct` of `total` samples in the last epoch.

    Loss and correct predictions are those of the adapted network on each batch, before the rates move.
    """

    rates: dict[str, float]
    loss: float
    correct: int
    total: int


def rates_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return adaptation rates by module; ValueError names those that are not finite."""
    numbers = {name: float(value) for name, value in arrays.items()}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"rates of {', '.join(bad)} are not finite")
    return numbers


def refine_rates(
    model: TwoHead,
    x: Rows,
    y: Tensor,
    rates: Mapping[str, float],
    variant: Adapt,
    settings: Settings,
    generator: torch.Generator,
) -> Refinement:
    """Refine rates for some epochs of shuffled batches; every batch starts from the network's own weights.

    Parameters
    ----------
    x : Tensor [n, C, H, W]
        Validation images in [0, 1], n at least 1.
    y : Tensor [n]
        Their labels.

    Raises
    ------
    ValueError
        As `fedtta.tta.atp.refine`, or the client has no validation samples.
    """
    if len(y) == 0:
        raise ValueError("rates are refined on validation samples, and there are none")
    new, loss, correct = dict(rates), math.nan, 0
    for _ in range(settings.rates_epochs):
        order = to_device(torch.randperm(len(y), generator=generator), y.device)
        loss, correct = 0.0, 0
        for chosen in order.split(settings.rates_batch_size):
            step = refine_with_loss(model, x[chosen], y[chosen], new, settings.rates_learning_rate, variant)
            new, loss, correct = step.rates, loss + step.loss * len(chosen), correct + step.correct
    return Refinement(new, loss / len(y), correct, len(y))
