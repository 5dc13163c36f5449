"""Sections of the page on accuracy: by method and distribution, by client, and with collaboration at test time."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean

import numpy as np

from fedtta.server.report import plots
from fedtta.server.report.collaboration import MEASURES, Matrix, Outcome, mixing_rounds, number_or_none, plain_mixing
from fedtta.server.report.drawing import plot_figure
from fedtta.server.report.journal import METRICS_FILE
from fedtta.server.report.markup import breakable, counted, data_table, folded, missing
from fedtta.server.report.results import Results
from fedtta.server.report.scores import (
    ACCURACY,
    METRICS,
    Estimated,
    Metric,
    Row,
    by_method,
    client_outliers,
    estimated,
    outlying,
    percent,
    row_labels,
    table,
    verdict,
)
from fedtta.server.report.tables import COLLABORATION_FILE, LISTED, TABLE_FILE, collaboration_csv, table_csv

#: Marks an accuracy that is an outlier among the clients.
MARK = "‡"


def accuracy_section(results: Results) -> str:
    """Return the section with the tables and the plot of methods and test distributions."""
    rows = table(results)
    plot = plots.accuracy_by_shift(rows)
    if plot is None:
        return "<h2>Accuracy</h2>" + missing("No evaluation with test samples yet.")
    limit = _limit_of_samples(results)
    others = [_metric_table(table(results, metric), metric, limit) for metric in METRICS if metric is not ACCURACY]
    caption = "<strong>Accuracy</strong> of each method by test distribution, mean over clients; best average first."
    return "".join(
        [
            "<h2>Accuracy</h2>",
            _metric_table(rows, ACCURACY, _tested_model(results)),
            f"<p>{escape(said)}</p>" if (said := verdict(rows)) else "",
            _fewer_clients(rows),
            f'<p class="small">The same numbers as a file: {_download(TABLE_FILE, table_csv(results))}</p>',
            _estimates_table(results),
            plot_figure(plot, caption),
            folded("Other metrics", "".join(others)),
        ]
    )


def _metric_table(rows: list[Row], metric: Metric, more: str = "") -> str:
    """Return the table of a metric; empty if no method has a value. `more` follows in the caption, as HTML."""
    shifts = list(rows[0].cells)
    if not any(any(row.cells.values()) for row in rows):
        return ""
    tops = [metric.top(row.mean(shift) for row in rows) for shift in shifts]
    top_average = metric.top(row.average for row in rows)
    body = []
    for row in rows:
        cells = [
            _shown(metric, row.mean(shift), top, cell.sd if (cell := row.cells[shift]) else None)
            for shift, top in zip(shifts, tops, strict=True)
        ]
        average = _shown(metric, row.average, top_average, row.average_sd)
        body.append([breakable(row.label), average, *cells])
    spread = " (average: over distributions)" if metric.over == "clients" else ""
    plus = " ± standard deviation" if spread else ""
    bold = " Bold: best of the column." if metric.best else ""
    caption = f"<strong>{escape(metric.title)}</strong>, mean{plus} over {metric.over}{spread}.{bold} {more}"
    return data_table(["method", "average", *map(breakable, shifts)], body, caption, kind="average")


def _estimates_table(results: Results) -> str:
    """Return the table of accuracies with their estimates without labels; empty without estimates."""
    labels = row_labels(results)
    found = {
        (labels[pair], shift): (cell, entries)
        for pair, shifts in by_method(results).items()
        for shift, entries in shifts.items()
        if (cell := estimated(entries))
    }
    names = list(dict.fromkeys(name for cell, _ in found.values() for name in cell))
    body = []
    for (label, shift), (cell, entries) in found.items():
        accuracy = fmean(entry.correct / entry.total for entry in entries if entry.total)
        shown = [_estimate(cell.get(name)) for name in names]
        body.append([f"{breakable(label)} · {breakable(shift)}", percent(accuracy), *shown])
    caption = (
        "<strong>Accuracy in % and what it is estimated to be without labels</strong>, mean over clients. Small: the "
        "interval, then the mean distance of a client's estimate from its accuracy, in points."
    )
    return data_table(["method · distribution", "accuracy", *map(breakable, names)], body, caption) if body else ""


def _estimate(one: Estimated | None) -> str:
    if one is None:
        return "–"
    about = f"{percent(one.low)} to {percent(one.high)}; {percent(one.error)}"
    return f'{percent(one.accuracy)} <span class="sd">{about}</span>'


def _shown(metric: Metric, value: float | None, top: str | None, sd: float | None) -> str:
    shown = metric.show(value)
    bold = f"<strong>{shown}</strong>" if shown == top else shown
    return bold if sd is None or metric.over == "samples" else f'{bold} <span class="sd">±{metric.show(sd)}</span>'


def _limit_of_samples(results: Results) -> str:
    """Say which part of a client's samples does not count in the means over samples."""
    share = float(results.setting("max-share") or 0)
    return f"A client counts as at most {share:g} times the median client's samples (max-share)." if share else ""


def _tested_model(results: Results) -> str:
    """Say which state of the model the accuracies belong to, as HTML."""
    last = {training: rounds[-1].round for training, rounds in results.by_training().items()}
    tested = dict.fromkeys(entry.training for entry in results.evaluations)
    if not any(training in last for training in tested):
        start = results.setting("init")
        origin = f"read from {escape(str(start))}" if start else "as initialized"
        return f"No round was trained in this run: the model is {origin}."
    states: dict[str, list[str]] = {}
    for name in tested:
        state = f"after round {last[name]}" if name in last else "not trained in this run"
        states.setdefault(state, []).append(escape(name))
    words = "; ".join(f"{', '.join(names)} {state}" for state, names in states.items())
    return f"Model: {words}. Each method starts from this state on each distribution."


def _fewer_clients(rows: list[Row]) -> str:
    """List the means over fewer clients than others."""
    most = max(cell.clients for row in rows for cell in row.cells.values() if cell)
    few = [
        f"{row.label} on {shift}: {counted(cell.clients, 'client') if cell else 'no samples'}"
        for row in rows
        for shift, cell in row.cells.items()
        if cell is None or cell.clients < most
    ]
    words = "Means are over clients with test samples, and averages over all distributions. Exceptions: "
    return missing(f"{words}{'; '.join(few)}.") if few else ""


def _download(name: str, content: str) -> str:
    encoded = b64encode(content.encode()).decode()
    return f'<a download="{name}" href="data:text/csv;base64,{encoded}">{name}</a>'


def client_section(results: Results) -> str:
    """Return the section on the accuracy of each client; empty without accuracies."""
    plot = plots.accuracy_by_client(results)
    if plot is None:
        return ""
    caption = (
        "<strong>Accuracy of each client in %</strong>, mean over its test distributions. Stronger color is higher."
    )
    labels = row_labels(results)
    clients = results.columns(1 + max((entry.partition for entry in results.evaluations), default=-1))
    body = []
    for pair, shifts in by_method(results).items():
        for shift, entries in shifts.items():
            found = {entry.partition: ACCURACY.of(entry) for entry in entries}
            odd = outlying({entry.partition: (entry.correct, entry.total) for entry in entries})
            shown = [percent(found.get(client)) + (MARK if client in odd else "") for client in clients[:LISTED]]
            body.append([f"{breakable(labels[pair])} · {breakable(shift)}", *shown])
    head = ["method · distribution", *(breakable(results.name(client)) for client in clients[:LISTED])]
    more = f" The first {LISTED} clients; all are in {METRICS_FILE}." if len(clients) > LISTED else ""
    details = data_table(head, body, f"<strong>Accuracy of each client</strong> in %.{more}") if body else ""
    unknown = results.without_labels
    none = missing(f"{', '.join(unknown)}: no labels, so no accuracies.") if unknown else ""
    plotted = plot_figure(plot, caption)
    return f"<h2>Accuracy of each client</h2>{plotted}{none}{_outliers(results)}{folded('By distribution', details)}"


def _outliers(results: Results) -> str:
    """List the clients whose accuracy is far from that of most: what a client counts is its own word."""
    found: dict[int, list[str]] = {}
    for label, clients in client_outliers(results).items():
        for client in clients:
            found.setdefault(client, []).append(label)
    lines = [f"{results.name(client)} ({', '.join(labels)})" for client, labels in sorted(found.items())]
    words = f"Accuracies far from those of most clients, marked {MARK} below: {'; '.join(lines)}. "
    return missing(f"{words}Clients count their own predictions.") if lines else ""


def collaboration_section(results: Results, found: Matrix | None) -> str:
    """Return the section on adaptation in collaborative rounds; empty if the run has none."""
    if not results.adapt_rounds and not results.adapted:
        return ""
    title, plot = "<h2>Collaboration at test time</h2>", plots.collaboration(results)
    if found is None or plot is None:
        return title + missing("No client has had a test sample yet.")
    gaps = [f"{outcome.label}: {outcome.gap}" for outcome in found.outcomes if outcome.gap]
    file = _download(COLLABORATION_FILE, collaboration_csv(found))
    caption = (
        "<strong>Accuracy over the rounds</strong>: all samples of all clients up to each round. Below, if clients "
        "weigh each other unequally, the weights W: a row holds the weights that a client gives to other models."
    )
    return "".join(
        [
            title,
            _best_outcome(found),
            *(_matrix_table(found, measure) for measure in MEASURES),
            missing(f"Incomplete cells do not compare: {'; '.join(gaps)}.") if gaps else "",
            f'<p class="small">Also by corruption, class and client as a file: {file}</p>',
            plot_figure(plot, caption),
            _other_weights(results),
            folded("By corruption", _by(found, "corruption", found.corruptions, lambda one: one.scores.per_corruption)),
            folded("By class", _by(found, "class", found.classes, lambda one: one.scores.per_class)),
        ]
    )


def _best_outcome(found: Matrix) -> str:
    """Name the best of the complete cells."""
    complete = [outcome for outcome in found.outcomes if not outcome.gap]
    if not complete:
        return ""
    best = max(complete, key=lambda outcome: outcome.scores.accuracy)
    top = percent(best.scores.accuracy)
    names = " and ".join(
        f"<strong>{escape(one.method)}</strong> with <strong>{escape(one.collaboration)}</strong>"
        for one in complete
        if percent(one.scores.accuracy) == top
    )
    return (
        f'<p class="finding">Highest global accuracy: {names}, <strong>{top} %</strong> over '
        f"{counted(int(best.total.sum()), 'sample')} in {counted(len(best.rounds), 'round')}. One run, one seed.</p>"
    )


def _matrix_table(found: Matrix, measure: str) -> str:
    tops = found.tops(measure)
    body = []
    for method in found.methods:
        cells = []
        for name in found.collaborations:
            outcome = found.cells.get((method, name))
            shown = percent(number_or_none(getattr(outcome.scores, measure))) if outcome else "–"
            if outcome and outcome.gap:
                shown += f' <span class="sd">{outcome.gap}</span>'
            cells.append(f"<strong>{shown}</strong>" if shown == tops[name] else shown)
        body.append([breakable(method), *cells])
    caption = f"<strong>{MEASURES[measure]}</strong>, over all clients and corruptions. Bold: best of the column."
    return data_table(["method", *map(breakable, found.collaborations)], body, caption)


def _by(found: Matrix, what: str, names: Sequence[str], values: Callable[[Outcome], np.ndarray]) -> str:
    """Return a table of accuracies with a row for each cell of the matrix."""
    body = [
        [breakable(outcome.label), *(percent(number_or_none(value)) for value in values(outcome)[:LISTED])]
        for outcome in found.outcomes
    ]
    more = f" The first {LISTED}; all are in {COLLABORATION_FILE}." if len(names) > LISTED else ""
    caption = f"<strong>Accuracy by {what}</strong> in %, over all samples.{more}"
    return data_table(["method · collaboration", *map(breakable, names[:LISTED])], body, caption)


def _other_weights(results: Results) -> str:
    """Describe the W that the plot leaves out."""
    recorded = mixing_rounds(results)
    plain = [f"{' · '.join(pair)}: {words}" for pair, rounds in recorded.items() if (words := plain_mixing(rounds))]
    unrecorded = {(entry.method, entry.collaboration) for entry in results.adapt_rounds} - set(recorded)
    lines = [f"Weights W: {'; '.join(plain)}."] if plain else []
    if unrecorded:
        names = "; ".join(" · ".join(pair) for pair in sorted(unrecorded))
        lines.append(f"Weights not recorded because there are too many clients: {names}.")
    return "".join(f'<p class="small">{escape(line)}</p>' for line in lines)
