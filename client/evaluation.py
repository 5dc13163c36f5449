"""Adapters on test streams; the only module in which test labels meet predictions.

An evaluation metric beside accuracy is a function in `METRICS`; the report says how it is named and formatted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtta.client.adapters import AdapterContext, candidate_row, chooses, make_adapter
from fedtta.client.algorithms.training import generator, labelled, process_draws_by
from fedtta.data import Federation, Rows, Stream
from fedtta.messages.replies import WEIGHT_BINS, EvaluationResult
from fedtta.messages.requests import AdapterRow
from fedtta.models import TwoHead
from fedtta.models.accelerator import clock
from fedtta.models.deadline import Stopped
from fedtta.settings import Settings
from fedtta.tta import Adapter, Statistics
from fedtta.tta.arrays import to_host
from fedtta.tta.auto import NONE, USUAL, Gains, calibrate_gains
from fedtta.tta.checks import Diverged, check_finite, finite_rows
from fedtta.tta.estimates import Calibration, Signals, calibrations, estimates, signals
from fedtta.tta.heads import two_heads
from fedtta.tta.knn_per import Datastore, KNNPer, choose_weight
from fedtta.tta.registry import candidates_of, info, needs_of
from fedtta.tta.statistics import STATISTICS_NEEDS

#: Name → (probabilities [n, K], labels [n]) → number, averaged over clients by their test samples.
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {}
#: By which a row of probabilities may miss one: far more than float16 rounds, far less than logits do.
SUM_TOLERANCE = 0.02


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
    """What labelled samples say about a row.

    Parameters
    ----------
    known : dict
        The calibrations of its estimates by name (`fedtta.tta.estimates`); empty where they are not asked for.
    heads : bool
        See `Labelled`.
    gains : Gains or None
        Those of what its adapter chooses from, if it does (`fedtta.tta.auto`).
    """

    known: dict[str, Calibration]
    heads: bool = False
    gains: Gains | None = None


def memorizes(row: AdapterRow) -> bool:
    """Return whether a row's adapter, or a candidate that it names, needs the client's memorized samples."""
    return "datastore" in needs_of(row.adapter, row.options)


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


@contextmanager
def _naming(row: AdapterRow, samples: str) -> Iterator[None]:
    """Say in an error which of a client's rows failed, and on which samples; a deadline is no error of a row."""
    try:
        yield
    except Stopped:
        raise
    except ValueError as error:
        raise ValueError(f"{row.label} on {samples}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"{row.label} on {samples}: {type(error).__name__}: {error}") from error


@contextmanager
def _unchanged(model: nn.Module, x: Rows) -> Iterator[None]:
    """Raise ValueError if an adapter writes to what the other rows get, too: the network, or images x in memory."""
    shared = {
        "the network": [*model.parameters(), *model.buffers()],
        "its images": [x] if isinstance(x, Tensor) else [],
    }
    before = {what: _versions(tensors) for what, tensors in shared.items()}
    yield
    if changed := [what for what, tensors in shared.items() if _versions(tensors) != before[what]]:
        raise ValueError(f"the adapter changes {' and '.join(changed)} in place, which other rows share")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written to."""
    return [one._version for one in tensors if not one.is_inference()]


def _seeded(row: AdapterRow, samples: str, context: AdapterContext[TwoHead]) -> AbstractContextManager[None]:
    """Seed what an adapter draws from the process's generators, whatever rows and clients came before."""
    draw = generator(context.settings.seed, f"{row.label} on {samples}")
    return process_draws_by(draw, next(context.model.parameters()).device)


def evaluate_row(
    row: AdapterRow, context: AdapterContext[TwoHead], samples: Stream, calibrated: Calibrated | None = None
) -> EvaluationResult:
    """Predict a stream in order with a fresh adapter and count correct predictions; estimate accuracy if asked to.

    A prediction that is not finite, or of a batch at which the adapter diverged, is wrong; the metric "not_finite"
    counts these.

    Raises
    ------
    ValueError
        As `make_adapter` and `Adapter.predict`; or the adapter wrote to what the other rows share, or its rows are no
        probabilities.
    """
    with _naming(row, samples.name), _unchanged(context.model, samples.x), _seeded(row, samples.name, context):
        return _evaluated(row, context, samples, calibrated)


def _evaluated(
    row: AdapterRow, context: AdapterContext[TwoHead], samples: Stream, calibrated: Calibrated | None
) -> EvaluationResult:
    total, estimated = _count(row, len(samples.y), context.settings), bool(calibrated and calibrated.known)
    adapter = make_adapter(row, context, calibrated.gains if calibrated else None)
    adapter.reset()
    size = _batch_size(adapter, context.settings, total)
    device = next(context.model.parameters()).device
    start = clock(device)
    counts, predicted = torch.zeros(3, dtype=torch.int64, device=samples.y.device), []  # right, not finite, no sum
    for begin in range(0, total, size):
        stop = min(begin + size, total)
        probabilities = _predict(adapter, samples.x[begin:stop], context.model)
        finite = finite_rows(probabilities)
        right = (probabilities.argmax(1) == samples.y[begin:stop]) & finite
        odd = (probabilities.sum(1) - 1).abs() > SUM_TOLERANCE
        counts += torch.stack([right, ~finite, odd & finite]).sum(1)
        if METRICS or estimated:
            predicted.append(probabilities)
    correct, broken, odd_rows = counts.tolist()  # the only wait for a GPU that evaluation adds
    if odd_rows:
        raise ValueError(f"{odd_rows} of {total} rows do not sum to one: an adapter returns probabilities, not logits")
    seconds = clock(device) - start
    labels = samples.y[:total].cpu()
    found = {}
    if calibrated and estimated and total and not broken:
        found = _estimates(calibrated, context.model, samples.x, predicted)
    metrics = {name: float(metric(torch.cat(predicted).cpu(), labels)) for name, metric in METRICS.items() if total}
    return EvaluationResult(
        label=row.label,
        shift=samples.name,
        correct=correct,
        total=total,
        seconds=seconds,
        **_weights(adapter, info(row.adapter).needs),
        metrics=metrics | ({"not_finite": float(broken)} if broken else {}),
        estimates=found,
    )


def calibrate_row(row: AdapterRow, context: AdapterContext[TwoHead], samples: Labelled) -> Calibrated:
    """Calibrate what a row needs on labelled samples, and its estimates if the settings ask for them.

    Both go by what a fresh adapter predicts for the samples as a stream. There are no estimates without samples, or
    where the adapter diverged.

    Raises
    ------
    ValueError
        The row's adapter chooses among candidates, and there are no samples, or a candidate does not fit.
    """
    name = "validation samples"
    with _naming(row, name), _unchanged(context.model, samples.x), _seeded(row, name, context):
        gains = gains_of(row, context, samples) if chooses(row) else None
        if not context.settings.estimate_accuracy or not len(samples.y):
            return Calibrated({}, samples.heads, gains)
        predicted, correct = predicted_by(row, context, samples, gains)
    if not finite_rows(torch.cat(predicted)).all():
        return Calibrated({}, samples.heads, gains)
    found = signals_of(context.model, samples.x, predicted, samples.heads)
    return Calibrated(calibrations(found, correct), samples.heads, gains)


def gains_of(
    row: AdapterRow, context: AdapterContext[TwoHead], samples: Labelled, usual: Sequence[str] = USUAL
) -> Gains:
    """Return the calibrated gains of what a row's adapter chooses from, each with default options.

    A candidate that diverges on the samples is left out.

    Parameters
    ----------
    usual : sequence of str
        Candidates where the row names none: those of them that fit.

    Raises
    ------
    ValueError
        There are no samples, a candidate that the row names does not fit, or the network's own predictions are not
        finite.
    """
    if not len(samples.y):
        raise ValueError(f"{row.label}: this client has no validation samples to calibrate candidates on")
    alike = replace(context, settings=context.settings.replace(tune_samples=0))  # all candidates see the same samples
    named = candidates_of(row.adapter, row.options)
    names = dict.fromkeys((NONE, *named)) if named else _fitting(usual, context.model, context.statistics)
    rows = {name: candidate_row(name) for name in names}
    predicted = {name: to_host(torch.cat(predicted_by(one, alike, samples)[0])) for name, one in rows.items()}
    check_finite("the network's prediction", predicted[NONE])
    finite = {name: rows for name, rows in predicted.items() if finite_rows(rows).all()}
    return calibrate_gains(finite, to_host(samples.y))


def _fitting(usual: Sequence[str], model: TwoHead, statistics: Statistics | None) -> list[str]:
    """Return the candidates that fit a network and for which there are statistics."""
    lacking = {"nonnegative"} if not model.features_nonnegative else set[str]()
    if not any(isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d) for layer in model.modules()):
        lacking.add("batchnorm")
    if statistics is None:
        lacking |= STATISTICS_NEEDS
    return [name for name in usual if not info(name).needs & lacking]


def predicted_by(
    row: AdapterRow, context: AdapterContext[TwoHead], samples: Labelled, gains: Gains | None = None
) -> tuple[list[Tensor], NDArray[np.bool_]]:
    """Return what a fresh adapter predicts for samples as a stream, batch by batch, and which are right [n].

    A prediction that is not finite, or of a batch at which the adapter diverged, is NaN, and wrong.
    """
    total = _count(row, len(samples.y), context.settings)
    adapter = make_adapter(row, context, gains)
    adapter.reset()
    size = _batch_size(adapter, context.settings, total)
    parts = (samples.x[begin : min(begin + size, total)] for begin in range(0, total, size))
    predicted = [_predict(adapter, part, context.model) for part in parts]
    probabilities = torch.cat(predicted)
    right = (probabilities.argmax(1) == samples.y[:total]) & finite_rows(probabilities)
    return predicted, to_host(right)


def _predict(adapter: Adapter, x: Tensor, model: TwoHead) -> Tensor:
    """Predict a batch; NaN if the adapter diverges, which leaves its state as it was."""
    try:
        return adapter.predict(x)
    except Diverged:
        return x.new_full((len(x), model.num_classes), torch.nan)


def _estimates(calibrated: Calibrated, model: TwoHead, x: Rows, predicted: list[Tensor]) -> dict[str, list[float]]:
    """Return name → [accuracy, low, high], from predictions of x alone."""
    found = estimates(calibrated.known, signals_of(model, x, predicted, calibrated.heads))
    return {name: [one.accuracy, one.low, one.high] for name, one in found.items()}


@torch.no_grad()
def signals_of(model: TwoHead, x: Rows, predicted: list[Tensor], heads: bool) -> Signals:
    """Return the signals of samples x [n, ...] that were predicted, and run the unadapted network on them."""
    model.eval()
    ends = np.cumsum([len(part) for part in predicted]).tolist()
    both = [two_heads(model, x[begin:end])[1:] for begin, end in zip([0, *ends], ends, strict=False)]
    unadapted, personal = (to_host(torch.cat(logits).softmax(1)) for logits in zip(*both, strict=True))
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
