"""Server aggregation by name: the strategy, what it needs of clients, and its state in a checkpoint."""

from __future__ import annotations

from typing import Any

from flwr.serverapp.strategy import Strategy

from fedtta.messages.record import MOST
from fedtta.messages.replies import Identity
from fedtta.messages.requests import Adapt, Evaluate, RefineRates, Request, Summarize, Train
from fedtta.server.checkpoints import STRATEGY, Records
from fedtta.server.nodes import cohorts
from fedtta.server.privacy import least_replies
from fedtta.server.trainings import TrainingStage
from fedtta.settings import Settings, SettingsError
from fedtta.strategies import AGGREGATIONS, PartialFedAvg, RobustAggregator, facts

#: Requests whose replies are aggregated, and which of the client's sizes bounds the examples that it may claim.
AGGREGATED: dict[type[Request], int] = {Train: 0, Summarize: 0, RefineRates: 1}


def check_aggregation(settings: Settings) -> None:
    """Refuse an aggregation that does not exist, or that does not fit the statistics' weighting.

    Raises
    ------
    SettingsError
        The message names what is allowed.
    """
    if settings.aggregation not in AGGREGATIONS:
        raise SettingsError(f"aggregation = {settings.aggregation!r}: allowed are {', '.join(AGGREGATIONS)}")
    robust = AGGREGATIONS[settings.aggregation].byzantine_robust
    if robust and (settings.leave_one_out or settings.statistics_weighting != "uniform"):
        raise SettingsError(
            f"aggregation = {settings.aggregation!r}: allowed with leave-one-out = False and statistics-weighting = "
            f"'uniform' only, since its statistics are no weighted means"
        )


def robust_aggregator(settings: Settings) -> RobustAggregator | None:
    """Return the Byzantine-robust aggregator that the settings ask for; None: means.

    Raises
    ------
    SettingsError
        A parameter does not fit the aggregator, or the run has too few clients for it.
    """
    aggregator = AGGREGATIONS[settings.aggregation].robust_aggregator(settings)
    if aggregator is None:
        return None
    least = aggregator.min_clients
    for what, number in cohorts(settings, settings.clients).items():
        if number < least:
            raise SettingsError(
                f"aggregation = {settings.aggregation!r} needs {least} clients a round: {what} {number}"
            )
    return aggregator


def make_strategy(stage: TrainingStage, settings: Settings) -> Strategy:
    """Return a stage's strategy, which takes every node that it is shown: the round loop samples.

    Raises
    ------
    SettingsError
        The aggregation has too few clients, or cannot aggregate the stage's part of the network.
    """
    check_aggregation(settings)
    everyone: dict[str, Any] = {
        "fraction_train": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    aggregation = AGGREGATIONS[settings.aggregation]
    robust_aggregator(settings)  # refuses too few clients
    if not stage.partial:
        return aggregation.from_settings(settings, **everyone)
    if not aggregation.aggregates_partial:
        raise SettingsError(
            f"aggregation = {settings.aggregation!r}: allowed where all arrays are aggregated; {stage.algorithm} keeps "
            "some on the clients"
        )
    return PartialFedAvg(stage.aggregated, stage.local, **everyone)


def client_metrics(settings: Settings) -> tuple[str, ...]:
    """Return the metrics that the aggregation needs of every client in addition to the standard ones."""
    return AGGREGATIONS[settings.aggregation].client_metrics


def needed_replies(settings: Settings, kind: type[Request], asked: int) -> int:
    """Return how many usable replies a round of requests of a kind needs.

    `min-replies`, or all when fewer clients are asked; where replies are aggregated robustly or securely, at least as
    many as that needs, which may be more than are asked.
    """
    aggregator = robust_aggregator(settings) if kind in AGGREGATED else None
    secure = least_replies(settings, asked) if settings.secure_aggregation and kind in AGGREGATED else 1
    return max(min(settings.min_replies, asked), aggregator.min_clients if aggregator else 1, secure)


def most_examples(settings: Settings, kind: type[Request], identity: Identity | None) -> int:
    """Return how many examples a client may claim: at most those of its identity, and `max-examples`.

    Those of an evaluation are of all test distributions together, and weigh nothing: its results have limits of their
    own (`fedtta.server.limits.EvaluationLimits`).
    """
    if kind is Evaluate:
        return MOST
    if kind is Adapt:
        return min(settings.max_examples, settings.stream_batch)
    if kind not in AGGREGATED or identity is None:
        return settings.max_examples
    return min(settings.max_examples, identity.sizes[AGGREGATED[kind]])


def strategy_records(strategy: Strategy) -> Records:
    """Return a strategy's state between two rounds as records of a checkpoint; none when it has no state."""
    return {f"{STRATEGY}.{group}": arrays for group, arrays in facts(strategy).state_arrays().items()}


def load_strategy_records(strategy: Strategy, records: Records) -> None:
    """Restore what `strategy_records` returned."""
    prefix = f"{STRATEGY}."
    state = {key.removeprefix(prefix): arrays for key, arrays in records.items() if key.startswith(prefix)}
    facts(strategy).load_state_arrays(state)
