"""Adapters on test streams; the only module in which test labels meet predictions.

An evaluation metric beside accuracy is a function in `METRICS`; the report says how it is named and formatted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtta.client.adapters import make_adapter
from fedtta.client.algorithms.training import labelled
from fedtta.data import Federation, Rows, Stream
from fedtta.messages.replies import WEIGHT_BINS, EvaluationResult
from fedtta.messages.requests import AdapterRow
from fedtta.models import TwoHead
from fedtta.models.accelerator import clock
from fedtta.settings import Settings
from fedtta.tta import Adapter, Statistics
from fedtta.tta.arrays import to_host
from fedtta.tta.estimates import Calibration, Signals, calibrations, estimates, signals
from fedtta.tta.heads import two_heads
from fedtta.tta.knn_per import Datastore, KNNPer, choose_weight
from fedtta.tta.registry import info

#: Name → (probabilities [n, K], labels [n]) → number, averaged over clients by their test samples.
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {}


@dataclass(frozen=True)
class Neighbours:
    """A client's memorized samples under one network (kNN-Per).

    Parameters
    ----------
    store : Datastore
        Features and labels of the training split.
    x, y : Tensor [n, C, H, W], [n]
        The validation split.
    """

    store: Datastore
    x: Rows
    y: Tensor

    def best_weight(self, adapter: KNNPer, batch_size: int) -> float:
        """Return the weight of the vote with the most correct validation predictions; ValueError without samples."""
        if not len(self.y):
            raise ValueError("knn_per: this client has no validation samples to choose weight on; set knn_per[weight=]")
        parts = [adapter.parts(part) for part in self.x.split(batch_size)]
        votes, heads = (torch.cat(column) for column in zip(*parts, strict=True))
        return choose_weight(votes, heads, self.y)


@dataclass(frozen=True)
class Labelled:
    """A client's samples that estimates of accuracy are calibrated on.

    Parameters
    ----------
    x, y : Tensor [n, C, H, W], [n]
        The validation split.
    heads : bool
        Whether the client has trained a personal head, so that agreement of the heads says something.
    """

    x: Rows
    y: Tensor
    heads: bool


@dataclass(frozen=True)
class Calibrated:
    """The calibrations of a row's estimates by name (`fedtta.tta.estimates`), and `Labelled.heads`."""

    known: dict[str, Calibration]
    heads: bool


def memorizes(row: AdapterRow) -> bool:
    """Return whether a row's adapter needs the client's memorized samples."""
    return "datastore" in info(row.adapter).needs


@torch.no_grad()
def memorize(
    model: TwoHead, federation: Federation, partition: int, settings: Settings, device: torch.device
) -> Neighbours:
    """Return a client's memorized samples under the network as it is, in evaluation mode."""
    model.eval()
    split = federation.splits[partition]
    x, y = labelled(federation, split.train, device)
    z = torch.cat([model.features(part) for part in x.split(settings.eval_batch_size)])
    return Neighbours(Datastore(z, y), *labelled(federation, split.validation, device))


def evaluate_row(
    row: AdapterRow,
    model: TwoHead,
    statistics: Statistics | None,
    samples: Stream,
    settings: Settings,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    neighbours: Neighbours | None = None,
    calibrated: Calibrated | None = None,
) -> EvaluationResult:
    """Predict a stream in order with a fresh adapter and count correct predictions; estimate accuracy if asked to."""
    total = _count(row, len(samples.y), settings)
    adapter = make_adapter(row, model, settings, statistics, rates, neighbours)
    adapter.reset()
    size = _batch_size(adapter, settings, total)
    device = next(model.parameters()).device
    start = clock(device)
    right, predicted = torch.zeros((), dtype=torch.int64, device=samples.y.device), []
    for begin in range(0, total, size):
        stop = min(begin + size, total)
        probabilities = adapter.predict(samples.x[begin:stop])
        right += (probabilities.argmax(1) == samples.y[begin:stop]).sum()
        if METRICS or calibrated:
            predicted.append(probabilities)
    correct = int(right)  # the only wait for a GPU that evaluation adds
    seconds = clock(device) - start
    labels = samples.y[:total].cpu()
    return EvaluationResult(
        label=row.label,
        shift=samples.name,
        correct=correct,
        total=total,
        seconds=seconds,
        **_weights(adapter, info(row.adapter).needs),
        metrics={name: float(metric(torch.cat(predicted).cpu(), labels)) for name, metric in METRICS.items() if total},
        estimates=_estimates(calibrated, model, samples.x, predicted) if calibrated and total else {},
    )


def calibrate_row(
    row: AdapterRow,
    model: TwoHead,
    statistics: Statistics | None,
    samples: Labelled,
    settings: Settings,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    neighbours: Neighbours | None = None,
) -> Calibrated:
    """Calibrate the estimates of a row's accuracy on what a fresh adapter predicts for labelled samples, as a stream.

    There are none without samples.
    """
    total = _count(row, len(samples.y), settings)
    adapter = make_adapter(row, model, settings, statistics, rates, neighbours)
    adapter.reset()
    if not total:
        return Calibrated({}, samples.heads)
    size = _batch_size(adapter, settings, total)
    predicted = [adapter.predict(samples.x[begin : min(begin + size, total)]) for begin in range(0, total, size)]
    correct = to_host(torch.cat(predicted).argmax(1) == samples.y[:total])
    return Calibrated(calibrations(_signals(model, samples.x, predicted, samples.heads), correct), samples.heads)


def _estimates(calibrated: Calibrated, model: TwoHead, x: Rows, predicted: list[Tensor]) -> dict[str, list[float]]:
    """Return name → [accuracy, low, high], from predictions of x alone."""
    found = estimates(calibrated.known, _signals(model, x, predicted, calibrated.heads))
    return {name: [one.accuracy, one.low, one.high] for name, one in found.items()}


@torch.no_grad()
def _signals(model: TwoHead, x: Rows, predicted: list[Tensor], heads: bool) -> Signals:
    """Return the signals of samples x [n, ...] that were predicted, and run the unadapted network on them."""
    model.eval()
    ends = np.cumsum([len(part) for part in predicted]).tolist()
    both = [two_heads(model, x[begin:end])[1:] for begin, end in zip([0, *ends], ends, strict=False)]
    unadapted, personal = (to_host(torch.cat(logits)) for logits in zip(*both, strict=True))
    return signals(to_host(torch.cat(predicted)), unadapted, personal if heads else None)


def _count(row: AdapterRow, total: int, settings: Settings) -> int:
    """Return how many of `total` samples a row's adapter sees."""
    limited = "gradients" in info(row.adapter).needs and settings.tune_samples
    return min(total, settings.tune_samples) if limited else total


def _weights(adapter: Adapter, needs: frozenset[str]) -> dict[str, Any]:
    """Return histogram and mean of e, the weight of the global head, of an adapter that chooses it per sample."""
    weight = adapter.report("weight").get("weight")
    if not (isinstance(weight, torch.Tensor) and len(weight) and needs & {"descriptor", "dle"}):
        return {}
    counts, _ = np.histogram(weight.numpy(), bins=WEIGHT_BINS, range=(0.0, 1.0))
    return {"weight_histogram": counts.tolist(), "weight_mean": float(weight.mean())}


def _batch_size(adapter: Adapter, settings: Settings, total: int) -> int:
    """Return how many samples an adapter gets at once; one that adapts to a whole test set gets all of it."""
    if adapter.takes_whole_set:
        return max(total, 1)
    return settings.adapt_batch_size if adapter.per == "batch" else settings.eval_batch_size
