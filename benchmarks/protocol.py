"""Running one protocol over several seeds and summing it up: mean and standard deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, differing, write_json
from benchmarks.start import check_start
from server.errors import RunError
from server.report import METRICS_FILE, Results, read_results, table
from settings import Settings, SettingsError, from_config, from_toml
from settings.parse import convert

PROTOCOLS = Path(__file__).parent / "protocols"

#: Settings that say where a run computes, not what.
WHERE_KEYS = ("device", "workers", "num-gpus", "results", "run-name", "state-dir")


@dataclass(frozen=True)
class Summary:
    """Accuracies in percent over seeds: `cells[method][column]` is one value a seed, `average` a column."""

    name: str
    seeds: list[int]
    cells: dict[str, dict[str, list[float]]]


def load_protocol(name: str, changes: Sequence[str] = ()) -> Settings:
    """Read `protocols/<name>.toml` and apply changes of the form key=value.

    Raises
    ------
    SettingsError
        An unknown protocol (the known ones are listed), key or value.
    """
    return changed(from_toml(protocol_path(name)), changes)


def protocol_path(name: str) -> Path:
    """Return the file of a protocol; SettingsError lists the known ones."""
    path = PROTOCOLS / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in PROTOCOLS.glob("*.toml")))
        raise SettingsError(f"unknown protocol {name!r}; there are: {known}")
    return path


def changed(config: Mapping[str, Any], changes: Sequence[str]) -> Settings:
    """Return settings from a flat mapping with changes of the form key=value applied, the last one winning.

    Raises
    ------
    SettingsError
        A change is of another form, or a key or value is not allowed.
    """
    values = dict(config)
    for change in changes:
        key, equals, word = change.partition("=")
        if not equals:
            raise SettingsError(f"--set {change!r}: allowed is key=value")
        values[key] = convert(key, word)
    return from_config(values)


def run_folder(name: str, seed: int, folder: Path) -> Path:
    """Return the run folder of one seed."""
    return folder / f"{name}-{seed}"


def of_seed(settings: Settings, seed: int) -> Settings:
    """Return the settings of one seed; {seed} in `init` stands for it."""
    return settings.replace(seed=seed, init=settings.init.replace("{seed}", str(seed)))


def run_protocol(name: str, settings: Settings, seeds: Sequence[int], folder: Path) -> Summary:
    """Run the protocol once a seed, skipping seeds whose run folder is complete, and sum up.

    Run folders are `<folder>/<name>-<seed>`; one that was cut short is refused, naming it.

    Raises
    ------
    SettingsError
        As above, or the network to start from does not fit (`check_start`).
    RunError
        A run failed.
    """
    from simulation import simulate

    everyone = [of_seed(settings, seed) for seed in seeds]
    for mine in everyone:  # before the first of them runs
        check_start(mine)
        if (run_folder(name, mine.seed, folder) / METRICS_FILE).exists():
            check_complete(run_folder(name, mine.seed, folder), mine)
    results = []
    for mine in everyone:
        target = run_folder(name, mine.seed, folder)
        if not (target / METRICS_FILE).exists():
            simulate(mine, target)
            check_complete(target, mine)
        results.append(read_results(target / METRICS_FILE))
    return summarise(name, list(seeds), results)


def check_complete(folder: Path, settings: Settings) -> None:
    """Raise SettingsError unless a run folder holds a completed run of these settings, wherever it ran."""
    results = read_results(folder / METRICS_FILE)
    if results.end is None or results.end.status != "completed":
        raise SettingsError(f"{folder} holds a run that did not complete; remove it to run that seed again")
    if other := differing(results.run.settings if results.run else {}, settings, WHERE_KEYS):
        raise SettingsError(
            f"{folder} holds a run with other settings ({', '.join(other)}); remove it or choose another --folder"
        )


def summarise(name: str, seeds: list[int], results: Sequence[Results]) -> Summary:
    """Collect accuracies by method and distribution, in the order of the first run.

    Raises
    ------
    RunError
        A method has no accuracy on a distribution in one of the runs: a mean over fewer compares with nothing.
    """
    cells: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for row in table(result):
            means = {shift: cell.mean if cell else None for shift, cell in row.cells.items()}
            for column, value in {**means, "average": row.average}.items():
                if value is None:
                    raise RunError(f"{name}: a run has no accuracy of {row.label} on {column}")
                cells.setdefault(row.label, {}).setdefault(column, []).append(100 * value)
    if not cells:
        raise RunError(f"{name}: the runs hold no evaluation")
    shifts = {column for columns in cells.values() for column in columns}
    for method, columns in cells.items():
        for column in shifts:
            if len(columns.get(column, [])) != len(seeds):
                raise RunError(f"{name}: {method} has no accuracy on {column} in each of the {len(seeds)} runs")
    return Summary(name, seeds, cells)


def recovered(summary: Summary, method: str, column: str = "out_of_client") -> list[float]:
    """Return, a seed, the share in percent of the gap personal → FedAvg that a method recovers in a column.

    NaN where FedAvg is not better than the personal head: there is no gap then.
    """
    low, high = summary.cells["personal"][column], summary.cells["fedavg"][column]
    values = zip(summary.cells[method][column], low, high, strict=True)
    return [100 * (mine - p) / (f - p) if f > p else math.nan for mine, p, f in values]


def shares(summary: Summary, column: str = "out_of_client") -> dict[str, list[float]]:
    """Return `recovered` of every other method; nothing where the gap's two ends or the column are missing."""
    ends = ("personal", "fedavg")
    if not all(column in summary.cells.get(end, {}) for end in ends):
        return {}
    return {method: recovered(summary, method, column) for method in summary.cells if method not in ends}


def spread(values: Sequence[float]) -> str:
    """Return 'mean ± sd' with two decimals; the mean alone of one value, '–' where a value is not finite."""
    if not np.isfinite(values).all():
        return "–"
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values):.2f}" if len(values) > 1 else mean


def best(summary: Summary) -> dict[str, str]:
    """Return the mean, as displayed, of the best method of each column."""
    columns = next(iter(summary.cells.values()))
    return {column: f"{max(np.mean(row[column]) for row in summary.cells.values()):.2f}" for column in columns}


def to_markdown(summary: Summary) -> str:
    """Return the table as Markdown: mean ± sd over seeds (divided by n), best mean of a column bold."""
    top = best(summary)
    lines = [f"| method | {' | '.join(top)} |", "| --- |" + " --: |" * len(top)]
    for method, row in summary.cells.items():
        texts = [
            f"**{spread(row[column])}**" if f"{np.mean(row[column]):.2f}" == top[column] else spread(row[column])
            for column in top
        ]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return "\n".join(lines)


def write_summary(summary: Summary, settings: Settings, info: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json` with settings, versions, hardware and every seed's numbers (null: no gap)."""
    content = {
        "protocol": summary.name,
        "seeds": summary.seeds,
        "settings": settings.flat(),
        **info,
        "accuracy_percent": {
            method: {column: [round(value, 4) for value in values] for column, values in row.items()}
            for method, row in summary.cells.items()
        },
        "share_of_gap_recovered_out_of_client_percent": {
            method: [round(value, 2) if math.isfinite(value) else None for value in values]
            for method, values in shares(summary).items()
        },
    }
    return write_json(folder / f"{summary.name}.json", content)
