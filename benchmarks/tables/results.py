"""Kept results: one small JSON file for each cell and seed, which grows by rows.

{"protocol", "cell", "seed", "settings", "start", "rows": {label: {"training", "shifts": {column: numbers}}},
 "trainings": {name: learning curves, learned rates}, "runs": [provenance], "notes"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.benchmarks.papers import WITH
from fedtta.benchmarks.provenance import BEFORE, differing, provenance_of_run
from fedtta.benchmarks.tables.protocol import Cell
from fedtta.benchmarks.tables.protocol_file import TYPES, Types, check_types
from fedtta.client.device import SLOW_BFLOAT16
from fedtta.server.adaptation import cells as collaborating
from fedtta.server.adaptation import parse_collaborations
from fedtta.server.events import RunError
from fedtta.server.methods import Training, parse_rows, plan
from fedtta.server.report import Evaluation, Results
from fedtta.server.report.events import Adapted, AdaptRound
from fedtta.server.resume import FREE
from fedtta.settings import Settings, SettingsError, keys_in
from fedtta.strategies.registry import NO_COLLABORATION

#: Settings in which the runs of one file may differ: where a run is computed, files of one machine, and the rows.
UNRECORDED = {*FREE, *keys_in("paths"), "methods", "collaborations"}
#: The precision of training, which depends on what a machine's processor has instructions for: the seeds of a cell may
#: differ in it, which its page says, but not the rows of a seed.
PRECISION = "autocast"
#: Types of the fields of a kept file, of its parts, and of a row's numbers on a test distribution.
FIELDS: Types = {
    "protocol": (str,), "cell": (str,), "seed": (int,), "settings": (dict,), "start": (dict,), "rows": (dict,),
    "trainings": (dict,), "curves": (dict,), "realtime": (dict,), "runs": (list,), "notes": (list,),
}  # fmt: skip
OPTIONAL = ("start", "curves", "realtime")
START_FIELDS: Types = {"kind": (str,)}  # of a cell that starts from a network
ROW_FIELDS: Types = {"training": (str,), "shifts": (dict,)}
RUN_FIELDS: Types = {"training": (str,), "commit": (str,), "hardware": (str,), "versions": (dict,)}
REALTIME_FIELDS: Types = {
    "reference": (str,), "interval_milliseconds": (int, float), "queue": (int,), "repeats": (int,), "costs": (dict,),
}  # fmt: skip
COST_FIELDS: Types = {"milliseconds": (dict,), "least": (int,), "most": (int,), "keeps_up_to": (int, float)}
PERCENT = ("accuracy", "by_samples", "mean_over_classes", "first_half", "second_half", "answered", "missed_wrong")
NUMBERS: Types = {
    **{f"{name}_percent": (int, float) for name in PERCENT}, "per_client_percent": (str,), "samples": (int,)
}  # fmt: skip
CONSTANT = "most frequent class of each client"  # a row that knows a stream's labels and nothing of its images

Content = dict[str, Any]


def cell_path(out: Path, protocol: str, cell: str, seed: int) -> Path:
    """Return the file of a cell and seed."""
    return out / protocol / f"{cell}-{seed}.json"


def read_cell(path: Path) -> Content:
    """Return what a file holds, with what its runs did before a setting existed.

    Raises
    ------
    SettingsError
        The file cannot be read, lacks a field, or has one of another type; it is named.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    _check_fields(str(path), content, FIELDS, [key for key in FIELDS if key not in OPTIONAL])
    if content.get("start"):
        _check_fields(f"{path}: start", content["start"], START_FIELDS, START_FIELDS)
    for label, row in content["rows"].items():
        _check_fields(f"{path}: rows: {label}", row, ROW_FIELDS, ROW_FIELDS)
        for column, one in row["shifts"].items():
            _check_fields(f"{path}: rows: {label}: {column}", one, NUMBERS, ["accuracy_percent"])
    if "realtime" in content:
        _check_fields(f"{path}: realtime", content["realtime"], REALTIME_FIELDS, REALTIME_FIELDS)
        for label, cost in content["realtime"]["costs"].items():
            _check_fields(f"{path}: realtime: costs: {label}", cost, COST_FIELDS, COST_FIELDS)
    for number, run in enumerate(content["runs"], 1):
        _check_fields(f"{path}: runs: {number}", run, RUN_FIELDS, RUN_FIELDS)
    return {**content, "settings": {**BEFORE, **content["settings"]}}


def _check_fields(where: str, section: Any, types: Types, needed: Iterable[str]) -> None:
    """Refuse a part of a kept file that lacks a field, or has one of another type; it may have others."""
    check_types(where, section, types, settings=True)
    for key in needed:
        if key not in section:
            allowed = " or ".join(TYPES[one] for one in types[key])
            raise SettingsError(f"{where}: {key} is missing; allowed is {allowed}")


def read_results_of(out: Path, protocol: str | None = None) -> dict[str, dict[str, dict[int, Content]]]:
    """Return protocol → cell → seed → content of all kept results in a folder, or of one protocol."""
    found: dict[str, dict[str, dict[int, Content]]] = {}
    for path in sorted(out.glob(f"{protocol or '*'}/*.json")):
        if not path.name.endswith(".safetensors.json"):  # what a network's file says of it
            content = read_cell(path)
            if not content["runs"]:
                raise SettingsError(f"{path}: runs = []; allowed is a list of one or more")
            found.setdefault(content["protocol"], {}).setdefault(content["cell"], {})[content["seed"]] = content
    return found


def check_kept(path: Path, settings: Settings, start: Mapping[str, Any] | None = None) -> None:
    """Raise SettingsError if a file was made with other settings, but for `PRECISION`, or from another network."""
    if not path.exists():
        return
    content = read_cell(path)
    if other := differing(content["settings"], settings, {*UNRECORDED, PRECISION}):
        raise SettingsError(f"{path} was made with other settings ({', '.join(other)}); choose another --out")
    network_hash = content.get("start", {}).get("sha256")
    if start and network_hash and start.get("sha256") not in (network_hash, None):
        raise SettingsError(f"{path} was made from another network; choose another --out")


def check_alike(path: Path, content: Mapping[str, Any], settings: Settings) -> None:
    """Raise SettingsError if a file's rows have another `PRECISION`: others would not compare."""
    if content and content["settings"].get(PRECISION, Settings().autocast) != settings.autocast:
        raise SettingsError(f"{path} was made with another {PRECISION}; set it, or choose another --out")


def wanted_rows(settings: Settings) -> list[str]:
    """Return the labels of all rows of a cell; `all` stands for every row that fits.

    Raises
    ------
    SettingsError
        A row is unknown or does not fit.
    """
    trainings = plan(settings)
    if not settings.collaborations:
        labels = {row.label for training in trainings for row in training.rows}
        return [row.label for row in parse_rows(settings.methods) if row.label in labels]
    how = parse_collaborations(settings.collaborations, settings.share)
    return [row_label(row.label, one.label) for training in trainings for row, one in collaborating(training, how)]


def row_label(method: str, collaboration: str) -> str:
    """Return the label of a method under a collaboration; without one, that of the method."""
    return method if collaboration == NO_COLLABORATION else f"{method}{WITH}{collaboration}"


def missing(path: Path, settings: Settings) -> list[tuple[Training, Settings]]:
    """Return (training, settings with its rows) of all runs that a file still needs.

    Raises
    ------
    SettingsError
        As `wanted_rows` and `check_alike`.
    """
    content = read_cell(path) if path.exists() else {}
    labels = [label for label in wanted_rows(settings) if label not in content.get("rows", {})]
    if labels:
        check_alike(path, content, settings)
    by_collaboration: dict[str, list[str]] = {}
    for label in labels:
        method, _, collaboration = label.partition(WITH)
        by_collaboration.setdefault(collaboration or NO_COLLABORATION, []).append(method)
    found = []
    for collaboration, methods in by_collaboration.items():
        own = settings.replace(methods=",".join(methods))
        if settings.collaborations:
            own = own.replace(collaborations=collaboration)
        for training in plan(own):
            found.append((training, own.replace(methods=",".join(row.label for row in training.rows))))
    return found


def empty(protocol: str, cell: Cell, settings: Settings) -> Content:
    """Return the content of a cell's file before its first run."""
    recorded = {key: value for key, value in settings.flat().items() if key not in UNRECORDED}
    header = {"protocol": protocol, "cell": cell.name, "seed": settings.seed, "settings": recorded}
    return {**header, "rows": {}, "trainings": {}, "runs": [], "notes": []}


def add_run(
    content: Content, results: Results, cell: Cell, settings: Settings, training: str, start: Mapping[str, Any]
) -> None:
    """Add the rows of a run, its learning curves and its provenance to a cell's content.

    Raises
    ------
    RunError
        A row has no accuracy, or not one for each client where clients are columns.
    """
    if settings.collaborations:
        rows = collaboration_rows(results.adapted, results.adapt_rounds, training)
    else:
        labels = [row.label for row in parse_rows(settings.methods)]
        rows = {label: row_content(results.evaluations, label, training, cell.columns) for label in labels}
    content["rows"].update(rows)
    if start:
        content["start"] = dict(start)
    kept, new = content["trainings"].setdefault(training, {}), training_content(results)
    if "rates" in new:
        new["rates"] = {**kept.get("rates", {}), **new["rates"]}  # other rows may have learned other variants
    kept.update(new)
    again = any(run["training"] == training for run in content["runs"])
    content["runs"].append({"training": training, "methods": list(rows), **run_content(results, again)})
    content["notes"] = list(dict.fromkeys([*content["notes"], *lasting(results.notes)]))


def lasting(notes: Iterable[str]) -> list[str]:
    """Return a run's notes on what its results are, without those on how it went: resumed, or slow."""
    parts = (note.split("; ") for note in notes if not note.startswith("resumed after"))
    kept = ("; ".join(part for part in note if part != SLOW_BFLOAT16) for note in parts)
    return [note for note in kept if note]


def row_content(evaluations: Sequence[Evaluation], label: str, training: str, columns: Sequence[str] = ()) -> Content:
    """Return a row's numbers by test distribution, or by the column that each client counts for.

    Raises
    ------
    RunError
        There are none, or a client that counts for a column has none.
    """
    found = [one for one in evaluations if one.method == label and one.training == training and one.total]
    by_column: dict[str, list[Evaluation]] = {}
    for one in sorted(found, key=lambda one: one.partition) if columns else found:
        by_column.setdefault(columns[one.partition] if columns else one.shift, []).append(one)
    if not by_column:
        raise RunError(f"{label}: the run has no accuracy of it")
    if absent := sorted(set(range(len(columns))) - {one.partition for one in found}):
        raise RunError(f"{label}: clients {absent} have no accuracy")
    return {"training": training, "shifts": {column: numbers(entries) for column, entries in by_column.items()}}


def numbers(entries: Sequence[Evaluation]) -> Content:
    """Return accuracy in percent (mean over clients, over samples, of each client), samples, speed, mixing weights."""
    total, seconds = sum(one.total for one in entries), sum(one.seconds or 0.0 for one in entries)
    accuracies = [100 * one.correct / one.total for one in entries]
    return {
        "accuracy_percent": round(float(np.mean(accuracies)), 4),
        "by_samples_percent": round(100 * sum(one.correct for one in entries) / total, 4),
        "per_client_percent": " ".join(f"{value:.4g}" for value in accuracies),
        "samples": total,
        "samples_per_second": round(total / seconds, 1) if seconds else None,
        **_weights(entries),
    }


def _weights(entries: Sequence[Evaluation]) -> Content:
    """Return the histogram over all clients of the global head's weight e, and its mean over samples."""
    weights = [
        (one.total, one.weight_mean, one.weight_histogram)
        for one in entries
        if one.weight_mean is not None and one.weight_histogram is not None
    ]
    if not weights:
        return {}
    mean = sum(total * mean for total, mean, _ in weights) / sum(total for total, _, _ in weights)
    histogram = np.sum([histogram for _, _, histogram in weights], axis=0).tolist()
    return {"weight_mean": round(mean, 4), "weight_histogram": " ".join(map(str, histogram))}


def collaboration_rows(adapted: Iterable[Adapted], mixed: Sequence[AdaptRound], training: str) -> dict[str, Content]:
    """Return label → numbers of every method under every collaboration, over all test-time rounds.

    `global` is the accuracy over all samples; beside it are the mean over the classes that occur, each client's that
    has test samples, and that of either half of the rounds.

    Raises
    ------
    RunError
        A method has no accuracy under a collaboration.
    """
    groups: dict[tuple[str, str], list[Adapted]] = {}
    for one in adapted:
        groups.setdefault((one.method, one.collaboration), []).append(one)
    found = {}
    for (method, collaboration), replies in groups.items():
        entries = [one for one in replies if any(one.total)]
        if not entries:
            raise RunError(f"{row_label(method, collaboration)}: the run has no accuracy of it")
        clients = 1 + max(one.partition for one in entries)
        last = max(one.round for one in entries)
        correct = np.zeros((clients, len(entries[0].total)), np.int64)  # (N, K)
        total = np.zeros_like(correct)
        for one in entries:
            correct[one.partition] += one.correct
            total[one.partition] += one.total
        occurs, tested = total.sum(0) > 0, total.sum(1) > 0
        accuracy = 100 * correct.sum() / total.sum()
        shift: Content = {
            "accuracy_percent": round(float(accuracy), 2),
            "by_samples_percent": round(float(accuracy), 2),
            "mean_over_classes_percent": round(float(np.mean(100 * correct.sum(0)[occurs] / total.sum(0)[occurs])), 2),
            "per_client_percent": " ".join(
                f"{value:.4g}" for value in 100 * correct.sum(1)[tested] / total.sum(1)[tested]
            ),
            "samples": int(total.sum()),
            "rounds": len({one.round for one in entries}),
            "second_half_percent": _percent([one for one in entries if 2 * one.round > last]),
        }
        if early := [one for one in entries if 2 * one.round <= last]:
            shift["first_half_percent"] = _percent(early)
        own = [one for one in mixed if (one.method, one.collaboration) == (method, collaboration) and one.weights]
        if weights := mixing_weights(own):
            shift["weights"] = weights
        found[row_label(method, collaboration)] = {"training": training, "shifts": {"global": shift}}
    return found


def _percent(entries: Sequence[Adapted]) -> float:
    """Return the accuracy over all samples in percent."""
    return round(100 * sum(sum(one.correct) for one in entries) / sum(sum(one.total) for one in entries), 2)


def mixing_weights(rounds: Sequence[AdaptRound]) -> dict[str, str]:
    """Return round → W as text, of the first, middle and last round; nothing if W is constant or the identity."""
    if not rounds:
        return {}
    matrices = [np.array(one.weights) for one in rounds]
    if all(np.ptp(one) < 1e-6 or np.allclose(one, np.eye(len(one)), atol=1e-6) for one in matrices):
        return {}
    ordered = sorted(rounds, key=lambda one: one.round)
    middle = min(ordered, key=lambda one: abs(one.round - 0.53 * ordered[-1].round))
    chosen = {one.round: one.weights for one in (ordered[0], middle, ordered[-1])}
    return {
        str(number): "; ".join(" ".join(f"{value:.3f}" for value in row) for row in rows)
        for number, rows in chosen.items()
    }


def constant_row(counts: np.ndarray) -> Content:
    """Return the accuracy of always predicting each client's most frequent class; `counts` is int64 [N, K]."""
    accuracies = 100 * counts.max(axis=1) / counts.sum(axis=1)
    value = round(float(accuracies.mean()), 2)
    return {"training": "", "shifts": {"global": {"accuracy_percent": value, "by_samples_percent": value}}}


def training_content(results: Results) -> Content:
    """Return a training's curves over its rounds as text (losses; validation accuracy in percent), and its rates.

    Traffic is that of learning one variant of the rates.
    """
    rounds = results.rounds

    def line(values: Sequence[float | None], scale: float) -> str:
        return " ".join("-" if value is None else f"{scale * value:.4g}" for value in values)

    content: Content = {}
    if rounds:
        content["train_loss"] = line([one.train_loss for one in rounds], 1)
        content["validation_percent"] = line([one.validation_accuracy for one in rounds], 100)
    if results.rates:
        content["rates"] = {one.variant: one.rates for one in results.rates}
    if learning := [one for one in results.rates_rounds if one.variant == results.rates_rounds[0].variant]:
        content["traffic"] = {
            "modules": len(results.rates[0].rates) if results.rates else 0,
            "bytes_up_a_client_and_round": learning[-1].bytes_up / len(learning[-1].replied),
            "bytes_down_a_client_last_round": learning[-1].bytes_down / len(learning[-1].sampled),
            "bytes_down_all_rounds": sum(one.bytes_down for one in learning),
            "context_bytes_all_rounds": sum(one.context_bytes for one in learning),
        }
    return content


def run_content(results: Results, again: bool = False) -> Content:
    """Return a run's provenance, the result of its leak check, and how many replies the limits of means held back.

    Parameters
    ----------
    again : bool
        Another run of the file has the same training: its events, which each run's journal has, are counted there.
    """
    limited = [one for one in results.incidents if one.event == "limited"]
    return {
        **provenance_of_run(results),
        "training_seconds": round(sum(one.wall_seconds for one in results.rounds), 1),
        "test_samples_checked": sum(one.checked for one in results.leak_checks),
        "test_samples_trained_on": sum(one.leaked for one in results.leak_checks),
        "replies_limited": sum(not (again and one.phase.startswith("train ")) for one in limited),
    }
