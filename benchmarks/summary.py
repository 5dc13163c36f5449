"""Cells over seeds: mean and standard deviation, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cells import Content
from benchmarks.papers import Printed
from benchmarks.protocol import Cell

AVERAGE = "average"


@dataclass(frozen=True)
class Summary:
    """Accuracies in percent over seeds.

    Parameters
    ----------
    name, title : str
        Of the cell.
    cells : mapping
        row → column → one value a seed; `average` is the mean over the distributions.
    paper : mapping
        row → column → the paper's number.
    seeds : list of int
    """

    name: str
    title: str
    cells: Mapping[str, Mapping[str, Sequence[float]]]
    paper: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    @property
    def columns(self) -> list[str]:
        """Return the columns, the average last, where it is one of several."""
        found = list(dict.fromkeys(column for row in self.cells.values() for column in row if column != AVERAGE))
        return found if len(found) == 1 else [*found, AVERAGE]


def summarise(cell: Cell, kept: Mapping[int, Content]) -> Summary:
    """Join a cell's files, seed → content; a row that some seeds lack has fewer values."""
    name, title, reference = cell.name, cell.title, cell.reference
    key = "accuracy_percent" if cell.weighting == "clients" else "by_samples_percent"
    cells: dict[str, dict[str, list[float]]] = {}
    for _, content in sorted(kept.items()):
        for label, row in content["rows"].items():
            means = {shift: float(one[key]) for shift, one in row["shifts"].items()}
            for column, value in {**means, AVERAGE: float(np.mean(list(means.values())))}.items():
                cells.setdefault(label, {}).setdefault(column, []).append(value)
    summary = Summary(name, title, cells, {}, sorted(kept))
    if reference is None:
        return summary
    numbers = {column: reference.column(column) for column in summary.columns}
    paper = {
        label: {column: of_row[label] for column, of_row in numbers.items() if label in of_row}
        for label in dict.fromkeys(label for of_row in numbers.values() for label in of_row)
    }
    return Summary(name, title, cells, paper, sorted(kept))


def recovered(summary: Summary, method: str, column: str = "out_of_client") -> list[float]:
    """Return, a seed, the share in percent of the gap personal → FedAvg that a method recovers in a column.

    NaN where FedAvg is not better than the personal head: there is no gap then.
    """
    low, high = summary.cells["personal"][column], summary.cells["fedavg"][column]
    found = zip(summary.cells[method][column], low, high, strict=True)
    return [100 * (mine - p) / (f - p) if f > p else math.nan for mine, p, f in found]


def shares(summary: Summary, column: str = "out_of_client") -> dict[str, list[float]]:
    """Return `recovered` of every other method of all seeds; nothing where the gap's ends or the column are missing."""
    ends = ("personal", "fedavg")
    full = [name for name, row in summary.cells.items() if len(row.get(column, ())) == len(summary.seeds)]
    if not all(end in full for end in ends):
        return {}
    return {method: recovered(summary, method, column) for method in full if method not in ends}


def spread(values: Sequence[float]) -> str:
    """Return 'mean ± sd' with two decimals; the mean alone of one value, '–' where a value is not finite."""
    if not np.isfinite(values).all():
        return "–"
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values):.2f}" if len(values) > 1 else mean


def best(summary: Summary) -> dict[str, str]:
    """Return the mean, as displayed, of the best row of each column."""
    found = {column: [row[column] for row in summary.cells.values() if column in row] for column in summary.columns}
    return {column: f"{max(float(np.mean(values)) for values in rows):.2f}" for column, rows in found.items()}


def to_markdown(summary: Summary) -> str:
    """Return the table: mean ± sd over seeds (divided by n), best mean of a column bold, the paper's behind a bar."""
    top = best(summary)
    lines = [f"| row | {' | '.join(top)} |", "| --- |" + " --: |" * len(top)]
    for label, row in summary.cells.items():
        theirs = summary.paper.get(label, {})
        lines.append(f"| `{label}` | " + " | ".join(_text(summary, row, theirs, top, name) for name in top) + " |")
    return "\n".join(lines)


def _text(
    summary: Summary,
    row: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Printed],
    top: Mapping[str, str],
    column: str,
) -> str:
    """Return one place of the table; a row with fewer seeds than the table says so."""
    values = row.get(column)
    if not values:
        text = "–"
    else:
        text = spread(values)
        text = f"**{text}**" if f"{np.mean(values):.2f}" == top[column] else text
        text += f" ({len(values)} of {len(summary.seeds)} seeds)" if len(values) < len(summary.seeds) else ""
    return f"{text} \\| {theirs[column].mean:.2f}" if column in theirs else text


def beyond(summary: Summary) -> tuple[int, int]:
    """Return how many of our means lie further from the paper's than both spreads together, and how many it has."""
    known = [
        (values, summary.paper[label][column])
        for label, row in summary.cells.items()
        for column, values in row.items()
        if column in summary.paper.get(label, {})
    ]
    far = [abs(float(np.mean(ours)) - one.mean) > (one.sd or 0.0) + float(np.std(ours)) for ours, one in known]
    return sum(far), len(known)


def beyond_words(summary: Summary, why: str) -> str:
    """Say how often we differ from the paper by more than the spreads, and why; nothing where we do not."""
    far, known = beyond(summary)
    if not far:
        return ""
    reason = f": {why}" if why else ""
    return f"{far} of {known} means differ from the paper's by more than both spreads{reason}."
