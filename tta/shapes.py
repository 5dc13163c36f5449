"""Shapes of the statistics that the clients of a run send, which follow from its network and its adapters' needs."""

from __future__ import annotations

from collections.abc import Collection

from fedtta.models import TwoHead
from fedtta.tta.statistics import STATISTICS
from fedtta.tta.surgical import blocks


def statistics_shapes(needs: Collection[str], model: TwoHead) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every statistic that clients send, given the needs of a run's adapters."""
    sizes = {"features": model.feature_dim, "classes": model.num_classes, "blocks": len(blocks(model))}
    return {
        name: (statistic.sized(sizes), "float64")
        for name, statistic in STATISTICS.items()
        if not statistic.on_request or statistic.need in needs
    }
