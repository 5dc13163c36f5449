"""The table methods × test distributions: numbers, CSV file and terminal."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from models import write_atomically
from server.report.events import Evaluation
from server.report.results import Results

TABLE_FILE = "table.csv"


@dataclass(frozen=True)
class Cell:
    """Accuracy (0 to 1) of one method on one distribution.

    `mean` and `sd` are over clients, each client counting the same; `weighted` counts each sample the same.
    Standard deviations are those of the clients at hand (divided by n, not n - 1): 0 for one client.
    """

    mean: float
    sd: float
    weighted: float
    clients: int
    samples: int
    seconds: float | None  # prediction time of all clients together, where it was measured


@dataclass(frozen=True)
class Row:
    """One method after one training.

    `cells` has one entry for each distribution of the run, None where this method has no samples.
    `average` and `average_sd` are the mean and standard deviation of the cells' means over the
    distributions (FedTHE's "average"), `weighted_average` the mean of the cells' weighted accuracies.
    They are None where a cell is: an average over fewer distributions compares with nothing.
    """

    training: str
    method: str
    label: str  # the method, with its training where the run has this method after several trainings
    cells: dict[str, Cell | None]
    average: float | None
    average_sd: float | None
    weighted_average: float | None


def _cell(evaluations: list[Evaluation]) -> Cell | None:
    """Summarise one method on one distribution; clients without samples are left out."""
    seen = [entry for entry in evaluations if entry.total > 0]
    if not seen:
        return None
    accuracies = [entry.correct / entry.total for entry in seen]
    samples = sum(entry.total for entry in seen)
    times = [entry.seconds for entry in seen if entry.seconds is not None]
    return Cell(
        mean=statistics.fmean(accuracies),
        sd=statistics.pstdev(accuracies),
        weighted=sum(entry.correct for entry in seen) / samples,
        clients=len(seen),
        samples=samples,
        seconds=sum(times) if len(times) == len(seen) else None,
    )


def _row(training: str, method: str, label: str, cells: dict[str, Cell | None]) -> Row:
    known = [cell for cell in cells.values() if cell is not None]
    complete = bool(known) and len(known) == len(cells)
    means = [cell.mean for cell in known]
    return Row(
        training=training,
        method=method,
        label=label,
        cells=cells,
        average=statistics.fmean(means) if complete else None,
        average_sd=statistics.pstdev(means) if complete else None,
        weighted_average=statistics.fmean([cell.weighted for cell in known]) if complete else None,
    )


def table(results: Results) -> list[Row]:
    """Give one row for each method, in the order of first appearance; columns likewise.

    A distribution on which no client has a sample is no column. A method that ran after several trainings
    has a row for each, labelled with the training.
    """
    groups: dict[tuple[str, str], dict[str, list[Evaluation]]] = {}
    for entry in results.evaluations:
        shifts = groups.setdefault((entry.training, entry.method), {})
        shifts.setdefault(entry.shift, []).append(entry)
    columns = list(dict.fromkeys(entry.shift for entry in results.evaluations if entry.total > 0))
    methods = [method for _, method in groups]
    rows = []
    for (training, method), shifts in groups.items():
        label = method if methods.count(method) == 1 else f"{method} ({training})"
        cells = {shift: _cell(shifts.get(shift, [])) for shift in columns}
        rows.append(_row(training, method, label, cells))
    return rows


def mean_of(row: Row, shift: str) -> float | None:
    """Give the accuracy of a row on one distribution, None where it has none."""
    cell = row.cells[shift]
    return cell.mean if cell else None


def percent(value: float | None, digits: int = 1, missing: str = "–") -> str:
    """Write an accuracy (0 to 1) as a percentage, without the sign."""
    return missing if value is None else f"{100 * value:.{digits}f}"


def best(values: Iterable[float | None], digits: int = 1) -> str | None:
    """Give the highest value as it is displayed, so that values that read the same are all the best one."""
    known = [value for value in values if value is not None]
    return percent(max(known), digits) if known else None


def table_csv(rows: list[Row]) -> str:
    """Write the table as CSV text: percentages with two decimals, an empty field where there is no value."""
    shifts = list(rows[0].cells) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "training", *shifts, "average", "average_sd"])
    for row in rows:
        means = [mean_of(row, shift) for shift in shifts]
        values = [percent(value, 2, missing="") for value in (*means, row.average, row.average_sd)]
        writer.writerow([row.method, row.training, *values])
    return text.getvalue()


def write_table(results: Results, path: Path) -> Path:
    """Write `table.csv` atomically and return its path."""
    return write_atomically(path, table_csv(table(results)).encode())


def render_table(results: Results) -> Table:
    """Make the table for a terminal: percentages, best of each column bold, the average set apart."""
    rows = table(results)
    shifts = list(rows[0].cells) if rows else []
    rendered = Table(title="Accuracy in %, mean over clients", caption="average: mean ± sd over distributions")
    rendered.add_column("method", no_wrap=True)
    for shift in shifts:
        rendered.add_column(Text(shift), justify="right", overflow="fold")
    rendered.add_column("average", justify="right", style="cyan", no_wrap=True)
    tops = [best(mean_of(row, shift) for row in rows) for shift in shifts]
    top_average = best(row.average for row in rows)
    for row in rows:
        cells = [_bold_if_best(mean_of(row, shift), top) for shift, top in zip(shifts, tops, strict=True)]
        average = _bold_if_best(row.average, top_average)
        if row.average_sd is not None:
            average.append(f" ± {percent(row.average_sd)}", style="not bold")
        rendered.add_row(Text(row.label), *cells, average)
    return rendered


def _bold_if_best(value: float | None, top: str | None) -> Text:
    text = percent(value)
    return Text(text, style="bold" if text == top else "")
