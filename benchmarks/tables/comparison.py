"""Comparison: a table's accuracies over seeds, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedtta.benchmarks.papers import AVERAGE, Printed, Reference
from fedtta.benchmarks.tables.protocol import Cell, Table
from fedtta.benchmarks.tables.results import CONSTANT, Content

#: row → column → seed → value in percent.
Values = Mapping[str, Mapping[str, Mapping[int, float]]]
#: row → column → the paper's number.
PrintedValues = Mapping[str, Mapping[str, Printed]]


@dataclass(frozen=True)
class Comparison:
    """A table with values in percent.

    Parameters
    ----------
    values : mapping
        row → column → seed → value; `average` is the mean over all other columns, of seeds that have all of them.
    paper, paper_baseline : mapping
        row → column → the paper's number of the row, and of the baseline in the same place.
    baseline : str
        The row over which gains are computed; empty: none are.
    partial : set of str
        Rows that were measured on a part of the others' samples: they are shown, and not compared.
    """

    title: str
    values: Values
    seeds: Sequence[int]
    paper: PrintedValues = field(default_factory=dict)
    paper_baseline: PrintedValues = field(default_factory=dict)
    baseline: str = ""
    partial: frozenset[str] = frozenset()

    @property
    def columns(self) -> list[str]:
        """Return the columns; the average comes last, and only beside several others."""
        found = list(dict.fromkeys(column for row in self.values.values() for column in row if column != AVERAGE))
        return found if len(found) == 1 else [*found, AVERAGE]

    def gains(self, label: str, column: str) -> list[float]:
        """Return value minus baseline for each seed that has both; none of a row on a part of the samples."""
        if {label, self.baseline} & self.partial:
            return []
        own, base = (self.values.get(row, {}).get(column, {}) for row in (label, self.baseline))
        return [own[seed] - base[seed] for seed in own if seed in base]

    def best(self, column: str) -> set[str]:
        """Return the rows with the best mean of a column, as displayed, of those on all samples and the most seeds."""
        left_out = {CONSTANT, *self.partial}
        found = {label: row[column] for label, row in self.values.items() if row.get(column) and label not in left_out}
        most = max(map(len, found.values()), default=0)
        means = {label: round(_mean(values), 2) for label, values in found.items() if len(values) == most}
        highest = max(filter(math.isfinite, means.values()), default=None)
        return {label for label, mean in means.items() if mean == highest}


def compare(table: Table, kept: Mapping[str, Mapping[int, Content]]) -> Comparison:
    """Join the kept results (cell → seed → content) of a table's cells; seeds may have different rows."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    paper: dict[str, dict[str, Printed]] = {}
    base: dict[str, dict[str, Printed]] = {}
    for cell in table.cells:
        for seed, content in sorted(kept.get(cell.name, {}).items()):
            for label, row in content["rows"].items():
                for column, value in _row_values(cell, table, row).items():
                    own = cell.labelled(label)
                    values.setdefault(own, {}).setdefault(column, {})[seed] = value
                    if table.measure:
                        continue
                    if (printed := _paper(cell, label, column)) is not None:
                        number, reference = printed
                        paper.setdefault(own, {})[column] = number
                        if table.baseline and (of_baseline := reference.baseline(table.baseline, column)) is not None:
                            base.setdefault(own, {})[column] = of_baseline
    columns = list(dict.fromkeys(column for row in values.values() for column in row))
    for row in values.values():
        complete = [seed for seed in row.get(columns[0], {}) if all(seed in row.get(name, {}) for name in columns)]
        if complete:
            row[AVERAGE] = {seed: float(np.mean([row[name][seed] for name in columns])) for seed in complete}
    for label in values if not table.measure else ():
        for cell in table.cells:
            if (printed := _paper(cell, label, AVERAGE)) is not None:
                paper.setdefault(label, {})[AVERAGE] = printed[0]
    seeds = sorted({seed for cell in table.cells for seed in kept.get(cell.name, {})})
    return Comparison(table.title, values, seeds, paper, base, table.baseline, partial_rows(table, kept))


def partial_rows(table: Table, kept: Mapping[str, Mapping[int, Content]]) -> frozenset[str]:
    """Return the rows of a table that have fewer samples than another row of their cell on a test distribution."""
    found = set()
    for cell in table.cells:
        for content in kept.get(cell.name, {}).values():
            counts: dict[str, dict[str, int]] = {}  # test distribution → row → samples
            for label, row in content["rows"].items():
                for shift, one in row["shifts"].items():
                    if "samples" in one:
                        counts.setdefault(shift, {})[cell.labelled(label)] = one["samples"]
            found |= {label for row in counts.values() for label in row if row[label] < max(row.values())}
    return frozenset(found)


def _row_values(cell: Cell, table: Table, row: Content) -> dict[str, float]:
    """Return column → value of a kept row; the only test distribution of a cell may be renamed."""
    key = table.measure or ("accuracy_percent" if cell.weighting == "clients" else "by_samples_percent")
    shifts = {shift: float(one[key]) for shift, one in row["shifts"].items() if key in one}
    return {cell.column: next(iter(shifts.values()))} if cell.column and len(shifts) == 1 else shifts


def _paper(cell: Cell, label: str, column: str) -> tuple[Printed, Reference] | None:
    """Return the paper's number from the first of a cell's references that has it, and this reference."""
    found = ((reference.number(label, column), reference) for reference in cell.references)
    return next(((number, reference) for number, reference in found if number is not None), None)


def recovered(table: Comparison, column: str = "out_of_client") -> dict[str, list[float]]:
    """Return method → share in percent, by seed, of the gap personal → FedAvg that it recovers in a column.

    NaN where FedAvg is not better than the personal head. Methods without all seeds or samples are left out.
    """
    rows = {
        name: row[column]
        for name, row in table.values.items()
        if name not in table.partial and len(row.get(column, ())) == len(table.seeds)
    }
    if not {"personal", "fedavg"} <= rows.keys():
        return {}
    low, high = rows.pop("personal"), rows.pop("fedavg")
    return {
        name: [
            100 * (own[seed] - low[seed]) / (high[seed] - low[seed]) if high[seed] > low[seed] else math.nan
            for seed in table.seeds
        ]
        for name, own in rows.items()
    }


def beyond(table: Comparison) -> tuple[int, int]:
    """Return how many of our means differ from the paper's by more than both spreads, and how many it has."""
    pairs = [
        (list(values.values()), table.paper[label][column])
        for label, row in table.values.items()
        for column, values in row.items()
        if column in table.paper.get(label, {})
    ]
    far = [abs(float(np.mean(ours)) - one.mean) > (one.sd or 0.0) + float(np.std(ours)) for ours, one in pairs]
    return sum(far), len(pairs)


def spread(values: Sequence[float]) -> str:
    """Return 'mean ± sd' (divided by n) with two decimals; one value alone, '–' where a value is not finite."""
    if not np.isfinite(values).all() or not len(values):
        return "–"
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values):.2f}" if len(values) > 1 else mean


def entry_text(table: Comparison, label: str, column: str) -> tuple[str, bool]:
    """Return the text of one entry of a table, and whether it holds the best mean of its column.

    "70.10 ± 0.20 (+8.40) | 68.90 (+6.90)": ours, its gain over the baseline, and the paper's.
    """
    values, gains = table.values[label].get(column, {}), []
    text = spread(list(values.values())) if values else "–"
    if values and len(values) < len(table.seeds):
        text += f" ({len(values)} of {len(table.seeds)} seeds)"
    if table.baseline and label != table.baseline:
        gains = table.gains(label, column)
        text += f" ({np.mean(gains):+.2f})" if gains else ""
    theirs, base = (found.get(label, {}).get(column) for found in (table.paper, table.paper_baseline))
    if theirs is not None:
        text += f" | {theirs.mean:.2f}"
        text += f" ({theirs.mean - base.mean:+.2f})" if base is not None and label != table.baseline else ""
    return text, label in table.best(column)


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))
