"""Statistics of labels that clients give to a common mean, for methods that ask for them (ALGORITHMS, section 9).

They say more about a client than its features' means: the frequency of its labels, and where its network errs. They
are sent only if a row of the run needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models import TwoHead
from settings import Settings
from tta.surgical import block_scores


def label_prior(counts: Tensor) -> NDArray[np.float64]:
    """Return the frequency of each class in a training split, [K], from its counts [K]."""
    total = counts.double()
    return (total / total.sum()).cpu().numpy()


@torch.no_grad()
def confusion(model: TwoHead, x: Tensor, y: Tensor, batch_size: int) -> NDArray[np.float64]:
    """Return the frequencies P(ŷ = i, y = j) of the global head on labelled images, [K, K]; they sum to one."""
    guessed = torch.cat([model(part).argmax(1) for part in x.split(batch_size)])
    pairs = torch.bincount(guessed * model.num_classes + y, minlength=model.num_classes**2)
    return (pairs.double() / len(y)).view(model.num_classes, model.num_classes).cpu().numpy()


def pooled_statistics(
    model: TwoHead, counts: Tensor, x: Tensor, y: Tensor, wanted: Collection[str], settings: Settings
) -> dict[str, NDArray[Any]]:
    """Return those statistics that are wanted, float64.

    Parameters
    ----------
    model : TwoHead
        The final global model.
    counts : Tensor int64 [K]
        Of the training split.
    x, y : Tensor [n, C, H, W], [n]
        The validation split.
    wanted : collection of str
        Names in `tta.statistics.STATISTICS`; those computed elsewhere are ignored.

    Raises
    ------
    ValueError
        The validation split is empty and something measured on it is wanted.
    """
    known: dict[str, Callable[[], NDArray[Any]]] = {
        "label_prior": lambda: label_prior(counts),
        "confusion": lambda: confusion(model, x, y, settings.eval_batch_size),
        "block_scores": lambda: block_scores(model, x, y, batch_size=settings.adapt_batch_size).double().cpu().numpy(),
    }
    asked = [name for name in known if name in wanted]
    if not len(y) and set(asked) - {"label_prior"}:
        raise ValueError(f"{', '.join(asked)}: this client has no validation samples")
    return {name: known[name]() for name in asked}
