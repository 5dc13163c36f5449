"""After training: the statistics round over all clients that train, and the evaluation over all that test."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedtta.messages.arrays import Arrays, channels_last
from fedtta.messages.flower import read_arrays, strategy_reply
from fedtta.messages.replies import EvaluationResult
from fedtta.messages.requests import Evaluate, Summarize, TrainingTask, Variant
from fedtta.models import TwoHead
from fedtta.privacy.gaussian import Privacy
from fedtta.server.aggregation import robust_aggregator
from fedtta.server.events import Leak, RunError
from fedtta.server.limits import EvaluationLimits, StatisticsLimits
from fedtta.server.methods import Training
from fedtta.server.privacy import feasible_statistics
from fedtta.server.rates import Rates, rate_arrays
from fedtta.server.report.scores import outlying
from fedtta.server.rounds import Federation, Outcome, Round
from fedtta.server.validation import ANY, EvaluateCheck, SummarizeCheck
from fedtta.strategies import StatisticsFedAvg
from fedtta.tta.statistics import DISTRIBUTIONS, ON_REQUEST, STATISTICS
from fedtta.tta.surgical import blocks


def statistics_round(
    federation: Federation, training: Training, arrays: Arrays, model: TwoHead, trained: Collection[int]
) -> Arrays:
    """Let every client personalize the final model, and return the means of the clients' statistics under it.

    All clients that train take part, regardless of the sampled fraction, so that all are evaluated on the same encoder.

    Parameters
    ----------
    model : TwoHead
        Decides the shapes of the statistics.
    trained : collection of int
        Partitions that took part in the training; the others are sent the whole network.

    Raises
    ------
    NoReplies, QuorumMissed
        As `Round.ask`.
    """
    name, round = training.name, training.recipe.rounds(federation.settings) + 1
    weighting: Any = federation.settings.statistics_weighting
    noisy = "statistics" in Privacy.parse(federation.settings.differential_privacy).mechanisms
    averaging = StatisticsFedAvg(
        weighting=weighting,
        aggregator=robust_aggregator(federation.settings),
        distributions=() if noisy else DISTRIBUTIONS,  # with noise, which may make a sum negative, at the end
    )
    shapes = statistics_shapes(training.needs, model)
    federation.update(name, round)
    clients, sent = federation.sources, _Sent(training, arrays, trained)
    common = {**federation.common(name), "round": round, "task": _final_task(training)}
    wanted = [one for one in ON_REQUEST if one in shapes]
    # clients that did not train are sent more; masks cancel where this part is the same (`privacy.sums.common_part`)
    aggregated = list(sent.aggregated) if federation.secure and training.recipe.partial else None

    def request(partition: int) -> Summarize:
        return Summarize(**common, arrays=sent.to(partition), wanted=wanted, aggregated=aggregated)

    # behind a ReLU no honest client's descriptor is negative
    bounds = {"descriptor": (0.0, math.inf)} if model.features_nonnegative else {}
    bounds = dict.fromkeys(shapes, ANY) if noisy else bounds
    limits = StatisticsLimits.of(federation.settings, noisy=noisy)
    check = SummarizeCheck(shapes, bounds)
    leaves_out = training.leaves_own_share_out(federation.settings)
    phase = f"statistics {name}{' for leave-one-out' if leaves_out else ''}"
    asking = Round(federation, check, name, round, phase, limits=limits, least=2 if leaves_out else 1)
    outcome = asking.ask(lambda: federation.addressed(clients, request))
    means = averaging.aggregate_statistics(
        round,
        [
            strategy_reply(one.node, {"statistics": one.reply.statistics}, {"num-examples": one.reply.num_examples})
            for one in outcome.replies
        ],
    )
    if means is None:
        raise RunError(f"statistics {name}: no means")
    _note_missing(federation, name, "statistics", outcome)
    federation.events(
        "statistics",
        training=name,
        round=round,
        replied=outcome.replied,
        seconds=[float(one.reply.seconds) for one in outcome.replies],
    )
    found = feasible_statistics(read_arrays(means)) if noisy else read_arrays(means)
    return {name: channels_last(value) for name, value in found.items()}


def statistics_shapes(needs: Collection[str], model: TwoHead) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every statistic that clients send, given the needs of a run's adapters."""
    sizes = {"features": model.feature_dim, "classes": model.num_classes, "blocks": len(blocks(model))}
    return {
        name: (statistic.sized(sizes), "float64")
        for name, statistic in STATISTICS.items()
        if not statistic.on_request or statistic.need in needs
    }


def evaluation_round(
    federation: Federation,
    training: Training,
    arrays: Arrays,
    statistics: Arrays | None,
    rates: Mapping[Variant, Rates],
    shifts: Sequence[str],
    trained: Collection[int],
    summarized: Collection[int] = (),
) -> None:
    """Run every adapter of a training on every test distribution at every client; results are events.

    A client without labels gets the model, and has no results; one of whose layers some stay on the clients that train
    would be as the seed made it there, and is not sent.

    Parameters
    ----------
    trained : collection of int
        See `statistics_round`.
    summarized : collection of int
        Partitions of the clients that the statistics are means over; empty: all `clients`.

    Raises
    ------
    Leak
        At most clients a test stream held a sample that had been trained on, although splits are drawn once. Splits
        that are redrawn in every round leak on purpose: a note reports how much.
    NoReplies, QuorumMissed
        As `Round.ask`.
    """
    name, round = training.name, training.recipe.rounds(federation.settings) + 1
    clients, sent = _able(federation, training), _Sent(training, arrays, trained)
    if federation.testers and not clients:
        return
    common = {
        **federation.common(name),
        "round": round,
        "task": _final_task(training),
        "statistics": statistics,
        "rates": {variant: rate_arrays(learned) for variant, learned in rates.items()},
    }
    over = len(summarized) if len(summarized) not in (0, federation.settings.clients) else None

    def request(partition: int) -> Evaluate:
        labelled = federation.labelled(partition)
        rows = [row.as_requested() for row in training.rows if labelled or not row.personal]
        asked = list(shifts) if labelled else []
        among = 0 if summarized and partition not in summarized else over  # a reply that was lost is not in the means
        return Evaluate(**common, arrays=sent.to(partition), means_over=among, rows=rows, shifts=asked)

    cells = [(row.label, shift) for row in training.rows for shift in shifts]
    settings = federation.settings
    check, limits = EvaluateCheck(cells, leaks=settings.split != "once"), EvaluationLimits.of(settings)
    asking = Round(federation, check, name, round, f"evaluate {name}", limits=limits)
    outcome = asking.ask(lambda: federation.addressed(clients, request))
    _note_missing(federation, name, "accuracies", outcome)
    for one in outcome.replies:
        for result in one.reply.results:
            _report(federation, name, one.partition, result)
        if one.reply.served:
            federation.events("served", training=name, partition=one.partition, served=one.reply.served)
    _note_diverged(federation, name, outcome)
    _note_outlying(federation, name, outcome)
    _check_leaks(federation, name, outcome)


def _able(federation: Federation, training: Training) -> list[int]:
    """Return the testers that can use a training's model; a note tells of the others."""
    testers = federation.testers
    without = [one for one in testers if not federation.labelled(one)] if training.recipe.partial else []
    if without:
        names = ", ".join(federation.names(without))
        text = f"{training.name}: without labels, {names} cannot have its model: some layers stay on clients that train"
        federation.events("note", text=text)
    return [one for one in testers if one not in without]


def _check_leaks(federation: Federation, name: str, outcome: Outcome) -> None:
    """Report how many test samples had been trained on; raise Leak for any, unless splits are redrawn."""
    checked = sum(one.reply.checked for one in outcome.replies)
    leaked = sum(one.reply.leaked for one in outcome.replies)
    federation.events("leak_check", training=name, checked=checked, leaked=leaked)
    if leaked and federation.settings.split == "once":
        raise Leak(f"{leaked} of {checked} test samples had been trained on")
    if leaked:
        federation.events("note", text=_leak_note(name, leaked, checked))


def _final_task(training: Training) -> TrainingTask:
    """Return the task of a training's last stage."""
    stage = training.recipe.stages[-1]
    return TrainingTask(training.name, stage.algorithm, stage.objective)


class _Sent:
    """The arrays of the final model as they are sent to a client.

    Clients that took part in the training keep their own of what no stage aggregated; the others need all arrays.
    """

    def __init__(self, training: Training, arrays: Arrays, trained: Collection[int]) -> None:
        self.whole, self.trained = arrays, trained
        self.aggregated = {name: arrays[name] for name in training.recipe.aggregated_names(list(arrays))}

    def to(self, partition: int) -> Arrays:
        """Return the arrays for a client; equal ones are the same object."""
        return self.aggregated if partition in self.trained else self.whole


def _leak_note(training: str, leaked: int, checked: int) -> str:
    """Return what `split = published` did to the accuracies of a training."""
    return (
        f"{training}: splits were redrawn in every round, as in the published code of FedTHE and BTFL; {leaked:,} "
        f"of {checked:,} test samples ({100 * leaked / checked:.1f} %) had been trained on, so accuracies on clients' "
        "own data are optimistic"
    )


def _note_missing(federation: Federation, training: str, what: str, outcome: Outcome) -> None:
    """Report the clients that a mean does not include; the reasons are in the events before."""
    if missing := [one for one in outcome.asked if one not in outcome.replied]:
        counts = f"{len(outcome.replied)} of {len(outcome.asked)} clients"
        names = ", ".join(federation.names(missing))
        federation.events("note", text=f"{training}: {what} of {counts} only; missing: {names}")


def _note_diverged(federation: Federation, training: str, outcome: Outcome) -> None:
    """Report rows with predictions that are not finite: their adapters diverged."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in outcome.replies:
        for result in one.reply.results:
            if count := result.metrics.get("not_finite"):
                found.setdefault((result.label, result.shift), []).append(count)
    for (label, shift), counts in found.items():
        of = f"{sum(counts):,.0f} predictions of {len(counts)} of {len(outcome.replies)} clients"
        text = f"{training}: {label} on {shift}: {of} are not finite and count as wrong"
        federation.events("note", text=text)


def _note_outlying(federation: Federation, training: str, outcome: Outcome) -> None:
    """Report the clients whose accuracy is far from that of most clients: what a client counts is its own word."""
    cells: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for one in outcome.replies:
        for result in one.reply.results:
            cells.setdefault((result.label, result.shift), {})[one.partition] = (result.correct, result.total)
    found: dict[int, list[str]] = {}
    for cell, counts in cells.items():
        for partition in outlying(counts):
            found.setdefault(partition, []).append(", ".join(cell))
    for partition, where in found.items():
        text = f"{'; '.join(where[:3])}{f' and {len(where) - 3} more' if len(where) > 3 else ''}"
        name = federation.nodes.name(partition)
        federation.events("note", text=f"{training}: accuracy of {name} is an outlier among the clients on {text}")


def _report(federation: Federation, training: str, partition: int, result: EvaluationResult) -> None:
    """Send the event of one result; further metrics are fields of their own."""
    fields = {
        "training": training,
        "method": result.label,
        "shift": result.shift,
        "partition": partition,
        "correct": result.correct,
        "total": result.total,
        "accuracy": result.correct / result.total if result.total else None,
        "weight_histogram": result.weight_histogram,
        "weight_mean": result.weight_mean,
        "seconds": float(result.seconds),
        **({"estimates": result.estimates} if result.estimates else {}),
    }
    federation.events("evaluation", **fields, **{name: n for name, n in result.metrics.items() if name not in fields})
