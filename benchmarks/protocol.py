"""Running one protocol over several seeds and summing it up: mean and standard deviation over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models import write_atomically
from server.report import Results, read_results, table
from settings import Settings, SettingsError, from_config, from_toml
from settings.parse import convert

PROTOCOLS = Path(__file__).parent / "protocols"
RESULTS = Path(__file__).parent / "results"


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
    path = PROTOCOLS / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in PROTOCOLS.glob("*.toml")))
        raise SettingsError(f"unknown protocol {name!r}; there are: {known}")
    config: dict[str, Any] = from_toml(path)
    for change in changes:
        key, equals, word = change.partition("=")
        if not equals:
            raise SettingsError(f"--set {change!r}: allowed is key=value")
        config[key] = convert(key, word)
    return from_config(config)


def run_protocol(name: str, settings: Settings, seeds: Sequence[int], folder: Path) -> Summary:
    """Run the protocol once a seed, skipping seeds whose run folder is complete, and sum up.

    Run folders are `<folder>/<name>-<seed>`; one that was cut short is refused, naming it.
    """
    from simulation import simulate

    results = []
    for seed in seeds:
        run_folder = folder / f"{name}-{seed}"
        mine = settings.replace(seed=seed, init=settings.init.replace("{seed}", str(seed)))
        if (run_folder / "metrics.jsonl").exists():
            _check_complete(run_folder, mine)
        else:
            simulate(mine, run_folder)
        results.append(read_results(run_folder / "metrics.jsonl"))
    return summarise(name, list(seeds), results)


def _check_complete(folder: Path, settings: Settings) -> None:
    results = read_results(folder / "metrics.jsonl")
    if results.end is None or results.end.status != "completed":
        raise SettingsError(f"{folder} holds a run that did not complete; remove it to run that seed again")
    if results.run is None or results.run.settings != settings.flat():
        raise SettingsError(f"{folder} holds a run with other settings; remove it or choose another --folder")


def summarise(name: str, seeds: list[int], results: Sequence[Results]) -> Summary:
    """Collect accuracies by method and distribution; methods and distributions are those of the first run."""
    cells: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for row in table(result):
            columns = {shift: cell.mean for shift, cell in row.cells.items() if cell is not None}
            columns["average"] = row.average if row.average is not None else float("nan")
            for column, value in columns.items():
                cells.setdefault(row.label, {}).setdefault(column, []).append(100 * float(value))
    return Summary(name, seeds, cells)


def recovered(summary: Summary, method: str, column: str = "out_of_client") -> list[float]:
    """Return, a seed, the share in percent of the gap personal → FedAvg that a method recovers in a column."""
    low, high = summary.cells["personal"][column], summary.cells["fedavg"][column]
    return [100 * (m - p) / (f - p) for m, p, f in zip(summary.cells[method][column], low, high, strict=True)]


def to_markdown(summary: Summary) -> str:
    """Return the table as Markdown: mean ± sd over seeds, best mean of a column bold."""
    columns = list(next(iter(summary.cells.values())))
    means = {m: {c: float(np.mean(v)) for c, v in row.items()} for m, row in summary.cells.items()}
    best = {column: max(row[column] for row in means.values()) for column in columns}
    lines = [f"| method | {' | '.join(columns)} |", "| --- |" + " --: |" * len(columns)]
    for method, row in summary.cells.items():
        texts = []
        for column in columns:
            mean, sd = means[method][column], float(np.std(row[column]))
            text = f"{mean:.2f} ± {sd:.2f}" if len(summary.seeds) > 1 else f"{mean:.2f}"
            texts.append(f"**{text}**" if mean == best[column] else text)
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return "\n".join(lines)


def write_summary(summary: Summary, settings: Settings, info: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.json` with settings, versions, hardware and every seed's numbers."""
    shares = {
        method: [round(value, 2) for value in recovered(summary, method)]
        for method in summary.cells
        if method not in ("personal", "fedavg") and "out_of_client" in summary.cells[method]
    }
    content = {
        "protocol": summary.name,
        "seeds": summary.seeds,
        "settings": settings.flat(),
        **info,
        "accuracy_percent": {
            method: {column: [round(value, 4) for value in values] for column, values in row.items()}
            for method, row in summary.cells.items()
        },
        "share_of_gap_recovered_out_of_client_percent": shares,
    }
    return write_atomically(folder / f"{summary.name}.json", (json.dumps(content, indent=1) + "\n").encode())
