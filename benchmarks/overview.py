"""`page`: all that is kept, as an index (`README.md`) and with pictures (`report.html`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.cells import Content, kept
from benchmarks.chosen import choices, markdown
from benchmarks.curves import curve_panels
from benchmarks.other_tables import other_tables, pages, prose
from benchmarks.papers import Printed
from benchmarks.protocol import Cell, Protocol, read_protocol
from benchmarks.protocol_page import PAGE, over, run_words
from benchmarks.record import RESULTS
from benchmarks.summary import AVERAGE, Summary, beyond_words, summarise
from models import write_atomically
from server.report import Evaluation, Results
from server.report.drawing import Plot, bare, legend_above, log_x, new_figure, series_style, styled, to_svg
from server.report.events import Round
from server.report.markup import CSS, data_table, plot_figure
from server.report.plots import accuracy_by_shift, training_curves, weight_histograms
from server.report.scores import Cell as TableCell
from server.report.scores import Row

REPORT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `page`."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="of what is kept (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Write both pages."""
    for path in write_overview(arguments.out):
        console.print(f"Written: {path}", highlight=False)


def write_overview(out: Path) -> tuple[Path, Path]:
    """Write `README.md` and `report.html` from all that a folder of results keeps, and return their paths."""
    found = [(read_protocol(name), cells) for name, cells in kept(out).items()]
    return (
        write_atomically(out / PAGE, index(found, out).encode()),
        write_atomically(out / REPORT, html_page(found, other_tables(out)).encode()),
    )


Found = Sequence[tuple[Protocol, Mapping[str, Mapping[int, Content]]]]


def index(found: Found, out: Path) -> str:
    """Return the index: every protocol with its cells, and the other pages and figures of the folder."""
    lines = ["# Results", f"Made by `python -m benchmarks run` and `page`; with pictures: [{REPORT}]({REPORT}).", ""]
    for protocol, cells in found:
        lines += [f"## [{protocol.name}]({protocol.name}/{PAGE})", "", protocol.about, ""]
        lines += ["| cell | rows | seeds |", "| --- | --- | --- |"]
        for cell in protocol.cells:
            if cell.name in cells:
                rows = dict.fromkeys(f"`{row}`" for one in cells[cell.name].values() for row in one["rows"])
                seeds = ", ".join(map(str, sorted(cells[cell.name])))
                lines.append(f"| {cell.title} | {', '.join(rows)} | {seeds} |")
        lines.append("")
    others = [path.relative_to(out) for path in pages(out)]
    lines += ["## Other tables", "", *(f"- [{path}]({path})" for path in others), ""]
    lines += [markdown(choices())]
    figures = [path for path in sorted(out.glob("*.json")) if not path.with_suffix(".md").exists()]
    lines += ["## Figures of time and memory", "", *(f"- [{path.name}]({path.name})" for path in figures), ""]
    return "\n".join(lines)


def html_page(found: Found, others: Mapping[str, str]) -> str:
    """Return the self-contained page: a section a protocol, with a table and pictures a cell, then the `others`."""
    sections = []
    for protocol, cells in found:
        parts = [f'<h2 id="{escape(protocol.name)}">{escape(protocol.name)}</h2><p>{words(protocol.about)}</p>']
        parts += [section(protocol, cell, cells[cell.name]) for cell in protocol.cells if cell.name in cells]
        sections.append("\n".join(parts))
    names = [*(one.name for one, _ in found), *others, "chosen"]
    links = " · ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)
    lead = f"Our numbers beside the papers'; clients' splits are drawn once, unless a title says otherwise. {links}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>FedTTA results</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="kicker">FedTTA</p><h1>Results</h1><p class="lead">{lead}</p></header>\n'
        + "\n".join([*sections, *others.values(), prose("chosen", markdown(choices()).removeprefix("#"))])
        + "\n</main>\n</body>\n</html>\n"
    )


def section(protocol: Protocol, cell: Cell, contents: Mapping[int, Content]) -> str:
    """Return a cell's part of the page; what no run has kept is left out."""
    summary = summarise(cell, contents)
    results, rows = as_results(contents), table_rows(summary)
    title = "" if cell.title == protocol.name else f"<h3>{escape(cell.title)}</h3>"
    parts = [title, html_table(summary, cell)]
    if cell.reference is not None and (far := beyond_words(summary, cell.reference.why)):
        parts.append(f'<p class="small">{escape(far)}</p>')
    pictures = (
        (accuracy_by_shift(rows), "<strong>Accuracy</strong> by test distribution, mean over seeds."),
        (cost_plot(contents, summary), "<strong>Cost against accuracy</strong>: time at test, as it ran, by row."),
        (weight_histograms(results), "<strong>Weight e of the global head</strong>, all clients and seeds."),
        (
            curve_panels(contents),
            "<strong>Accuracy over the rounds</strong> on each test distribution, mean over seeds.",
        ),
        (training_curves(results), f"<strong>Learning curves</strong> of seed {min(contents)}."),
    )
    parts += [plot_figure(unique(plot, f"{protocol.name}-{cell.name}"), caption) for plot, caption in pictures if plot]
    lines = "".join(f"<li>Seed {seed}: {escape(run_words(one))}</li>" for seed, one in sorted(contents.items()))
    notes = "".join(
        f"<li>{escape(note)}</li>" for note in dict.fromkeys(n for c in contents.values() for n in c["notes"])
    )
    return "\n".join([*parts, f"<details><summary>How this was made</summary><ul>{lines}{notes}</ul></details>"])


def words(text: str) -> str:
    """Return Markdown's plain words with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def html_table(summary: Summary, cell: Cell) -> str:
    """Return the table: ours, and under it the paper's and the difference where it has the number."""
    head = ["row", *(escape(column) for column in summary.columns)]
    body = []
    for label, row in summary.cells.items():
        theirs = summary.paper.get(label, {})
        places = [_place(row.get(column, ()), theirs.get(column)) for column in summary.columns]
        body.append([escape(label), *places])
    beside = ""
    if cell.reference is not None and summary.paper:
        beside = f" Below it the paper's ({cell.reference.paper}, Table {cell.reference.table}) and the difference."
    caption = f"<strong>Accuracy in %</strong>, mean over {cell.weighting}; {over(summary.seeds)}.{beside}"
    return data_table(head, body, caption)


def _place(values: Sequence[float], theirs: Printed | None) -> str:
    """Return one place of the table."""
    if not values:
        return "–" if theirs is None else f'– <span class="sd">paper {theirs.mean:.1f}</span>'
    mean = float(np.mean(values))
    sd = f' <span class="sd">± {np.std(values):.1f}</span>' if len(values) > 1 else ""
    beside = "" if theirs is None else f'<div class="sd">{theirs.mean:.1f} ({mean - theirs.mean:+.1f})</div>'
    return f"{mean:.1f}{sd}{beside}"


def table_rows(summary: Summary) -> list[Row]:
    """Return the summary as the rows that plots are drawn from; their sd is over seeds."""
    shifts = [column for column in summary.columns if column != AVERAGE]
    rows = []
    for label, row in summary.cells.items():
        cells = {
            shift: TableCell(_mean(row[shift]), float(np.std(row[shift])) / 100, 0) if shift in row else None
            for shift in shifts
        }
        average = _mean(row[AVERAGE])
        rows.append(Row("", label, label, cells, average, None))
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) / 100


@styled
def cost_plot(contents: Mapping[int, Content], summary: Summary) -> Plot | None:
    """Draw average accuracy against the time of a sample at test, a mark a row; rows without times are left out."""
    costs = {label: cost for label in summary.cells if (cost := milliseconds(contents, label)) is not None}
    if not costs:
        return None
    figure = new_figure(2.9)
    axes = figure.subplots()
    bare(axes)
    axes.grid(axis="x")
    words = []
    for index, label in enumerate(summary.cells):
        if label in costs:
            average = float(np.mean(summary.cells[label][AVERAGE]))
            style = series_style(index) | {"linestyle": "none"}
            axes.plot([costs[label]], [average], markersize=6, label=label, **style)
            words.append(f"{label}: {costs[label]:.3g} ms, {average:.1f} %")
    log_x(axes)
    axes.set_xlabel("milliseconds a sample at test")
    axes.set_ylabel("average accuracy, %")
    legend_above(figure, axes.get_legend_handles_labels()[0], columns=min(len(costs), 5))
    return to_svg(figure, "cost", "Average accuracy against time a sample. " + "; ".join(words))


def milliseconds(contents: Mapping[int, Content], label: str) -> float | None:
    """Return a row's mean time of a sample over seeds and distributions; None where it was not kept."""
    rows = [one["rows"][label] for one in contents.values() if label in one["rows"]]
    rates = [shift.get("samples_per_second") for row in rows for shift in row["shifts"].values()]
    known = [1000 / rate for rate in rates if rate]
    return float(np.mean(known)) if known else None


def as_results(contents: Mapping[int, Content]) -> Results:
    """Return weights of all seeds, and the first seed's curves, as a run would have written them."""
    evaluations = []
    for seed, content in contents.items():
        for label, row in content["rows"].items():
            for shift, one in row["shifts"].items():
                if "weight_histogram" in one:
                    counts = [int(word) for word in one["weight_histogram"].split()]
                    more = {"weight_histogram": counts, "weight_mean": one["weight_mean"]}
                    evaluations.append(Evaluation("", label, shift, seed, 0, sum(counts), **more))
    first = contents[min(contents)]["trainings"]
    rounds = [
        Round(name, number + 1, [], [], loss, None if share is None else share / 100, [], 0.0, 0, 0)
        for name, curves in first.items()
        for number, (loss, share) in enumerate(
            zip(_line(curves["train_loss"]), _line(curves["validation_percent"]), strict=True)
        )
    ]
    return Results(evaluations=evaluations, rounds=rounds)


def _line(text: str) -> list[float | None]:
    return [None if word == "-" else float(word) for word in text.split()]


def unique(plot: Plot, name: str) -> Plot:
    """Return a plot whose ids occur once in a page with several plots of a kind."""
    own = re.sub(r"[^A-Za-z0-9]", "", name)
    svg = re.sub(rf'(id="|url\(#|href="#){plot.name}-', rf"\g<1>{own}-{plot.name}-", plot.svg)
    return Plot(svg, plot.alt, plot.name, plot.figure)
