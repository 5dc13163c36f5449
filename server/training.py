"""The training loop: local training on the clients, aggregation by a strategy, for all rounds of all stages.

Flower's `Strategy.start` always begins at round 1 and has no statistics round and no per-node result; this loop calls
the same `configure_train` and `aggregate_train`, so Flower's strategies run in it unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedtta.messages.arrays import Arrays, array_bytes, channels_last
from fedtta.messages.flower import read_arrays, strategy_reply
from fedtta.messages.replies import Trained
from fedtta.messages.requests import Train, TrainingTask
from fedtta.privacy.gaussian import Privacy
from fedtta.server.aggregation import client_metrics, load_strategy_records, strategy_records
from fedtta.server.checkpoints import Checkpoints, Position
from fedtta.server.events import NoReplies, RunError
from fedtta.server.limits import Distances, TrainLimits
from fedtta.server.methods import Training
from fedtta.server.nodes import sample
from fedtta.server.rounds import Federation, Outcome, Replied, Round
from fedtta.server.trainings import TrainingStage
from fedtta.server.validation import TrainCheck


def train(
    federation: Federation,
    strategies: Sequence[Strategy],
    training: Training,
    arrays: Arrays,
    checkpoints: Checkpoints | None = None,
) -> Arrays:
    """Run all rounds of all stages, each stage with its strategy, and return the final model.

    With `checkpoints` training continues after the last round that they hold; `arrays` is then the model of that round.

    Raises
    ------
    NoReplies, QuorumMissed
        As `Round.ask`.
    """
    round, last = 0, training.recipe.rounds(federation.settings)
    done = 0 if checkpoints is None else checkpoints.trained(last)
    for stage, strategy in zip(training.recipe.stages, strategies, strict=True):
        past = Distances()
        for earlier in range(getattr(federation.settings, stage.rounds)):
            round += 1
            if round <= done:
                continue
            if checkpoints is not None and earlier and round == done + 1:
                load_strategy_records(strategy, checkpoints.records)
                past = Distances.load(checkpoints.records)
            arrays = train_round(federation, strategy, stage, arrays, training.name, round, past)
            if checkpoints is not None and checkpoints.due(round, last):
                position = Position(training.name, "training", round=round)
                checkpoints.save(position, {"arrays": arrays, **strategy_records(strategy), **past.records()})
    return arrays


def train_round(
    federation: Federation,
    strategy: Strategy,
    stage: TrainingStage,
    arrays: Arrays,
    training: str,
    round: int,
    past: Distances | None = None,
) -> Arrays:
    """Run one training round and return the new model; dtypes are those of the old one.

    Parameters
    ----------
    past : Distances, optional
        Of the stage's earlier rounds; those of this round are added.

    Raises
    ------
    NoReplies, QuorumMissed
        As `Round.ask`.
    RunError
        What the strategy returned is no model of this network.
    """
    start = time.perf_counter()
    settings = federation.settings
    federation.update(training, round)
    cohort = sample(federation.sources, settings.fraction_train, settings.seed, round)
    metrics = client_metrics(settings)
    task = TrainingTask(training, stage.algorithm, stage.objective)
    how: Any = settings.update_format
    template = Train(
        **federation.common(training),
        round=round,
        task=task,
        arrays={},
        client_metrics=list(metrics),
        update_format=how,
    )
    sent = {name: arrays[name] for name in stage.aggregated_names(list(arrays))}
    check = TrainCheck(sent, stage.personal_head, metrics)
    name = f"train {training}"
    limits = TrainLimits.of(settings, sent=sent, past=past or Distances())
    outcome = Round(federation, check, training, round, name, strategy, limits).ask(
        lambda: federation.configured(strategy, round, arrays, template, cohort)
    )
    hidden = {"train_loss": None} if "model" in Privacy.parse(settings.differential_privacy).mechanisms else {}
    aggregated, _ = strategy.aggregate_train(round, [_trained_message(one, metrics) for one in outcome.replies])
    if aggregated is None:
        raise NoReplies(f"{name}, round {round}: the strategy returned no model")
    new = read_arrays(aggregated)
    if reason := _misfit(new, arrays):  # clients would refuse it, and the run would blame them
        raise RunError(f"{name}, round {round}: {type(strategy).__name__} returned no model of this network: {reason}")
    federation.events(
        "round",
        training=training,
        round=round,
        sampled=cohort,
        replied=outcome.replied,
        **{**summarize([one.reply for one in outcome.replies]), **hidden},
        wall_seconds=time.perf_counter() - start,
        bytes_down=outcome.bytes_down,
        bytes_up=outcome.bytes_up,
        **({} if how == "float32" else compression(outcome, array_bytes(sent))),
    )
    return {name: channels_last(value.astype(arrays[name].dtype, copy=False)) for name, value in new.items()}


def _misfit(new: Arrays, old: Arrays) -> str:
    """Return why an aggregate cannot take the place of the model before; empty if it can."""
    if set(new) != set(old):
        return f"missing {sorted(set(old) - set(new))}, unknown {sorted(set(new) - set(old))}"
    for name, value in new.items():
        if value.shape != old[name].shape:
            return f"{name}: shape {value.shape} does not fit {old[name].shape}"
        if not np.isfinite(value).all():
            return f"{name} holds values that are not finite"
    return ""


def _trained_message(replied: Replied, metrics: Sequence[str]) -> Any:
    """Return a reply as Flower's strategies aggregate it."""
    reply: Trained = replied.reply
    values = {"num-examples": reply.num_examples, "train-loss": reply.train_loss}
    values |= {key: getattr(reply, key.replace("-", "_")) for key in metrics}
    return strategy_reply(replied.node, {"arrays": reply.arrays}, values)


def summarize(replies: Sequence[Trained]) -> dict[str, Any]:
    """Summarize the replies of a round: losses weighted by examples, accuracies as means over clients."""
    examples = np.array([one.num_examples for one in replies], dtype=np.float64)
    losses = np.array([one.train_loss for one in replies], dtype=np.float64)
    personal = [(one.personal_validation_correct, one.validation_total) for one in replies]
    return {
        "train_loss": float((losses * examples).sum() / examples.sum()),
        "validation_accuracy": _mean_accuracy([(one.validation_correct, one.validation_total) for one in replies]),
        "personal_validation_accuracy": _mean_accuracy(personal),
        "train_seconds": [float(one.seconds) for one in replies],
    }


def compression(outcome: Outcome, size: int) -> dict[str, Any]:
    """Return what compressed updates saved and cost: bytes as float32, and accuracies as trained and as decoded.

    Parameters
    ----------
    size : int
        Bytes of the arrays that each client would send.
    """
    replies: list[Trained] = [one.reply for one in outcome.replies]
    return {
        "bytes_up_float32": size * len(replies),
        "trained_accuracy": _mean_accuracy([(one.trained_correct, one.validation_total) for one in replies]),
        "decoded_accuracy": _mean_accuracy([(one.decoded_correct, one.validation_total) for one in replies]),
    }


def _mean_accuracy(counts: Sequence[tuple[int | None, int]]) -> float | None:
    """Return the mean accuracy over the clients that have validation samples and report it, None without any."""
    accuracies = [correct / total for correct, total in counts if total and correct is not None]
    return float(np.mean(accuracies)) if accuracies else None
