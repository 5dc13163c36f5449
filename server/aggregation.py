"""Server aggregation by name: the strategy, what it needs of clients, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from messages.replies import Identity
from messages.requests import Adapt, RefineRates, Request, Summarize, Train
from server.checkpoints import STRATEGY, Records
from server.nodes import cohort_size
from server.trainings import TrainingStage
from settings import Settings, SettingsError
from strategies import GMA, QFFL, FedAvg, FedAvgM, FedProx, Krum, Median, PartialFedAvg, Robust, Rule, TrimmedMean

#: Aggregation → its Byzantine-robust rule.
ROBUST: dict[str, Callable[[Settings], Rule]] = {
    "fedmedian": lambda settings: Median(),
    "fedtrimmedavg": lambda settings: TrimmedMean(settings.trim_fraction),
    "krum": lambda settings: Krum(settings.krum_malicious),
    "multikrum": lambda settings: Krum(settings.krum_malicious, settings.krum_keep),
}
#: The mean weighted by examples, which trainings that change the aggregation or keep arrays on the clients start from.
PLAIN = "fedavg"
AGGREGATIONS = (PLAIN, "fedprox", "fedavgm", "qffl", "gma", *ROBUST)
#: Aggregation → metrics that it needs of every client, keys of `messages.replies.Trained`.
CLIENT_METRICS = {"qffl": ("global-loss",)}
#: Requests whose replies are aggregated, and which of the client's sizes bounds the examples that it may claim.
AGGREGATED: dict[type[Request], int] = {Train: 0, Summarize: 0, RefineRates: 1}
CURRENT, MOMENTUM = f"{STRATEGY}.current", f"{STRATEGY}.momentum"


def check_aggregation(settings: Settings) -> None:
    """Refuse an aggregation that does not exist, or that does not fit the statistics' weighting.

    Raises
    ------
    SettingsError
        The message names what is allowed.
    """
    if settings.aggregation not in AGGREGATIONS:
        raise SettingsError(f"aggregation = {settings.aggregation!r}: allowed are {', '.join(AGGREGATIONS)}")
    if settings.aggregation in ROBUST and (settings.leave_one_out or settings.statistics_weighting != "uniform"):
        raise SettingsError(
            f"aggregation = {settings.aggregation!r}: allowed with leave-one-out = False and statistics-weighting = "
            f"'uniform' only, since its statistics are no weighted means"
        )


def joining_rule(settings: Settings) -> Rule | None:
    """Return the Byzantine-robust rule that the settings ask for; None: means.

    Raises
    ------
    SettingsError
        A parameter does not fit the rule, or the run has too few clients for it.
    """
    if settings.aggregation not in ROBUST:
        return None
    rule = ROBUST[settings.aggregation](settings)
    sampled = {
        f"fraction-train = {settings.fraction_train:g} of clients = {settings.clients} samples": cohort_size(
            settings.clients, settings.fraction_train
        ),
        f"rates-clients = {settings.rates_clients} samples": settings.rates_clients or settings.clients,
    }
    for what, number in sampled.items():
        if number < rule.least:
            raise SettingsError(
                f"aggregation = {settings.aggregation!r} needs {rule.least} clients a round: {what} {number}"
            )
    return rule


def make_strategy(stage: TrainingStage, settings: Settings) -> Strategy:
    """Return a stage's strategy, which takes every node that it is shown: the round loop samples.

    Raises
    ------
    SettingsError
        A robust rule has too few clients, or the stage aggregates only a part of the network.
    """
    check_aggregation(settings)
    everyone: dict[str, Any] = {
        "fraction_train": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    rule = joining_rule(settings)
    if rule is not None and stage.partial:
        raise SettingsError(
            f"aggregation = {settings.aggregation!r}: allowed where all arrays are aggregated; {stage.algorithm} keeps "
            "some on the clients"
        )
    if rule is not None:
        return Robust(rule, **everyone)
    if stage.partial:
        return PartialFedAvg(stage.aggregated, stage.local, **everyone)
    if settings.aggregation == "fedprox":
        return FedProx(settings.proximal_mu, **everyone)
    if settings.aggregation == "fedavgm":
        return FedAvgM(server_momentum=settings.server_momentum, **everyone)
    if settings.aggregation == "qffl":
        return QFFL(settings.fairness, **everyone)
    if settings.aggregation == "gma":
        return GMA(settings.mask_threshold, **everyone)
    return FedAvg(**everyone)


def client_metrics(settings: Settings) -> tuple[str, ...]:
    """Return the metrics that the aggregation needs of every client beside the usual ones."""
    return CLIENT_METRICS.get(settings.aggregation, ())


def needed_replies(settings: Settings, kind: type[Request], asked: int) -> int:
    """Return how many usable replies a round of requests of a kind needs.

    `min-replies`, or all when fewer clients are asked; where replies are aggregated by a robust rule, at least as many
    as it needs, which may be more than are asked.
    """
    rule = joining_rule(settings) if kind in AGGREGATED else None
    return max(min(settings.min_replies, asked), rule.least if rule else 1)


def most_examples(settings: Settings, kind: type[Request], identity: Identity | None) -> int:
    """Return how many examples a client may claim: at most those of its identity, and `max-examples`."""
    if kind is Adapt:
        return min(settings.max_examples, settings.stream_batch)
    if kind not in AGGREGATED or identity is None:
        return settings.max_examples
    return min(settings.max_examples, identity.sizes[AGGREGATED[kind]])


def strategy_records(strategy: Strategy) -> Records:
    """Return a strategy's state between two rounds as records of a checkpoint; none when it has no state.

    FedAvgM keeps a velocity and its own copy of the model. The others keep nothing that changes a result: what
    `configure_train` notes is replaced in each round, and `PartialFedAvg` only saves bandwidth (a client that has
    values of its own keeps them, whatever it is sent).
    """
    if not isinstance(strategy, flower.FedAvgM) or strategy.current_arrays is None:
        return {}
    current = {name: array.numpy() for name, array in strategy.current_arrays.items()}
    if strategy.momentum_vector is None:
        return {CURRENT: current}
    return {CURRENT: current, MOMENTUM: dict(zip(current, strategy.momentum_vector, strict=True))}


def load_strategy_records(strategy: Strategy, records: Records) -> None:
    """Restore what `strategy_records` returned."""
    if isinstance(strategy, flower.FedAvgM) and CURRENT in records:
        strategy.current_arrays = ArrayRecord({name: Array(value) for name, value in records[CURRENT].items()})
        strategy.momentum_vector = list(records[MOMENTUM].values()) if MOMENTUM in records else None
