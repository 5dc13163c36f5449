"""Running one adapter over one test stream; the only place where test labels meet predictions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from client.neighbours import Neighbours
from data import DATASETS, Stream
from models import TwoHead
from settings import Settings
from tta import Adapter, Statistics
from tta.knn_per import KNNPer
from tta.registry import create, info

BINS = 20  # of the histogram of e over [0, 1]


@dataclass(frozen=True)
class Row:
    """One row of the table: a label, an adapter by name, its options, and the network that it gets.

    `base` is "global", the network as the training left it, or "personalised", what the client made of it.
    """

    label: str
    adapter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    base: str = "global"


def make_adapter(
    row: Row,
    model: TwoHead,
    settings: Settings,
    statistics: Statistics | None = None,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    neighbours: Neighbours | None = None,
    **given: Any,
) -> Adapter:
    """Make a row's adapter, with options that follow from the settings where neither row nor `given` says otherwise.

    `given` are options of the round, such as FedProx's; a method that has no such option goes without.

    Raises
    ------
    ValueError
        As `tta.create`.
    """
    known = (rates or {}).get(str(row.options.get("adapt", "all")))
    known_options = info(row.adapter).options
    applied = {name: value for name, value in given.items() if name in known_options}
    options = {**_defaults(row.adapter, settings), **applied, **row.options}
    adapter = create(row.adapter, model, statistics, known, neighbours.store if neighbours else None, **options)
    if isinstance(adapter, KNNPer) and neighbours is not None and "weight" not in row.options:
        adapter.weight = neighbours.best_weight(adapter, settings.eval_batch_size)
    return adapter


def evaluate_row(
    row: Row,
    model: TwoHead,
    statistics: Statistics | None,
    samples: Stream,
    settings: Settings,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    neighbours: Neighbours | None = None,
) -> dict[str, Any]:
    """Predict a stream in order with a fresh adapter and count what is right.

    Returns
    -------
    dict
        `method`, `shift`, `correct`, `total`, `seconds`; for adapters that choose a weight for each sample also
        `weight_histogram` (BINS counts of e over [0, 1]) and `weight_mean`.
    """
    needs = info(row.adapter).needs
    total = len(samples.y)
    if "gradients" in needs and settings.tune_samples:
        total = min(total, settings.tune_samples)
    adapter = make_adapter(row, model, settings, statistics, rates, neighbours)
    adapter.reset()
    size = _batch_size(adapter, settings, total)
    start = time.perf_counter()
    correct = 0
    for begin in range(0, total, size):
        stop = min(begin + size, total)
        probabilities = adapter.predict(samples.x[begin:stop])
        right = probabilities.argmax(1).cpu() == samples.y[begin:stop].cpu()
        correct += int(right.sum())
    result = {
        "method": row.label,
        "shift": samples.name,
        "correct": correct,
        "total": total,
        "seconds": time.perf_counter() - start,
    }
    weight = adapter.report().get("weight")
    if isinstance(weight, torch.Tensor) and len(weight) and needs & {"descriptor", "dle"}:
        counts, _ = np.histogram(weight.numpy(), bins=BINS, range=(0.0, 1.0))
        result |= {"weight_histogram": counts.tolist(), "weight_mean": float(weight.mean())}
    return result


def _batch_size(adapter: Adapter, settings: Settings, total: int) -> int:
    """Return how many samples an adapter gets at once; one that adapts to a whole test set gets all of it."""
    if adapter.takes_whole_set:
        return max(total, 1)
    return settings.adapt_batch_size if adapter.per == "batch" else settings.eval_batch_size


def _defaults(adapter: str, settings: Settings) -> dict[str, Any]:
    """Return the options of an adapter that follow from the run's settings, where a row does not set them."""
    follow: dict[str, Any] = {"seed": settings.seed}
    if views := info(adapter).views:
        known = DATASETS[settings.dataset]
        follow["augment"] = views.for_data(flip=known.flip, crop=known.crop)
    if settings.leave_one_out:
        follow["leave_one_out"] = settings.clients
    return {name: value for name, value in follow.items() if name in info(adapter).options}
