"""`report.html`: one self-contained page about one run, without scripts or outside resources."""

from __future__ import annotations

from html import escape
from pathlib import Path

from models import write_atomically
from server.report import sections
from server.report.accuracy import accuracy
from server.report.markup import missing
from server.report.results import METRICS_FILE, Results, read_results
from server.report.tables import Row, percent, table
from server.report.theme import CSS
from server.report.wording import counted, duration, instant, text

REPORT_FILE = "report.html"


def write_report(run_dir: Path) -> Path:
    """Build the report of a run folder from its metrics, put it in place atomically and return its path.

    Parts that the run has not (yet) written are left out of the page, with a line that says so.

    Raises
    ------
    FileNotFoundError
        The folder has no metrics.
    ValueError
        A line of the metrics is malformed; file and line are named.
    """
    results = read_results(run_dir / METRICS_FILE)
    return write_atomically(run_dir / REPORT_FILE, build_page(results, run_dir.resolve().name).encode())


def build_page(results: Results, name: str) -> str:
    """Build the whole page as HTML text, for a run of this name."""
    rows = table(results)
    parts = [
        _header(results, rows, name),
        accuracy(results, rows),
        sections.weights(results, rows),
        sections.curves(results),
        sections.who_has_what(results),
        sections.time(results),
        sections.checks(results),
        sections.settings(results),
        f"<footer>Generated from {METRICS_FILE} by python -m server.report results/{escape(name)}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(name)} · FedTTA</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(results: Results, rows: list[Row], name: str) -> str:
    """Give title, what was run in a line, the result in a line, and the facts one needs to cite it."""
    return (
        f'<header><p class="kicker">FedTTA run</p><h1>{escape(name)}</h1><p class="lead">{_lead(results)}</p>'
        f"{_state(results)}{_finding(rows)}{_facts(results)}</header>"
    )


def _lead(results: Results) -> str:
    """Say in a line what was trained on what; settings that the run does not have are left out."""
    number = len(results.clients.sizes) if results.clients else results.setting("clients")
    parts = [
        text(results.setting("dataset")) if results.setting("dataset") else "",
        text(results.setting("model")) if results.setting("model") else "",
        counted(number, "client") if isinstance(number, int) else "",
        counted(len({entry.round for entry in results.rounds}), "round"),
        f"seed {text(results.setting('seed'))}" if results.setting("seed") is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _state(results: Results) -> str:
    if results.end is None:
        return '<p class="warning">This run has not ended: what follows is what it has written so far.</p>'
    if results.end.status != "completed":
        return f'<p class="warning">This run ended with status “{escape(results.end.status)}”.</p>'
    return ""


def _finding(rows: list[Row]) -> str:
    """Say which method is best on average, or which ones read the same, and what the next one reaches."""
    ranked = sorted((row for row in rows if row.average is not None), key=lambda row: -(row.average or 0))
    if not ranked:
        return ""
    top = percent(ranked[0].average)
    leaders = [row for row in ranked if percent(row.average) == top]
    names = " and ".join(f"<strong>{escape(row.label)}</strong>" for row in leaders)
    rest = ranked[len(leaders) :]
    behind = f"; next is {escape(rest[0].label)} with {percent(rest[0].average)} %" if rest else ""
    return (
        f'<p class="finding">Highest average accuracy: {names} with <strong>{top} %</strong> over '
        f"{counted(len(ranked[0].cells), 'distribution')}{behind}. One run, one seed.</p>"
    )


def _facts(results: Results) -> str:
    run, end = results.run, results.end
    facts: list[tuple[str, str]] = []
    if run:
        facts += [("Started", text(instant(run.time)))]
    if end:
        facts += [("Wall time", duration(end.seconds) if end.seconds is not None else "–")]
    if run:
        versions = ", ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in run.versions.items())
        facts += [("Commit", text(run.commit) if run.commit else "not recorded")]
        facts += [("Hardware", text(run.hardware)), ("Versions", text(versions))]
    if not facts:
        return missing("The run has not recorded when, where and with what it ran.")
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'
