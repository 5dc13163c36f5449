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
) -> EvaluationResult:
    """Predict a stream in order with a fresh adapter and count correct predictions."""
    total = len(samples.y)
    if "gradients" in info(row.adapter).needs and settings.tune_samples:
        total = min(total, settings.tune_samples)
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
        if METRICS:
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
    )


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
