"""`run`: one protocol over several seeds, as a table on the terminal, JSON, Markdown and the first seed's report."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.protocol import (
    Summary,
    best,
    load_protocol,
    of_seed,
    protocol_path,
    run_folder,
    run_protocol,
    shares,
    spread,
    to_markdown,
    write_summary,
)
from benchmarks.record import RESULTS
from benchmarks.start import KIND, check_start
from models import write_atomically
from server.report import METRICS_FILE, Results, read_results
from settings import Settings

REPORT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("protocol", metavar="PROTOCOL", help="name of a file in benchmarks/protocols")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--seeds", type=seeds_of, default=[1, 2, 3], metavar="1,2,3", help="default: 1,2,3")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="of the run folders (default: results)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of the summary (default: benchmarks/results)")


def seeds_of(text: str) -> list[int]:
    """Return the whole numbers in '1,2,3'; ArgumentTypeError if one is not, or occurs twice."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or len(set(map(int, words))) != len(words):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are different whole numbers, separated by commas")
    return [int(word) for word in words]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run the protocol, print its table and write its results.

    Raises
    ------
    SettingsError, RunError
        As `load_protocol` and `run_protocol`.
    """
    settings = load_protocol(arguments.protocol, arguments.set)
    summary = run_protocol(arguments.protocol, settings, arguments.seeds, arguments.folder)
    folders = [run_folder(summary.name, seed, arguments.folder) for seed in summary.seeds]
    results = [read_results(folder / METRICS_FILE) for folder in folders]
    info = information(settings, summary.seeds, results)
    path = write_summary(summary, settings, info, arguments.out)
    page = markdown_page(summary, settings, info, command_line(arguments))
    write_atomically(path.with_suffix(".md"), page.encode())
    write_atomically(path.with_suffix(".html"), (folders[0] / REPORT).read_bytes())
    console.print(rendered(summary))
    for line in share_lines(summary):
        console.print(Text(line))  # options stand in brackets, which are no markup
    console.print(f"Written: {path}, .md and .html beside it", highlight=False)


def information(settings: Settings, seeds: Sequence[int], results: Sequence[Results]) -> dict[str, Any]:
    """Return what the runs say of themselves: versions, and commit, hardware and time of each, as JSON values."""
    runs: list[dict[str, Any]] = []
    for seed, result in zip(seeds, results, strict=True):
        run, end = result.run, result.end
        if run is None or end is None:
            raise ValueError(f"the run of seed {seed} does not say what it ran, or has no end")
        own = {"time": run.time, "wall_seconds": round(end.seconds, 1), "commit": run.commit, "hardware": run.hardware}
        checked = sum(check.checked for check in result.leak_checks)
        runs.append({"seed": seed, **own, "versions": run.versions, "test_samples_checked": checked})
        if label := check_start(of_seed(settings, seed)):
            runs[-1]["start"] = {"kind": KIND, "validation_accuracy": label.get("validation_accuracy")}
    notes = list(dict.fromkeys(note for result in results for note in result.notes))
    return {"runs": runs, "notes": notes}


def rendered(summary: Summary) -> Table:
    """Return the table for a terminal: percent, mean ± sd over seeds, best mean of a column bold."""
    grid = Table(title=f"{summary.name}: accuracy in %, mean over clients", caption=_over(summary.seeds))
    grid.add_column("method", overflow="fold")
    top = best(summary)
    for column in top:
        grid.add_column(Text(column), justify="right", style="cyan" if column == "average" else "")
    for method, row in summary.cells.items():
        bold = {column: f"{np.mean(row[column]):.2f}" == top[column] for column in top}
        grid.add_row(Text(method), *(Text(spread(row[c]), style="bold" if bold[c] else "") for c in top))
    return grid


def share_lines(summary: Summary) -> list[str]:
    """Return one line a method: the share of the gap personal → FedAvg that it recovers out of client."""
    parts = {method: spread(values) for method, values in shares(summary).items()}
    words = "of the gap personal → FedAvg recovered on out_of_client"
    return [f"{method}: {text} % {words}" if text != "–" else f"{method}: no gap" for method, text in parts.items()]


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that makes these results again."""
    words = ["python", "-m", "benchmarks", "run", arguments.protocol, "--seeds", ",".join(map(str, arguments.seeds))]
    return shlex.join([*words, *(["--set", *arguments.set] if arguments.set else [])])


def markdown_page(summary: Summary, settings: Settings, info: Mapping[str, Any], command: str) -> str:
    """Return the page about a protocol's results: table, gap, and all that is needed to make it again."""
    default = Settings().flat()
    own = {key: value for key, value in settings.flat().items() if value != default[key]}
    parts = [
        f"# {summary.name}",
        description(summary.name),
        f"Accuracy in %, mean over clients; {_over(summary.seeds)}.",
        to_markdown(summary),
        "\n".join(f"- {line}" for line in share_lines(summary)),
        "\n".join(f"- Seed {run['seed']}: {_run_words(run)}." for run in info["runs"]),
        "\n".join(f"- {note}" for note in info["notes"]),
        "Settings that differ from the defaults: " + ", ".join(f"`{key} = {value!r}`" for key, value in own.items()),
        f"```\n{command}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def description(name: str) -> str:
    """Return the comment at the top of a protocol's file."""
    match = re.match(r"(?:#.*\n)+", protocol_path(name).read_text())
    return re.sub(r"^# ?", "", match[0], flags=re.MULTILINE).strip() if match else ""


def _run_words(run: Mapping[str, Any]) -> str:
    """Say of one run where it ran, for how long, and that its test samples were new to it."""
    start = run.get("start")
    words = [
        _start_words(start) if start else "",
        f"{run['test_samples_checked']} test samples, by index none of them trained on",
        f"{run['wall_seconds']:.0f} s on {run['hardware']}",
        f"torch {run['versions'].get('torch', '?')}, flwr {run['versions'].get('flwr', '?')}",
        f"commit {run['commit']}" if run["commit"] else "",
    ]
    return "; ".join(word for word in words if word)


def _start_words(start: Mapping[str, Any]) -> str:
    accuracy = start["validation_accuracy"]
    return f"started from a {start['kind']} network" + (f" (validation {100 * accuracy:.2f} %)" if accuracy else "")


def _over(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"mean ± standard deviation (divided by n) over the seeds {', '.join(map(str, seeds))}"
