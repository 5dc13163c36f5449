"""Options of an adapter, tried on a network before any client has trained: one out of range is refused at the start."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtta.models.exported import ExportedNetwork
from fedtta.tta.auto import NONE, Candidates, Gains
from fedtta.tta.estimates import Calibration
from fedtta.tta.registry import candidates_of, create, needs_of
from fedtta.tta.statistics import Statistics

if TYPE_CHECKING:
    from fedtta.models import TwoHead


def check_options(name: str, model: TwoHead | ExportedNetwork, clients: int, **options: Any) -> None:
    """Make an adapter for a copy of a network, with numbers in place of what a client knows.

    Parameters
    ----------
    name : str
        A key of `ADAPTERS`.
    model : TwoHead or ExportedNetwork
        Not changed; without a rotation head, the copy has one if the adapter needs it. With an exported network, torch
        is not imported for the adapters that do without it (`registry.LIGHT`).
    clients : int
        How many take part.
    **options
        As `parse_options` returns them.

    Raises
    ------
    ValueError
        An option is out of range, or does not fit the network.
    """
    network: Any = copy.deepcopy(model)
    needs = needs_of(name, options)
    known: dict[str, Any] = {"statistics": _statistics(network, needs), "clients": clients}
    if "rotation_head" in needs and network.rotation_head is None:  # which its training adds
        from torch import nn

        network.rotation_head = nn.Linear(network.feature_dim, 4)
    if "rates" in needs:
        from fedtta.tta.modules import zero_rates

        known["rates"] = zero_rates(network)
    if "datastore" in needs:
        import torch

        from fedtta.tta.knn_per import Datastore

        known["datastore"] = Datastore(torch.zeros(1, network.feature_dim), torch.zeros(1, dtype=torch.int64))
    names = dict.fromkeys((NONE, *candidates_of(name, options)))
    makers = {one: partial(create, one, **known, record=False) for one in names}
    candidates = Candidates(makers, Gains(dict.fromkeys(names, Calibration(0.0, 0.0))))
    create(name, network, **known, candidates=candidates, **options)


def _statistics(model: Any, needs: frozenset[str]) -> Statistics:
    """Return statistics of the right shapes and within their ranges."""
    features, classes = np.zeros(model.head.in_features), np.full(model.num_classes, 1 / model.num_classes)
    arrays = dict.fromkeys(("descriptor_local", "descriptor_global", "dle_local", "dle_global"), features)
    arrays |= {"entropy_local": np.ones(()), "entropy_global": np.ones(())}
    arrays |= {"label_prior": classes, "confusion": np.diag(classes)}
    if "block_scores" in needs:
        from fedtta.tta.surgical import blocks

        arrays["block_scores"] = np.zeros(len(blocks(model)))
    return Statistics.of_arrays(arrays) if isinstance(model, ExportedNetwork) else Statistics.from_arrays(arrays)
