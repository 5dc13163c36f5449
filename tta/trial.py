"""Options of an adapter, tried on a network before any client has trained: one out of range is refused at the start."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedtta.tta.auto import NONE, Candidates, Gains
from fedtta.tta.estimates import Calibration
from fedtta.tta.knn_per import Datastore
from fedtta.tta.modules import zero_rates
from fedtta.tta.registry import candidates_of, create, needs_of
from fedtta.tta.statistics import Statistics
from fedtta.tta.surgical import blocks

if TYPE_CHECKING:
    from fedtta.models import TwoHead


def check_options(name: str, model: TwoHead, clients: int, **options: Any) -> None:
    """Make an adapter for a copy of a network, with numbers in place of what a client knows.

    Parameters
    ----------
    name : str
        A key of `ADAPTERS`.
    model : TwoHead
        Not changed; without a rotation head, the copy has one if the adapter needs it.
    clients : int
        How many take part.
    **options
        As `parse_options` returns them.

    Raises
    ------
    ValueError
        An option is out of range, or does not fit the network.
    """
    network, needs = copy.deepcopy(model), needs_of(name, options)
    if "rotation_head" in needs and network.rotation_head is None:  # which its training adds
        network.rotation_head = nn.Linear(model.feature_dim, 4)
    known: dict[str, Any] = {
        "statistics": _statistics(network, needs),
        "rates": zero_rates(network) if "rates" in needs else None,
        "datastore": Datastore(torch.zeros(1, model.feature_dim), torch.zeros(1, dtype=torch.int64)),
        "clients": clients,
    }
    names = dict.fromkeys((NONE, *candidates_of(name, options)))
    makers = {one: partial(create, one, **known, record=False) for one in names}
    candidates = Candidates(makers, Gains(dict.fromkeys(names, Calibration(0.0, 0.0))))
    create(name, network, **known, candidates=candidates, **options)


def _statistics(model: TwoHead, needs: frozenset[str]) -> Statistics:
    """Return statistics of the right shapes and within their ranges."""
    features, classes = torch.zeros(model.feature_dim), torch.full((model.num_classes,), 1 / model.num_classes)
    scores = torch.zeros(len(blocks(model))) if "block_scores" in needs else None
    return Statistics(*(features,) * 4, 1.0, 1.0, classes, torch.diag(classes), scores)
