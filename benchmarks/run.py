"""`run`: a protocol's cells over several seeds, as tables on the terminal, one JSON file a cell and seed, and pages.

What is kept is not run again; a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.cells import cell_path, check_kept, fill, kept, missing
from benchmarks.curves import fill_curves, missing_points
from benchmarks.overview import write_overview
from benchmarks.protocol import Cell, Protocol, of_seed, read_protocol
from benchmarks.protocol_page import share_lines, write_page
from benchmarks.record import RESULTS
from benchmarks.start import check_start
from benchmarks.summary import Summary, best, spread, summarise
from server.events import RunError
from settings import SettingsError

FOLDER = Path("results/benchmarks")
QUICK = Path("results/quick")
WITHOUT_SETTINGS = ("seconds",)  # commands that measure networks, whatever a protocol's settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("protocol", metavar="PROTOCOL", help="name of a file in benchmarks/protocols")
    parser.add_argument("--cells", default="", metavar="NAME,NAME", help="only these cells (default: all of them)")
    parser.add_argument("--methods", help="rows instead of the protocol's; those that are kept stay")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--seeds", type=seeds_of, metavar="N", help="how many, or which: 3, 2,3 or 2-3 (default: 3)")
    parser.add_argument("--every", type=int, default=0, metavar="N", help="test all cells every N rounds too (0: not)")
    parser.add_argument("--quick", action="store_true", help=f"the small version, one seed, in {QUICK}")
    parser.add_argument("--folder", type=Path, help=f"of run folders and trainings (default: {FOLDER})")
    parser.add_argument("--out", type=Path, help="of what is kept (default: benchmarks/results)")


def seeds_of(text: str) -> list[int]:
    """Return the seeds that a word names: "3" is 1, 2, 3; "2,5" and "2-4" are which.

    Raises
    ------
    argparse.ArgumentTypeError
        It names none, or one twice.
    """
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        found = list(range(int(match[1]), int(match[2]) + 1))
    elif text.isdecimal():
        found = list(range(1, int(text) + 1))
    else:
        words = text.split(",")
        found = [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else []
    if not found or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are a number of seeds (3), or which ones (2,5 or 2-4)")
    return found


def seeds_word(seeds: Sequence[int]) -> str:
    """Return the word that `seeds_of` reads as these seeds."""
    return ",".join(map(str, seeds)) if len(seeds) > 1 else f"{seeds[0]}-{seeds[0]}"


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, print the tables and write the pages.

    Raises
    ------
    SettingsError, RunError
        As `read_protocol`, `check_kept` and `fill`.
    """
    out = arguments.out or (QUICK if arguments.quick else RESULTS)
    folder = arguments.folder or (QUICK / "runs" if arguments.quick else FOLDER)
    seeds = arguments.seeds or ([1] if arguments.quick else [1, 2, 3])
    changes = [*arguments.set, *([f"methods={arguments.methods}"] if arguments.methods else [])]
    only = [name for name in arguments.cells.split(",") if name]
    protocol = read_protocol(arguments.protocol, changes, only, arguments.quick)
    if arguments.every < 0:
        raise SettingsError(f"--every {arguments.every}: allowed is 0 or more")
    fill_all(protocol, to_do(protocol, seeds, out, arguments.every), out, folder, arguments.every, console)
    for words in calls(protocol, seeds, out, folder, arguments.set):
        call(words, console)
    for cell in protocol.cells:
        contents = kept(out).get(protocol.name, {}).get(cell.name, {})
        summary = summarise(cell, contents)
        console.print(rendered(summary, cell.weighting))
        for line in share_lines(summary):
            console.print(Text(line))  # options stand in brackets, which are no markup
    page = [write_page(protocol.name, out, command_line(arguments))] if protocol.cells else []
    for path in (*page, *write_overview(out)):
        console.print(f"Written: {path}", highlight=False)


def to_do(protocol: Protocol, seeds: Sequence[int], out: Path, every: int = 0) -> list[tuple[Cell, int, int]]:
    """Return (cell, seed, tests missing) of all that is to run; everything is checked before the first of them.

    Raises
    ------
    SettingsError
        A row or a network to start from does not fit, or what is kept was made with other settings.
    """
    found = []
    for seed in seeds:
        for cell in protocol.cells:
            settings, path = of_seed(cell.settings, seed), cell_path(out, protocol.name, cell.name, seed)
            try:
                check_start(settings)
                check_kept(path, settings)
                on_the_way = missing_points(path, settings, every) if every else []
                found.append((cell, seed, len(missing(path, settings)) + len(on_the_way)))
            except SettingsError as error:
                raise SettingsError(f"{protocol.name}, cell {cell.name}: {error}") from error
    return [one for one in found if one[2]]


def fill_all(
    protocol: Protocol, todo: Sequence[tuple[Cell, int, int]], out: Path, folder: Path, every: int, console: Console
) -> None:
    """Fill all cells that are to run, saying after each test how long the others may take."""
    total, done, start = sum(number for _, _, number in todo), 0, time.perf_counter()
    for cell, seed, _ in todo:
        path = cell_path(out, protocol.name, cell.name, seed)
        rows = fill(path, protocol.name, cell, seed, folder, every > 0)
        on_the_way = fill_curves(path, protocol.name, cell, seed, every, folder) if every else ()
        for name in chain(rows, on_the_way):
            done += 1
            left = (time.perf_counter() - start) / done * (total - done)
            text = f"{done} of {total}: {cell.name}, seed {seed}, {name}; about {left / 60:.0f} min left"
            console.print(text, highlight=False)


def calls(
    protocol: Protocol, seeds: Sequence[int], out: Path, folder: Path, changes: Sequence[str] = ()
) -> list[list[str]]:
    """Return the words of the commands that belong to a protocol, its places filled in."""
    places = {"seeds": seeds_word(seeds), "out": out, "runs": folder, "results": RESULTS}
    more = ["--set", *changes] if changes else []
    words = [[word.format(**places) for word in shlex.split(text)] for text in protocol.calls]
    return [one if one[0] in WITHOUT_SETTINGS else [*one, *more] for one in words]


def call(words: Sequence[str], console: Console) -> None:
    """Run a command of `python -m benchmarks`; RunError if it fails, which it has said itself."""
    from benchmarks.__main__ import main  # which imports this module

    console.print(f"python -m benchmarks {shlex.join(words)}", markup=False, highlight=False)
    if status := main(words):
        raise RunError(f"python -m benchmarks {shlex.join(words)} ended with {status}")


def rendered(summary: Summary, weighting: str = "clients") -> Table:
    """Return the table for a terminal: percent, mean ± sd over seeds, best mean of a column bold, the paper's dim."""
    over = f"mean ± sd (divided by n) over seeds {', '.join(map(str, summary.seeds))}; dim: the paper's"
    grid = Table(title=f"{summary.title}: accuracy in %, mean over {weighting}", caption=over)
    grid.add_column("row", overflow="fold")
    top = best(summary)
    for column in top:
        grid.add_column(Text(column), justify="right")
    for label, row in summary.cells.items():
        texts = []
        for column in top:
            values = row.get(column, ())
            bold = bool(values) and f"{np.mean(values):.2f}" == top[column]
            text = Text(spread(values) if values else "–", style="bold" if bold else "")
            if column in summary.paper.get(label, {}):
                text.append(f" {summary.paper[label][column].mean:.1f}", style="dim")
            texts.append(text)
        grid.add_row(Text(label), *texts)
    return grid


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that makes these results again."""
    words = ["python", "-m", "benchmarks", "run", arguments.protocol]
    if arguments.cells:
        words += ["--cells", arguments.cells]
    if arguments.methods:
        words += ["--methods", arguments.methods]
    if arguments.seeds:
        words += ["--seeds", seeds_word(arguments.seeds)]
    words += ["--every", str(arguments.every)] if arguments.every else []
    words += ["--quick"] if arguments.quick else []
    return shlex.join([*words, *(["--set", *arguments.set] if arguments.set else [])])
