"""After training: the statistics round and the evaluation round, both over all clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict

from models import TwoHead
from server.errors import Leak, RunError
from server.methods import Training
from server.protection import joining_rule
from server.rates import as_record
from server.rounds import Federation, metrics_of
from server.validation import Expected
from strategies import StatisticsFedAvg
from tta.statistics import DISTRIBUTIONS, ON_REQUEST, statistics_shapes

EVALUATE = "evaluate"


def statistics_round(federation: Federation, training: Training, arrays: ArrayRecord, model: TwoHead) -> ArrayRecord:
    """Let every client personalise on the final model and average the clients' statistics under it.

    Every client that trains takes part, whatever the sampled fraction, so that nothing is evaluated on another encoder.

    Parameters
    ----------
    model : TwoHead
        Says what shapes the statistics have.
    """
    name, round = training.name, training.recipe.rounds(federation.settings) + 1
    everyone = federation.view(federation.sources)
    weighting: Any = federation.settings.statistics_weighting
    averaging = StatisticsFedAvg(
        weighting=weighting, rule=joining_rule(federation.settings), distributions=DISTRIBUTIONS
    )
    shapes = statistics_shapes(training.needs, model)
    config = federation.config(name, training.recipe.phases[-1], wanted=[one for one in ON_REQUEST if one in shapes])
    messages = averaging.configure_statistics(round, joined(training, arrays), config, everyone)
    expected = Expected("statistics", shapes, ("seconds",))
    replies = federation.collect(messages, expected, name, round, f"statistics {name}")
    means = averaging.aggregate_statistics(round, [reply for _, reply in replies])
    if means is None:
        raise RunError(f"statistics {name}: no means")
    _note_missing(federation, name, "statistics", federation.sources, [partition for partition, _ in replies])
    federation.events(
        "statistics",
        training=name,
        round=round,
        replied=[partition for partition, _ in replies],
        seconds=[float(metrics_of(reply)["seconds"]) for _, reply in replies],
    )
    return means


def joined(training: Training, arrays: ArrayRecord) -> ArrayRecord:
    """Return the arrays of the final model that any phase joined; clients have kept the others."""
    names = training.recipe.joined_names(list(arrays))
    return ArrayRecord({name: arrays[name] for name in names})


def evaluation_round(
    federation: Federation,
    training: Training,
    arrays: ArrayRecord,
    statistics: ArrayRecord | None,
    rates: Mapping[str, Mapping[str, float]],
    shifts: Sequence[str],
) -> None:
    """Run every adapter of a training on every test distribution at every client; results are events.

    Raises
    ------
    Leak
        A test stream held a sample that had been trained on, and splits are drawn once. Drawn anew in every round they
        leak on purpose: a note says how much.
    """
    name, round = training.name, training.recipe.rounds(federation.settings) + 1
    config = federation.config(
        name,
        training.recipe.phases[-1],
        labels=[row.label for row in training.rows],
        adapters=[row.method.adapter for row in training.rows],
        options=[json.dumps(row.options) for row in training.rows],
        bases=[row.base for row in training.rows],
    )
    if rates:
        config["variant"] = list(rates)
    config["shifts-resolved"] = list(shifts)
    config["server-round"] = round
    content = RecordDict({"arrays": joined(training, arrays), "config": config})
    if statistics is not None:
        content["statistics"] = statistics
    for variant, learned in rates.items():
        content[f"rates.{variant}"] = as_record(learned)
    testers = federation.testers
    messages = [Message(content, dst_node_id=federation.nodes[one], message_type=EVALUATE) for one in testers]
    cells = [f"{row.label}|{shift}|" for row in training.rows for shift in shifts]
    replies = federation.collect(messages, _accuracies(cells), name, round, f"evaluate {name}")
    _note_missing(federation, name, "accuracies", testers, [partition for partition, _ in replies])
    checked = leaked = 0
    for partition, reply in replies:
        metrics = metrics_of(reply)
        checked, leaked = checked + int(metrics["checked"]), leaked + int(metrics["leaked"])
        _report(federation, name, partition, metrics)
    federation.events("leak_check", training=name, checked=checked, leaked=leaked)
    if leaked and federation.settings.split == "once":
        raise Leak(f"{leaked} of {checked} test samples had been trained on")
    if leaked:
        federation.events("note", text=_leak_words(name, leaked, checked))


def _leak_words(training: str, leaked: int, checked: int) -> str:
    """Say what `split = published` did to the accuracies of a training."""
    return (
        f"{training}: splits were drawn anew in every round, as in the published code of FedTHE and BTFL; {leaked:,} "
        f"of {checked:,} test samples ({100 * leaked / checked:.1f} %) had been trained on, so accuracies on clients' "
        "own data are optimistic"
    )


def _accuracies(cells: Sequence[str]) -> Expected:
    """Return what an evaluation reply holds: no arrays, and counts for every method and distribution asked for."""
    counts = [f"{cell}{count}" for cell in cells for count in ("correct", "total", "seconds")]
    shares = [(f"{cell}correct", f"{cell}total") for cell in cells]
    return Expected("", {}, ["checked", "leaked", *counts], [("leaked", "checked"), *shares])


def _note_missing(
    federation: Federation, training: str, what: str, asked: Sequence[int], replied: Sequence[int]
) -> None:
    """Say which clients a mean does not speak for; the reasons are in the events before."""
    if missing := sorted(set(asked) - set(replied)):
        text = f"{training}: {what} of {len(replied)} of {len(asked)} clients only; missing: {missing}"
        federation.events("note", text=text)


def _report(federation: Federation, training: str, partition: int, metrics: dict[str, Any]) -> None:
    """Send one event for each method and shift of a client's reply."""
    keys = dict.fromkeys(tuple(key.split("|")[:2]) for key in metrics if key.count("|") == 2)
    for method, shift in keys:
        values = {key.split("|")[2]: value for key, value in metrics.items() if key.startswith(f"{method}|{shift}|")}
        total, correct = int(values["total"]), int(values["correct"])
        histogram = values.get("weight_histogram")
        federation.events(
            "evaluation",
            training=training,
            method=method,
            shift=shift,
            partition=partition,
            correct=correct,
            total=total,
            accuracy=correct / total if total else None,
            weight_histogram=[int(n) for n in histogram] if histogram is not None else None,
            weight_mean=values.get("weight_mean"),
            seconds=float(values["seconds"]),
        )
