"""The page's first section: the tables of accuracies and their picture."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from server.report.drawing import METHOD_COLOURS
from server.report.markup import data_table, missing, picture
from server.report.plots import accuracy_bars
from server.report.results import Results
from server.report.tables import TABLE_FILE, Row, best, mean_of, percent, table_csv
from server.report.wording import counted, moment


def _swatch(index: int) -> str:
    """Draw the method's colour beside its name; none where hatching tells it apart."""
    if index >= len(METHOD_COLOURS):
        return ""
    return f'<span class="swatch" style="background:{METHOD_COLOURS[index]}"></span>'


def _value(value: float | None, top: str | None, sd: float | None = None) -> str:
    shown = percent(value)
    spread = "" if sd is None else f' <span class="sd">±{percent(sd)}</span>'
    return (f"<strong>{shown}</strong>" if shown == top and value is not None else shown) + spread


def accuracy(results: Results, rows: list[Row]) -> str:
    """Give the section with the main table and its picture."""
    plot = accuracy_bars(rows)
    if plot is None:
        return "<h2>Accuracy</h2>" + missing("Left out: the run has no evaluation with test samples.")
    clients = max(cell.clients for row in rows for cell in row.cells.values() if cell)
    caption = (
        "<strong>Test accuracy in %</strong>, mean ± standard deviation over "
        f"{counted(clients, 'client')}, each client counting the same. Average: mean ± standard deviation "
        f"over the distributions. Bold: best of the column. {moment(results)}; from there each method starts "
        "afresh on each distribution and adapts, without labels, while the test stream passes."
    )
    bars = (
        "<strong>Test accuracy per distribution and method</strong>, mean over clients; whiskers: ± one "
        "standard deviation over clients. Same models and moments as in Table 1."
    )
    encoded = b64encode(table_csv(rows).encode()).decode()
    link = f'<a download="{TABLE_FILE}" href="data:text/csv;base64,{encoded}">{TABLE_FILE}</a>'
    parts = [
        _main_table(rows, caption),
        _fewer_clients(rows, clients),
        f'<p class="small">The same numbers as a file: {link}</p>',
        picture(plot, bars),
        _second_table(rows),
    ]
    return "<h2>Accuracy</h2>" + "".join(parts)


def _main_table(rows: list[Row], caption: str) -> str:
    shifts = list(rows[0].cells)
    tops = {shift: best(mean_of(row, shift) for row in rows) for shift in shifts}
    top = best(row.average for row in rows)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td>{_value(cell.mean if cell else None, tops[shift], cell.sd if cell else None)}</td>"
            for shift, cell in row.cells.items()
        )
        average = f'<td class="average">{_value(row.average, top, row.average_sd)}</td>'
        body.append(f'<tr><th scope="row">{_swatch(index)}{escape(row.label)}</th>{cells}{average}</tr>')
    head = [">method", *_columns(shifts), ' class="average">average']
    return data_table(head, body, caption)


def _columns(shifts: list[str]) -> list[str]:
    """Give the heads of the distributions' columns; on a narrow screen they may break after an underscore."""
    return [f">{escape(shift).replace('_', '_<wbr>')}" for shift in shifts]


def _fewer_clients(rows: list[Row], clients: int) -> str:
    """Say where a mean is over fewer clients, and where there is no average."""
    few = [
        f"{row.label} on {shift}: {counted(cell.clients, 'client') if cell else 'no samples'}"
        for row in rows
        for shift, cell in row.cells.items()
        if cell is None or cell.clients < clients
    ]
    if not few:
        return ""
    return missing(
        "Clients without test samples are left out; a method without samples on a distribution has no "
        f"average. {'; '.join(few)}."
    )


def _second_table(rows: list[Row]) -> str:
    """Give the sample-weighted view, and what a prediction cost, folded away."""
    shifts = list(rows[0].cells)
    tops = {shift: best(c.weighted if (c := row.cells[shift]) else None for row in rows) for shift in shifts}
    top = best(row.weighted_average for row in rows)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td>{_value(cell.weighted if cell else None, tops[shift])}</td>" for shift, cell in row.cells.items()
        )
        average = f'<td class="average">{_value(row.weighted_average, top)}</td>'
        name = f'<th scope="row">{_swatch(index)}{escape(row.label)}</th>'
        body.append(f"<tr>{name}{cells}{average}<td>{_cost(row)}</td></tr>")
    head = [">method", *_columns(shifts), ' class="average">average', ">ms per sample"]
    caption = (
        "<strong>The same, each test sample counting the same</strong> (clients with more samples weigh "
        "more), in %, and the time of one prediction, adaptation included, on the clients' hardware."
    )
    summary = "<summary>Weighted by samples, and time</summary>"
    return f"<details>{summary}{data_table(head, body, caption)}</details>"


def _cost(row: Row) -> str:
    timed = [cell for cell in row.cells.values() if cell and cell.seconds is not None]
    samples = sum(cell.samples for cell in timed)
    return f"{1000 * sum(cell.seconds or 0 for cell in timed) / samples:.2f}" if samples else "–"
