"""Tables of a run as CSV files and in a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedtta.server.report.collaboration import MEASURES, Matrix, matrix, number_or_none
from fedtta.server.report.results import Results
from fedtta.server.report.scores import ACCURACY, METRICS, percent, table, verdict
from fedtta.settings.files import write_atomically

TABLE_FILE = "table.csv"
COLLABORATION_FILE = "collaboration.csv"
LISTED = 20  # clients, classes or corruptions in a table that is read; the files have them all


def table_csv(results: Results) -> str:
    """Return the table of methods and distributions as CSV: percentages with two decimals, empty where unknown.

    Each further metric of the registry that the run has adds a column for each distribution, with four decimals.
    """
    rows = table(results)
    shifts = list(rows[0].cells) if rows else []
    head = ["method", "training", *shifts, "average", "average_sd"]
    lines = [
        [row.method, row.training]
        + [percent(value, 2, missing="") for value in (*map(row.mean, shifts), row.average, row.average_sd)]
        for row in rows
    ]
    for metric in METRICS:
        others = table(results, metric)
        if metric is ACCURACY or not metric.in_csv or not any(any(row.cells.values()) for row in others):
            continue
        head += [f"{metric.name}:{shift}" for shift in shifts]
        for line, row in zip(lines, others, strict=True):
            line += [metric.show(row.mean(shift), 4, missing="") for shift in shifts]
    return _csv([head, *lines])


def write_table(results: Results, path: Path) -> Path:
    """Write `table.csv` atomically and return its path."""
    return write_atomically(path, table_csv(results).encode())


def collaboration_csv(found: Matrix) -> str:
    """Return the matrix as CSV, a row for each cell: percentages with two decimals, empty where nothing occurs."""
    head = [
        *("method", "collaboration", "rounds", "samples", "global", "mean_over_classes"),
        *(f"corruption:{name}" for name in found.corruptions),
        *(f"class:{name}" for name in found.classes),
        *(f"client:{name}" for name in found.columns.values()),
    ]
    lines = []
    for outcome in found.outcomes:
        scores = outcome.scores
        clients = [scores.per_client[client] for client in found.columns]
        values = [scores.accuracy, scores.mean_class, *scores.per_corruption, *scores.per_class, *clients]
        counts = [len(outcome.rounds), int(outcome.total.sum())]
        shown = [percent(number_or_none(value), 2, missing="") for value in values]
        lines.append([outcome.method, outcome.collaboration, *counts, *shown])
    return _csv([head, *lines])


def write_collaboration(results: Results, path: Path) -> Path | None:
    """Write `collaboration.csv` atomically and return its path; None, and no file, if the run has no such rounds."""
    found = matrix(results)
    return None if found is None else write_atomically(path, collaboration_csv(found).encode())


def _csv(lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def render_tables(results: Results) -> list[Table]:
    """Return all tables of a run for a terminal."""
    found = matrix(results)
    rendered = [] if found and not results.evaluations else [render_table(results)]
    if found:
        rendered += [_render_matrix(found, measure) for measure in MEASURES]
        rendered.append(_render_clients(found))
    return rendered


def render_table(results: Results) -> Table:
    """Return the table of methods and distributions: percentages, the best of each column in bold."""
    rows = table(results)
    shifts = list(rows[0].cells) if rows else []
    caption = " ".join(filter(None, ("average: mean ± sd over distributions.", verdict(rows))))
    rendered = Table(title="Accuracy in %, mean over clients", caption=Text(caption))
    rendered.add_column("method", no_wrap=True)
    for shift in shifts:
        rendered.add_column(Text(shift), justify="right", overflow="fold")
    rendered.add_column("average", justify="right", style="cyan", no_wrap=True)
    tops = [ACCURACY.top(row.mean(shift) for row in rows) for shift in shifts]
    top_average = ACCURACY.top(row.average for row in rows)
    for row in rows:
        cells = [_bold_if(percent(row.mean(shift)), top) for shift, top in zip(shifts, tops, strict=True)]
        average = _bold_if(percent(row.average), top_average)
        if row.average_sd is not None:
            average.append(f" ± {percent(row.average_sd)}", style="not bold")
        rendered.add_row(Text(row.label), *cells, average)
    return rendered


def _render_matrix(found: Matrix, measure: str) -> Table:
    gaps = [f"{outcome.label}: {outcome.gap}" for outcome in found.outcomes if outcome.gap]
    rendered = Table(title=MEASURES[measure], caption=Text("; ".join(gaps)) if gaps else None)
    rendered.add_column("method", no_wrap=True)
    for collaboration in found.collaborations:
        rendered.add_column(Text(collaboration), justify="right", overflow="fold")
    tops = found.tops(measure)
    for method in found.methods:
        cells = []
        for collaboration in found.collaborations:
            outcome = found.cells.get((method, collaboration))
            shown = percent(number_or_none(getattr(outcome.scores, measure))) if outcome else "–"
            incomplete = outcome is not None and bool(outcome.gap)
            text = _bold_if(shown, None if incomplete else tops[collaboration])
            cells.append(text.append("*", style="not bold") if incomplete else text)
        rendered.add_row(Text(method), *cells)
    return rendered


def _render_clients(found: Matrix) -> Table:
    """Return the accuracy of each client in whole %, so that ten clients fit in a line."""
    columns = list(found.columns)
    more = f"; the first {LISTED} of {len(columns)}" if len(columns) > LISTED else ""
    rendered = Table(title=f"Accuracy of each client in %{more}", padding=(0, 0, 0, 1))
    for column in ("method", "collaboration"):
        rendered.add_column(column, overflow="fold")
    for client in columns[:LISTED]:
        rendered.add_column(Text(found.columns[client]), justify="right", overflow="fold")
    for outcome in found.outcomes:
        shown = [percent(number_or_none(outcome.scores.per_client[client]), 0) for client in columns[:LISTED]]
        rendered.add_row(Text(outcome.method), Text(outcome.collaboration), *shown)
    return rendered


def _bold_if(shown: str, top: str | None) -> Text:
    return Text(shown, style="bold" if shown == top else "")
