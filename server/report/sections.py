"""The other sections of the page, each a function from results to HTML; all measured text is escaped."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from html import escape

from server.report.events import Clients, LeakCheck
from server.report.markup import data_table, missing, picture
from server.report.plots import weight_histograms
from server.report.plots_run import by_training, class_map, learning_curves, round_times, workers_of
from server.report.results import METRICS_FILE, Results
from server.report.tables import Row
from server.report.wording import counted, size, text

_LISTED = 50  # incidents shown; the file has them all


def curves(results: Results) -> str:
    """Give the section with the learning curves."""
    plot = learning_curves(results)
    if plot is None:
        return "<h2>Training</h2>" + missing("Left out: no round was trained in this run.")
    caption = (
        "<strong>Learning curves.</strong> Left: accuracy on the clients' validation splits, mean over "
        "clients, of the global model as received at the start of a round (so the last round's result is not "
        "in it) and, dashed, of the personal heads where they were measured. Right: mean training loss."
    )
    diverged = [
        f"{entry.training}, round {entry.round}"
        for entry in results.rounds
        if entry.train_loss is not None and not math.isfinite(entry.train_loss)
    ]
    warning = f'<p class="warning">Training loss not finite: {escape("; ".join(diverged))}.</p>' if diverged else ""
    return "<h2>Training</h2>" + warning + picture(plot, caption)


def weights(results: Results, rows: list[Row]) -> str:
    """Give the section with the histograms of e."""
    plot = weight_histograms(results, rows)
    title = "<h2>How much of the global head</h2>"
    if plot is None:
        return title + missing("Left out: no method of this run mixes the two heads with a weight e.")
    caption = (
        "<strong>Weight e of the global head</strong>, chosen for each test sample: 0 is the personal head "
        "alone, 1 the global head alone. Share of the samples of all clients; line and number give the mean."
    )
    return title + picture(plot, caption)


def who_has_what(results: Results) -> str:
    """Give the section on the clients' data."""
    title, clients = "<h2>Who has what</h2>", results.clients
    if clients is None:
        return title + missing("Left out: the run has not recorded its clients.")
    line = _samples(clients)
    plot = class_map(clients)
    if plot is None:
        return title + line + missing("Class histogram left out: in deployment class counts stay on the devices.")
    caption = "<strong>Samples per class and client</strong>; stronger colour is more (square-root scale)."
    return title + line + picture(plot, caption)


def _samples(clients: Clients) -> str:
    """Say how many samples the clients have, together and in each split."""
    totals = [sum(sizes) for sizes in clients.sizes]
    if not totals:
        return ""
    train, validation, test = (sum(sizes[part] for sizes in clients.sizes) for part in range(3))
    low, high = min(totals), max(totals)
    middle = f"{statistics.median(totals):,.0f}"
    each = f"{low:,} to {high:,} samples (median {middle})" if low < high else f"{low:,} samples each"
    return (
        f"<p>{counted(len(totals), 'client')} with {each}; together {train:,} for training, {validation:,} for "
        f"validation, {test:,} for tests.</p>"
    )


def time(results: Results) -> str:
    """Give the section on time and traffic."""
    plot = round_times(results)
    if plot is None:
        return "<h2>Time and traffic</h2>" + missing("Left out: no round was trained in this run.")
    workers = workers_of(results)
    meaning = (
        f"the sum over the round's clients divided by {counted(workers, 'worker')}"
        if workers
        else "that of the slowest client of the round"
    )
    caption = f"<strong>Wall time per round.</strong> Local training is {meaning}."
    traffic = [
        f"{escape(name)}: {size(sum(e.bytes_down for e in rounds) / len(rounds))} down to the clients and "
        f"{size(sum(e.bytes_up for e in rounds) / len(rounds))} up"
        for name, rounds in by_training(results).items()
    ]
    return f"<h2>Time and traffic</h2>{picture(plot, caption)}<p>Traffic of a mean round, all clients: " + (
        f"{'; '.join(traffic)}.</p>"
    )


def checks(results: Results) -> str:
    """Give the section on leaks, incidents and notes."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in results.notes)
    return f"<h2>Checks and incidents</h2>{_leaks(results)}{_incidents(results)}" + (
        f"<p>Notes of the run:</p><ul>{notes}</ul>" if notes else ""
    )


def _leaks(results: Results) -> str:
    if not results.leak_checks:
        return missing("No leak check was recorded.")
    on_purpose = results.run is not None and results.run.settings.get("split") == "published"
    return "".join(_leak(check, on_purpose) for check in results.leak_checks)


def _leak(check: LeakCheck, on_purpose: bool) -> str:
    of = f" ({escape(check.training)})" if check.training else ""
    if check.leaked:
        what = "Leak on purpose, split = published" if on_purpose else "Leak check failed"
        words = f"{what}{of}: {check.leaked:,} of {check.checked:,} test samples were trained on."
        return f'<p class="warning">{words}</p>'
    return f'<p class="good">Leak check by index{of}: none of {check.checked:,} test samples was trained on.</p>'


def _incidents(results: Results) -> str:
    if not results.incidents:
        return '<p class="good">Every reply was accepted: none refused, failed or late.</p>'
    totals = Counter(entry.event for entry in results.incidents)
    body = [
        f"<tr><td>{escape(entry.event)}</td><td>{escape(entry.training)}</td><td>{entry.round}</td>"
        f"<td>{text(entry.partition)}</td><td>{text(entry.node_id)}</td><td>{escape(entry.reason)}</td></tr>"
        for entry in results.incidents[:_LISTED]
    ]
    left_out = len(results.incidents) - len(body)
    more = f" The first {_LISTED} are listed, {left_out:,} more in {METRICS_FILE}." if left_out else ""
    summary = ", ".join(f"{number:,} {event}" for event, number in totals.items())
    caption = f"<strong>Replies that did not count:</strong> {summary}; the rounds went on without them.{more}"
    head = [">event", ">training", ">round", ">client", ">node", ">reason"]
    return data_table(head, body, caption, kind="text wrap")


def settings(results: Results) -> str:
    """Give the section with every setting of the run."""
    if results.run is None:
        return "<h2>Settings</h2>" + missing("Left out: the run has not recorded its settings.")
    items = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{text(value).replace(',', ',<wbr>')}</dd></div>"
        for name, value in results.run.settings.items()
    )
    resumed = f"<p>Started {counted(results.starts, 'time')}: the run was resumed.</p>"
    listed = f'<h2>Settings</h2><dl class="settings">{items}</dl>'
    return listed + (resumed if results.starts > 1 else "")
