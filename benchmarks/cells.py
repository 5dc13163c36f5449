"""Filling the cells of a protocol: one small JSON file a cell and seed, which grows by the rows that are missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache import evaluated
from benchmarks.protocol import WHERE_KEYS, Cell, of_seed
from benchmarks.record import about, differing, write_json
from benchmarks.start import KIND, check_start
from server.methods import Training, parse_rows, plan
from server.report import Evaluation, Results
from settings import Settings, SettingsError

#: Settings in which a file's runs may differ.
FREE = (*WHERE_KEYS, "methods", "data-dir", "download", "checkpoint-every", "checkpoints-kept", "resume")

Content = dict[str, Any]


def cell_path(out: Path, protocol: str, cell: str, seed: int) -> Path:
    """Return the file of a cell and seed."""
    return out / protocol / f"{cell}-{seed}.json"


def read_cell(path: Path) -> Content:
    """Return what a file keeps; SettingsError names a file that cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error


def check_kept(path: Path, settings: Settings) -> None:
    """Raise SettingsError if a file was made with other settings: its numbers do not belong beside these."""
    if path.exists() and (other := differing(read_cell(path)["settings"], settings, FREE)):
        raise SettingsError(f"{path} was made with other settings ({', '.join(other)}); choose another --out")


def missing(path: Path, settings: Settings) -> list[Training]:
    """Return the trainings with the rows that a file does not have; `all` stands for every row that fits.

    Raises
    ------
    SettingsError
        As `plan`.
    """
    kept = read_cell(path)["rows"] if path.exists() else {}
    labels = [row.label for training in plan(settings) for row in training.rows if row.label not in kept]
    order = [row.label for row in parse_rows(settings.methods) if row.label in labels]
    return list(plan(settings.replace(methods=",".join(order)))) if order else []


def fill(path: Path, protocol: str, cell: Cell, seed: int, folder: Path, on_the_way: bool = False) -> Iterator[str]:
    """Run the rows that are missing, a training at a time; after each the file is written and its name is yielded.

    Parameters
    ----------
    folder : Path
        Of run folders, and of the trainings that later rows are tested on.
    on_the_way : bool
        Keep of a training what tests of its earlier rounds need.

    Raises
    ------
    SettingsError, RunError
        As `check_start` and `evaluated`.
    """
    settings = of_seed(cell.settings, seed)
    check_start(settings)
    for training in missing(path, settings):
        labels = [row.label for row in training.rows]
        place = folder / protocol / f"{cell.name}-{seed}" / training.name
        own = settings.replace(methods=",".join(labels))
        results = evaluated(own, folder / "trainings", place, of=own if on_the_way else None)
        content = read_cell(path) if path.exists() else _empty(protocol, cell, seed)
        content["rows"].update({label: row_content(results, label, training.name) for label in labels})
        content["trainings"][training.name] = training_content(results)
        content["runs"].append({"training": training.name, "methods": labels, **run_content(results, settings)})
        said = [note for note in results.notes if not note.startswith("resumed after")]  # how it ran, not what it is
        content["notes"] = list(dict.fromkeys([*content["notes"], *said]))
        write_json(path, content)
        yield training.name


def _empty(protocol: str, cell: Cell, seed: int) -> Content:
    settings = {key: value for key, value in of_seed(cell.settings, seed).flat().items() if key not in FREE}
    place = {"protocol": protocol, "cell": cell.name, "seed": seed, "settings": settings}
    return {**place, "rows": {}, "trainings": {}, "runs": [], "notes": []}


def row_content(results: Results, label: str, training: str) -> Content:
    """Return a row's numbers by distribution: mean over clients and over samples, time, and the weight e where it has.

    Raises
    ------
    SettingsError
        There are none.
    """
    found = [one for one in results.evaluations if one.method == label and one.training == training]
    by_shift: dict[str, list[Evaluation]] = {}
    for one in found:
        if one.total:
            by_shift.setdefault(one.shift, []).append(one)
    if not by_shift:
        raise SettingsError(f"{label}: the run has no accuracy of it")
    content: Content = {"training": training, "shifts": {}}
    for shift, entries in by_shift.items():
        total, seconds = sum(one.total for one in entries), sum(one.seconds or 0.0 for one in entries)
        content["shifts"][shift] = {
            "accuracy_percent": _percent(float(np.mean([one.correct / one.total for one in entries]))),
            "by_samples_percent": _percent(sum(one.correct for one in entries) / total),
            "samples": total,
            "samples_per_second": round(total / seconds, 1) if seconds else None,
            **_weights(entries),
        }
    return content


def _weights(entries: list[Evaluation]) -> Content:
    """Return the histogram over all clients of the weight e of the global head, and its mean over samples."""
    known = [
        (one.total, one.weight_mean, one.weight_histogram)
        for one in entries
        if one.weight_mean is not None and one.weight_histogram is not None
    ]
    if not known:
        return {}
    mean = sum(total * mean for total, mean, _ in known) / sum(total for total, _, _ in known)
    histogram = np.sum([histogram for _, _, histogram in known], axis=0).tolist()
    return {"weight_mean": round(mean, 4), "weight_histogram": " ".join(map(str, histogram))}


def training_content(results: Results) -> Content:
    """Return a training's curves over its rounds, as texts: losses, and validation accuracies in percent."""
    rounds = results.rounds

    def line(values: list[float | None], scale: float) -> str:
        return " ".join("-" if value is None else f"{scale * value:.4g}" for value in values)

    return {
        "train_loss": line([one.train_loss for one in rounds], 1),
        "validation_percent": line([one.validation_accuracy for one in rounds], 100),
        "rates": {one.variant: {name: round(rate, 5) for name, rate in one.rates.items()} for one in results.rates},
    }


def run_content(results: Results, settings: Settings) -> Content:
    """Return where, when and how fast a run ran, and what its check by indices of test samples found."""
    training = sum(one.wall_seconds for one in results.rounds)
    content = {
        **about(results),
        "training_seconds": round(training, 1),
        "test_samples_checked": sum(one.checked for one in results.leak_checks),
        "test_samples_trained_on": sum(one.leaked for one in results.leak_checks),
    }
    if label := check_start(settings):
        content["start"] = {"kind": KIND, "validation_accuracy": label.get("validation_accuracy")}
    return content


def _percent(share: float) -> float:
    return round(100 * share, 4)


def kept(out: Path) -> Mapping[str, dict[str, dict[int, Content]]]:
    """Return protocol → cell → seed → what is kept, of every protocol in a folder of results."""
    found: dict[str, dict[str, dict[int, Content]]] = {}
    for path in sorted(out.glob("*/*.json")):
        content = read_cell(path)
        if {"protocol", "cell", "seed", "rows"} <= content.keys():
            found.setdefault(content["protocol"], {}).setdefault(content["cell"], {})[content["seed"]] = content
    return found
