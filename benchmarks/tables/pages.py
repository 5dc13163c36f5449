"""`page`: Markdown pages, plots and one HTML page of all kept tables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console

from fedtta.benchmarks import poisoning
from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.speed.command import FILE, read_speed, speed_page
from fedtta.benchmarks.tables import plots
from fedtta.benchmarks.tables.comparison import Comparison, beyond, compare, entry_text, recovered, spread
from fedtta.benchmarks.tables.methods import entries, kept_costs, methods_page
from fedtta.benchmarks.tables.pairs import differences_table, orders_lines
from fedtta.benchmarks.tables.protocol import Protocol, Table
from fedtta.benchmarks.tables.protocol_file import protocol_names, read_protocol
from fedtta.benchmarks.tables.results import Content, read_results_of
from fedtta.benchmarks.tables.tuning import choices
from fedtta.settings import Settings, SettingsError
from fedtta.settings.files import write_atomically

PAGES = Path("results/tables")
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .6rem; border-bottom: 1px solid #8884; }
.scroll, pre { overflow-x: auto; } img { max-width: 100%; background: white; }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `page`."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="of kept results (default: benchmarks/results)")
    parser.add_argument("--to", type=Path, default=PAGES, help=f"where pages are written (default: {PAGES})")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Write all pages."""
    for path in write_pages(arguments.out, arguments.to):
        console.print(f"Written: {path}", highlight=False)


def write_pages(out: Path, to: Path) -> list[Path]:
    """Write `index.md`, a page per protocol with plots, speed, poisoning, methods and `index.html`; return the paths.

    Parameters
    ----------
    out : Path
        Of kept results.
    to : Path
        Of the pages.

    Raises
    ------
    SettingsError
        The folder of kept results does not exist.
    """
    if not out.is_dir():
        raise SettingsError(f"--out {out}: no such folder")
    kept = read_results_of(out)
    written, pages = [], {}
    for name in (name for name in protocol_names() if name in kept):
        protocol = read_protocol(name)
        drawn = protocol_plots(protocol, kept[name])
        pages[name] = protocol_page(protocol, kept[name], list(drawn))
        for plot, svg in drawn.items():
            written.append(write_atomically(to / plot, svg.encode()))
    index = index_page([read_protocol(name) for name in pages], kept)
    pages["methods"] = methods_page(entries(), kept_costs(out))
    if speed := read_speed(out / FILE):
        pages["speed"] = speed_page(speed)
    if kept_poisoning := poisoning.read_poisoning(out / poisoning.FILE):
        pages["poisoning"] = poisoning.poisoning_page(kept_poisoning)
    for name, page in {"index": index, **pages}.items():
        written.append(write_atomically(to / f"{name}.md", page.encode()))
    written.append(write_atomically(to / "index.html", html_page([index, *pages.values()]).encode()))
    return written


def index_page(protocols: Sequence[Protocol], kept: Mapping[str, Mapping[str, Mapping[int, Content]]]) -> str:
    """Return the index: the kept tables of every protocol with their rows and seeds, and the chosen hyperparameters."""
    lines = ["# Results", "", "Our numbers beside the papers'. Clients' splits are drawn once, unless a title says so."]
    for protocol in protocols:
        cells = kept[protocol.name]
        lines += ["", f"## [{protocol.name}]({protocol.name}.md)", "", protocol.about, ""]
        lines += ["| table | rows | seeds |", "| --- | --- | --- |"]
        for table in _kept_tables(protocol, cells):
            found = compare(table, cells)
            rows = ", ".join(f"`{row}`" for row in found.values)
            lines.append(f"| {table.title} | {rows} | {', '.join(map(str, found.seeds))} |")
    lines += ["", "## Hyperparameters chosen on validation data", ""]
    lines += ["| protocol | chosen | accuracy of each value | measured with |", "| --- | --- | --- | --- |"]
    for one in choices():
        tried = ", ".join(f"{value}: {percent:.1f} %" for value, percent in one.percent.items())
        lines.append(f"| {one.where} | `{one.key} = {one.value}` | {tried} | {one.of} |")
    return "\n".join(lines) + "\n"


def protocol_page(protocol: Protocol, cells: Mapping[str, Mapping[int, Content]], plotted: Sequence[str] = ()) -> str:
    """Return the page of a protocol: every kept table, its provenance and its settings.

    Parameters
    ----------
    cells : mapping
        Cell → seed → kept content.
    plotted : sequence of str
        File names of plots, each shown below its table.
    """
    parts = [f"# {protocol.name}", protocol.about]
    for table in _kept_tables(protocol, cells):
        parts.append(table_section(protocol, table, cells))
        parts += [f"![{name}]({name})" for name in plotted if name.startswith(f"{protocol.name}-{table.name}.")]
    if absent := [cell.name for cell in protocol.cells if cell.name not in cells]:
        parts.append(f"Not yet run: {', '.join(absent)}.")
    parts.append(f"```sh\npython -m fedtta.benchmarks run {protocol.name}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def table_section(protocol: Protocol, table: Table, cells: Mapping[str, Mapping[int, Content]]) -> str:
    """Return a table with the paper's numbers, where it was computed, and its settings."""
    found = compare(table, cells)
    contents = {
        (cell.name, seed): one for cell in table.cells for seed, one in sorted(cells.get(cell.name, {}).items())
    }
    named = ", ".join(map(str, found.seeds))
    seeds = f"seed {named}" if len(found.seeds) == 1 else f"mean ± standard deviation (divided by n) over seeds {named}"
    gain = f"; in brackets the gain over `{table.baseline}`" if table.baseline else ""
    references = dict.fromkeys((one.paper, one.table) for cell in table.cells for one in cell.references)
    behind = ", ".join(f"{paper}, Table {number}" for paper, number in references)
    beside = f"; behind the bar the paper's ({behind})" if found.paper else ""
    over = "over all clients' samples" if table.measure else f"mean over {table.cells[0].weighting}"
    parts = [
        "" if table.title == protocol.name else f"## {table.title}",
        f"In %, {over}; {seeds}{gain}{beside}.",
        markdown_table(found),
    ]
    if table.measure:
        return "\n\n".join(part for part in parts if part)
    why = next((one.why for cell in table.cells for one in cell.references), "")
    far, total = beyond(found)
    parts.append(f"{far} of {total} means differ from the paper's by more than both spreads: {why}." if far else "")
    parts += [differences_table(table, found, cells)]
    parts.append("\n".join(f"- {line}" for line in [*orders_lines(table, found, cells), *recovered_lines(found)]))
    parts += [realtime_costs(one["realtime"]) for one in contents.values() if "realtime" in one][:1]
    parts.append("\n".join(f"- {name}, seed {seed}: {run_words(one)}." for (name, seed), one in contents.items()))
    notes = dict.fromkeys(note for one in contents.values() for note in one["notes"])
    parts.append("\n".join(f"- {note}" for note in notes))
    parts.append(settings_line(contents))
    return "\n\n".join(part for part in parts if part)


def settings_line(contents: Mapping[tuple[str, int], Content]) -> str:
    """Return the settings of the first cell that differ from the defaults, and the seeds of any cell that have others.

    Parameters
    ----------
    contents : mapping
        (cell, seed) → kept content; the first seed of a cell is what its others are compared with.
    """
    firsts: dict[str, Mapping[str, Any]] = {}
    seeds: dict[tuple[str, str], list[int]] = {}  # (cell, what is different) → the seeds
    for (cell, seed), one in contents.items():
        usual = firsts.setdefault(cell, one["settings"])
        if other := _differing(one["settings"], usual):
            seeds.setdefault((cell, other), []).append(seed)
    first = next(iter(firsts))
    words = [f"Settings of `{first}` that differ from the defaults: {_differing(firsts[first], {})}"]
    for (cell, other), own in seeds.items():
        of = "" if cell == first else f"of `{cell}` "
        words.append(f"{of}with seed{'s' if own[1:] else ''} {', '.join(map(str, own))}: {other}")
    return "; ".join(words)


def _differing(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the kept settings that are not the usual ones, but for the seed; a key that is missing has its default."""
    default = Settings().flat()
    here, there = ({**one, **default, **one} for one in (settings, usual))  # in the order of the record
    return ", ".join(f"`{key} = {value!r}`" for key, value in here.items() if key != "seed" and value != there.get(key))


def markdown_table(found: Comparison) -> str:
    """Return the table in Markdown; the best mean of a column is bold."""
    lines = [f"| row | {' | '.join(found.columns)} |", "| --- |" + " --: |" * len(found.columns)]
    for label in found.values:
        texts = []
        for column in found.columns:
            text, best = entry_text(found, label, column)
            ours, bar, theirs = text.partition(" | ")
            texts.append((f"**{ours}**" if best else ours) + (f" \\| {theirs}" if bar else ""))
        lines.append(f"| `{label}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def recovered_lines(found: Comparison) -> list[str]:
    """Return one line per method: the share of the gap personal → FedAvg that it recovers on other clients' samples."""
    texts = {method: spread(values) for method, values in recovered(found).items()}
    words = "of the gap personal → FedAvg recovered on out_of_client"
    return [f"{method}: {text} % {words}" if text != "–" else f"{method}: no gap" for method, text in texts.items()]


def run_words(content: Content) -> str:
    """Return where one seed was computed, from which network, for how long, its leak check, and replies held back."""
    runs: Sequence[Mapping[str, Any]] = content["runs"]
    words = []
    if start := content.get("start"):
        accuracy = start.get("validation_accuracy", start.get("accuracy"))
        words.append(f"starts from a {start['kind']} network" + (f" ({100 * accuracy:.2f} %)" if accuracy else ""))
    if checked := sum(one.get("test_samples_checked", 0) for one in runs):
        leaked = sum(one["test_samples_trained_on"] for one in runs if "test_samples_trained_on" in one)
        words.append(f"{checked} test samples, {leaked or 'none'} of them trained on")
    if limited := sum(one.get("replies_limited", 0) for one in runs):
        words.append(f"{limited} replies with less effect than in a plain mean (`clip-factor`, `max-share`)")
    if seconds := sum(one.get("wall_seconds", 0) for one in runs):
        words.append(f"{seconds:.0f} s")
    versions = runs[0]["versions"]
    words += [runs[0]["hardware"], f"torch {versions.get('torch', '?')}, flwr {versions.get('flwr', '?')}"]
    return "; ".join([*words, f"commit {', '.join(dict.fromkeys(str(one['commit']) for one in runs))}"])


def realtime_costs(content: Mapping[str, Any]) -> str:
    """Return the table of processor times behind a real-time evaluation."""
    sizes = sorted({int(size) for cost in content["costs"].values() for size in cost["milliseconds"]})
    lines = [f"| row | {' | '.join(map(str, sizes))} | batches taken | keeps up to |"]
    lines.append("| --- |" + " --: |" * (len(sizes) + 2))
    for label, cost in content["costs"].items():
        milliseconds = {int(size): one / int(size) for size, one in cost["milliseconds"].items()}
        texts = [f"{milliseconds[size]:.3g}" if size in milliseconds else "" for size in sizes]
        batch_sizes = str(cost["most"]) if cost["least"] == cost["most"] else f"{cost['least']} to {cost['most']}"
        lines.append(f"| `{label}` | {' | '.join(texts)} | {batch_sizes} | {cost['keeps_up_to']:.3g}× |")
    words = (
        f"Speed 1: a sample every {content['interval_milliseconds']:.3g} ms, the time of `{content['reference']}` for "
        f"one sample; the newest {content['queue']} samples wait. Milliseconds per sample by batch size (processor "
        f"time, one thread, median of {content['repeats']} turns):"
    )
    return f"{words}\n\n" + "\n".join(lines)


def protocol_plots(protocol: Protocol, cells: Mapping[str, Mapping[int, Content]]) -> dict[str, str]:
    """Return file name → SVG of all plots of a protocol."""
    found = {}
    for table in _kept_tables(protocol, cells):
        if table.measure:
            continue
        name = f"{protocol.name}-{table.name}"
        found[f"{name}.svg"] = plots.accuracy_bars(compare(table, cells))
        own = [one for cell in table.cells for one in cells.get(cell.name, {}).values()]
        for kind, svg in (
            ("rounds", plots.curves(own)),
            ("weights", plots.weight_histograms(own)),
            ("rates", plots.learned_rates(own)),
            ("mixing", plots.mixing(own)),
        ):
            if svg:
                found[f"{name}.{kind}.svg"] = svg
    return found


def html_page(pages: Sequence[str]) -> str:
    """Return Markdown pages as one HTML page, stored next to the plots; tables scroll on narrow screens."""
    body = "\n<hr>\n".join(MARKDOWN.render(page) for page in pages)
    body = re.sub(r'href="([\w.-]+)\.md"', r'href="#\1"', body)
    body = re.sub(r"<h1>([\w.-]+)</h1>", lambda match: f'<h1 id="{escape(match[1])}">{match[1]}</h1>', body)
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="color-scheme" content="light dark">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>FedTTA results</title>\n<style>{STYLE}</style>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _kept_tables(protocol: Protocol, cells: Mapping[str, Any]) -> list[Table]:
    return [table for table in protocol.tables if any(cell.name in cells for cell in table.cells)]
