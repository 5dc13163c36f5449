"""What the settings say against wild clients: how what they send is joined, and what they may claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.nodes import cohort_size
from settings import Settings, SettingsError
from strategies import AGGREGATIONS, RobustAggregator

#: Message types whose replies are joined, and which of the client's sizes bounds the examples that it may claim.
JOINED = {"train": 0, "train.statistics": 0, "train.rates": 1}
ADAPT = "train.adapt"


def joining_rule(settings: Settings) -> RobustAggregator | None:
    """Return the robust rule that the settings ask for; None: means.

    Raises
    ------
    SettingsError
        Its numbers fit no such rule, or the run has too few clients for it.
    """
    rule = AGGREGATIONS[settings.aggregation].robust_aggregator(settings)
    if rule is None:
        return None
    sampled = {
        f"fraction-train = {settings.fraction_train:g} of clients = {settings.clients} samples": cohort_size(
            settings.clients, settings.fraction_train
        ),
        f"rates-clients = {settings.rates_clients} samples": settings.rates_clients or settings.clients,
    }
    for what, number in sampled.items():
        if number < rule.min_clients:
            raise SettingsError(
                f"aggregation = {settings.aggregation!r} needs {rule.min_clients} clients a round: {what} {number}"
            )
    return rule


def needed_replies(settings: Settings, kind: str, asked: int) -> int:
    """Return how many good replies a round of a kind of message needs.

    `min-replies`, or all when fewer clients are asked; where replies are joined by a robust rule, at least as many as
    it needs, which may be more than are asked.
    """
    rule = joining_rule(settings) if kind in JOINED else None
    return max(min(settings.min_replies, asked), rule.min_clients if rule else 1)


def most_examples(settings: Settings, kind: str, identity: Mapping[str, Any] | None) -> int:
    """Return how many examples a client may claim: what it said of its data, and `max-examples`."""
    if kind == ADAPT:
        return min(settings.max_examples, settings.stream_batch)
    if kind not in JOINED or identity is None:
        return settings.max_examples
    return min(settings.max_examples, int(identity["sizes"][JOINED[kind]]))
