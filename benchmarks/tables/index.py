"""`list`: the protocols with their cells and the seeds that are kept."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.tables.protocol_file import protocol_names, read_protocol
from fedtta.benchmarks.tables.results import read_results_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `list`."""
    parser.add_argument("protocol", nargs="?", default="", metavar="PROTOCOL", help="only this one, with its cells")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of kept results (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Print the protocols, or the cells of one."""
    kept = read_results_of(arguments.out)
    if arguments.protocol:
        protocol = read_protocol(arguments.protocol)
        console.print(Text(protocol.about.replace("\n", " ")))
        grid = _grid("cell", "title", "kept seeds")
        for cell in protocol.cells:
            seeds = sorted(kept.get(protocol.name, {}).get(cell.name, {}))
            grid.add_row(cell.name, Text(cell.title), ", ".join(map(str, seeds)))
    else:
        grid = _grid("protocol", "about", "cells", "kept")
        for name in protocol_names():
            protocol = read_protocol(name)
            number = len({cell.name for cell in protocol.cells} & kept.get(name, {}).keys())
            grid.add_row(name, _first_sentence(protocol.about), str(len(protocol.cells)), str(number))
    console.print(grid)


def _first_sentence(text: str) -> Text:
    return Text(re.split(r"\.\s+(?=[A-Z`])", text)[0].replace("\n", " "))


def _grid(*columns: str) -> Table:
    grid = Table()
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid
