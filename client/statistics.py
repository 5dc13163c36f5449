"""A client's statistics under the received encoder (FedTHE, section 4.2; BTFL, section 4.1).

Statistics of labels (label prior, confusion, block scores) tell more about a client than means of
features: they are sent only if a method of the run needs them, and only their mean over clients is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.data import Rows
from fedtta.messages.arrays import Arrays
from fedtta.models import TwoHead
from fedtta.settings import Settings
from fedtta.tta import Statistics
from fedtta.tta.statistics import ON_REQUEST, discretise, out_of_range
from fedtta.tta.surgical import block_scores

OWN = "statistics."  # before the names of the client's statistics in its private state
STATISTICS_ROUND = "statistics-round"  # under which round's model they were computed


@torch.no_grad()
def summarise(model: TwoHead, pixels: Rows, batch_size: int) -> dict[str, NDArray[np.float64]]:
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
        There is no sample, or a feature is NaN, or negative though the network says that none can be.
    """
    if len(pixels) == 0:
        raise ValueError("statistics need at least one training sample")
    model.eval()
    sums: dict[str, Tensor] = {}
    fine = []
    for batch in pixels.split(batch_size):
        z = model.features(batch.float() / 255)  # (B, d)
        fine.append((z >= 0 if model.features_nonnegative else z.isfinite()).all())
        parts = {
            "descriptor": z.double().sum(0),
            "dle": (discretise(z) <= 0).double().sum(0),
            "entropy_local": _entropy(model.personal_head(z)).sum(0, keepdim=True),
            "entropy_global": _entropy(model.head(z)).sum(0, keepdim=True),
        }
        sums = {name: sums.get(name, 0) + value for name, value in parts.items()}
    if not bool(torch.stack(fine).all()):
        raise ValueError("a feature is no number, or negative behind a ReLU")
    return {name: (value / len(pixels)).cpu().numpy() for name, value in sums.items()}


@torch.no_grad()
def effective_samples(model: TwoHead, pixels: Rows, labels: Tensor, batch_size: int) -> tuple[float, float]:
    """Return how many training samples stand behind an update, and what share of them behind the features.

    A network can be made so that a single sample contributes, whatever the sizes of split and batch: for all others it
    has no loss, or no active feature (Wen et al., ICML 2022; Boenisch et al., EuroS&P 2023). Both numbers are
    (Σ c)² / Σ c² for the samples' contributions c: the norm of the loss's gradient with respect to the active features
    z, and the norm of z, the latter as a share of the samples.

    Parameters
    ----------
    pixels : Tensor uint8 [n, C, H, W]
    labels : Tensor int64 [n]
    """
    gradients, features = [], []
    for batch, known in zip(pixels.split(batch_size), labels.split(batch_size), strict=True):
        z = model.features(batch.float() / 255)  # [B, d]
        p = torch.softmax(model.head(z).float(), 1)
        error = p - torch.nn.functional.one_hot(known, p.shape[1])  # [B, K]
        gradients.append(((error @ model.head.weight) * (z != 0)).double().norm(dim=1))
        features.append(z.double().norm(dim=1))
    return _effective(torch.cat(gradients)), _effective(torch.cat(features)) / max(len(labels), 1)


def _effective(contributions: Tensor) -> float:
    """Return (Σ c)² / Σ c², the effective number of samples with these contributions [n]; 0 if none contributes."""
    return float(contributions.sum() ** 2 / (contributions**2).sum().clamp(min=1e-300))


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
    means_over: int | None = None,
) -> Statistics:
    """Join the client's own statistics of a round with the means over clients, and how many these are over, if told.

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
    return replace(Statistics.combine(own, means, device), clients=means_over)


@dataclass(frozen=True)
class Samples:
    """What a statistic on request is computed from.

    Parameters
    ----------
    model : TwoHead
        The final global model, in evaluation mode.
    counts : Tensor int64 [K]
        Samples of each class in the training split.
    x, y : Tensor [n, C, H, W], [n]
        The validation split.
    settings : Settings
    """

    model: TwoHead
    counts: Tensor
    x: Rows
    y: Tensor
    settings: Settings

    def validation(self) -> tuple[Rows, Tensor]:
        """Return the validation split; ValueError when it is empty."""
        if not len(self.y):
            raise ValueError("this client has no validation samples")
        return self.x, self.y


def label_prior(samples: Samples) -> NDArray[np.float64]:
    """Return the frequency of each class in the training split, [K]."""
    total = samples.counts.double()
    return (total / total.sum()).cpu().numpy()


@torch.no_grad()
def confusion(samples: Samples) -> NDArray[np.float64]:
    """Return the frequencies P(ŷ = i, y = j) of the global head on the validation split, [K, K]; they sum to one."""
    model, (x, y) = samples.model, samples.validation()
    guessed = torch.cat([model(part).argmax(1) for part in x.split(samples.settings.eval_batch_size)])
    pairs = torch.bincount(guessed * model.num_classes + y, minlength=model.num_classes**2)
    return (pairs.double() / len(y)).view(model.num_classes, model.num_classes).cpu().numpy()


def block_accuracies(samples: Samples) -> NDArray[np.float64]:
    """Return the accuracy on the validation split after adapting one block alone, [blocks]."""
    size = samples.settings.adapt_batch_size
    x, y = samples.validation()
    return block_scores(samples.model, cast(Tensor, x), y, batch_size=size).double().cpu().numpy()


#: Statistics on request by name (`fedtta.tta.statistics.STATISTICS`), float64.
COMPUTED: dict[str, Callable[[Samples], NDArray[np.float64]]] = {
    "label_prior": label_prior,
    "confusion": confusion,
    "block_scores": block_accuracies,
}


def requested_statistics(samples: Samples, wanted: Collection[str]) -> Arrays:
    """Return the statistics that are wanted beside those that are always sent.

    Raises
    ------
    ValueError
        The validation split is empty and something measured on it is wanted; the message names it.
    """
    found: Arrays = {}
    for name in (name for name in COMPUTED if name in wanted):
        try:
            found[name] = COMPUTED[name](samples)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def check_means(means: Mapping[str, NDArray[Any]], own: Mapping[str, NDArray[Any]]) -> None:
    """Refuse means over clients that do not fit the client's own statistics.

    Raises
    ------
    ValueError
        Names, shapes or dtypes differ, or a value is not finite or out of range; the message names it.
    """
    missing, unknown = sorted(set(own) - set(means)), sorted(set(means) - set(own))
    if missing or unknown:
        raise ValueError(f"means of statistics do not fit: missing {missing}, unknown {unknown}")
    for name, value in means.items():
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            expected = f"{own[name].dtype}{list(own[name].shape)}"
            raise ValueError(f"mean {name}: {value.dtype}{list(value.shape)} does not fit {expected}")
    check_ranges(means)


def check_ranges(means: Mapping[str, NDArray[Any]]) -> None:
    """Refuse means of statistics that are not finite or out of range; ValueError names the array."""
    for name, value in means.items():
        if wrong := out_of_range(name, value):
            raise ValueError(f"mean {name}: {wrong}")
