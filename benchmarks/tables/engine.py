"""`run`: run the cells of a protocol over several seeds, keep their results and print the tables.

Kept rows are not run again, and an interrupted run is resumed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fedtta.benchmarks.provenance import RESULTS, write_json
from fedtta.benchmarks.tables.comparison import Comparison, compare, entry_text
from fedtta.benchmarks.tables.networks import check_start, initial_settings, load_federation, of_seed
from fedtta.benchmarks.tables.protocol import Cell, Protocol, select_cells
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.benchmarks.tables.realtime import measure_cell
from fedtta.benchmarks.tables.results import (
    CONSTANT,
    Content,
    add_run,
    cell_path,
    check_alike,
    check_kept,
    constant_row,
    empty,
    missing,
    read_cell,
    read_results_of,
    row_content,
)
from fedtta.benchmarks.tables.runs import evaluated
from fedtta.client.adaptation import divided_streams
from fedtta.server.methods import Training, plan
from fedtta.settings import Settings, SettingsError

FOLDER = Path("results/benchmarks")
QUICK = Path("results/quick")


@dataclass(frozen=True)
class Job:
    """The missing runs of one cell and seed, and the file that keeps their results."""

    protocol: Protocol
    cell: Cell
    seed: int
    path: Path
    runs: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("protocol", metavar="PROTOCOL", help="name of a protocol, see `list`")
    parser.add_argument("--cells", default="", metavar="NAME,NAME", help="only these cells (default: all)")
    parser.add_argument("--methods", help="rows instead of the protocol's; kept rows stay")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--seeds", type=seeds_of, metavar="N", help="how many, or which: 3, 2,3 or 2-3 (default: 3)")
    parser.add_argument("--every", type=int, default=0, metavar="N", help="also test every N training rounds")
    parser.add_argument("--quick", action="store_true", help=f"the protocol's small version, one seed, in {QUICK}")
    parser.add_argument("--folder", type=Path, help=f"of run folders and cached trainings (default: {FOLDER})")
    parser.add_argument("--out", type=Path, help="of kept results (default: benchmarks/results)")


def seeds_of(text: str) -> list[int]:
    """Return the seeds that a word names: "3" is 1, 2, 3; "2,5" and "2-4" list them.

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
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are a number of seeds (3), or a list (2,5 or 2-4)")
    return found


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing and print the tables of the selected cells.

    Raises
    ------
    SettingsError, RunError
        As `read_protocol`, `jobs` and `fill`.
    """
    out = arguments.out or (QUICK if arguments.quick else RESULTS)
    folder = arguments.folder or (QUICK / "runs" if arguments.quick else FOLDER)
    seeds = arguments.seeds or ([1] if arguments.quick else [1, 2, 3])
    changes = [*arguments.set, *([f"methods={arguments.methods}"] if arguments.methods else [])]
    if arguments.every < 0:
        raise SettingsError(f"--every {arguments.every}: allowed is 0 or more")
    protocol = read_protocol(arguments.protocol, changes, arguments.quick)
    cells = select_cells(protocol, [name for name in arguments.cells.split(",") if name])
    run_jobs(jobs(protocol, cells, seeds, out, arguments.every), out, folder, arguments.every, console)
    kept = read_results_of(out, protocol.name).get(protocol.name, {})
    for table in protocol.tables:
        if any(cell in cells for cell in table.cells):
            console.print(rendered(compare(table, kept), table.cells[0].weighting))


def jobs(protocol: Protocol, cells: Sequence[Cell], seeds: Sequence[int], out: Path, every: int = 0) -> list[Job]:
    """Return all that is missing, checked before anything runs.

    Raises
    ------
    SettingsError
        A row or an initial network does not fit, or kept results were made with other settings.
    """
    found = []
    for seed in seeds:
        for cell in cells:
            settings, path = of_seed(cell.settings, seed), cell_path(out, protocol.name, cell.name, seed)
            try:
                check_kept(path, settings)
                runs = len(missing(path, settings)) + (len(missing_points(path, settings, every)) if every else 0)
                if runs:
                    check_start(protocol, cell, seed, out)
                    found.append(Job(protocol, cell, seed, path, 1 if cell.realtime else runs))
            except SettingsError as error:
                raise SettingsError(f"{protocol.name}, cell {cell.name}: {error}") from error
    return found


def run_jobs(todo: Sequence[Job], out: Path, folder: Path, every: int, console: Console) -> None:
    """Run all jobs; after each run print an estimate of the remaining time."""
    total, done, start = sum(job.runs for job in todo), 0, time.perf_counter()
    for job in todo:
        for name in fill(job, out, folder, every, console):
            done += 1
            left = (time.perf_counter() - start) / done * (total - done)
            text = f"{done} of {total}: {job.cell.name}, seed {job.seed}, {name}; about {left / 60:.0f} min left"
            console.print(text, highlight=False)


def fill(job: Job, out: Path, folder: Path, every: int, console: Console) -> Iterator[str]:
    """Run the missing rows, one training at a time; write the file after each run and yield the run's name.

    Raises
    ------
    SettingsError, RunError
        As `initial_settings` and `evaluated`.
    """
    settings, start = initial_settings(job.protocol, job.cell, job.seed, out, folder, console)
    check_kept(job.path, settings, start)
    if job.cell.realtime is not None:
        content = _content(job, settings) | measure_cell(settings, job.cell.realtime, console)
        content["start"] = start
        write_json(job.path, content)
        yield "real time"
        return
    cell_folder = folder / job.protocol.name / f"{job.cell.name}-{job.seed}"
    for training, own in missing(job.path, settings):
        name = f"{training.name}-{_plain(own.collaborations)}" if own.collaborations else training.name
        results = evaluated(own, folder / "trainings", cell_folder / name, of=own if every else None)
        content = _content(job, settings)  # only now: another process may have added rows meanwhile
        add_run(content, results, job.cell, own, training.name, start)
        if settings.collaborations:
            content["rows"][CONSTANT] = constant_row(divided_streams(settings, load_federation(settings)).counts)
        write_json(job.path, content)
        yield name
    if every:
        yield from fill_curves(job, settings, every, cell_folder, folder)


def _content(job: Job, settings: Settings) -> Content:
    """Return what is kept of a cell and seed so far."""
    return read_cell(job.path) if job.path.exists() else empty(job.protocol.name, job.cell, settings)


def missing_points(path: Path, settings: Settings, every: int) -> list[tuple[int, Training, list[str]]]:
    """Return (round, training, rows) of all tests at intermediate rounds that a cell's file lacks.

    A run of fewer rounds is the beginning of a longer one, so each test starts from a checkpoint of the cached
    training (FedTHE, Figures 8 to 13).

    Raises
    ------
    SettingsError
        A training has several stages: its beginning is not a shorter training. Or as `check_alike`.
    """
    content = read_cell(path) if path.exists() else {}
    kept, found = content.get("curves", {}), []
    for training in plan(settings):
        if len(training.recipe.stages) > 1:
            raise SettingsError(f"--every {every}: allowed for trainings of one stage; {training.name} has several")
        for round in range(every, settings.rounds, every):
            labels = [row.label for row in training.rows if str(round) not in kept.get(row.label, {})]
            if labels:
                found.append((round, training, labels))
    if found:
        check_alike(path, content, settings)
    return found


def fill_curves(job: Job, settings: Settings, every: int, cell_folder: Path, folder: Path) -> Iterator[str]:
    """Run the tests at intermediate rounds; write the file after each and yield its name."""
    for round, training, labels in missing_points(job.path, settings, every):
        short = settings.replace(rounds=round, methods=",".join(labels))
        results = evaluated(short, folder / "trainings", cell_folder / f"{training.name}-{round}", of=settings)
        content = read_cell(job.path)
        curves = content.setdefault("curves", {})
        for label in labels:
            shifts = row_content(results.evaluations, label, training.name, job.cell.columns)["shifts"]
            means = {shift: one["accuracy_percent"] for shift, one in shifts.items()}
            points = {**curves.get(label, {}), str(round): means}
            curves[label] = dict(sorted(points.items(), key=lambda point: int(point[0])))
        write_json(job.path, content)
        yield f"{training.name} after round {round}"


def rendered(table: Comparison, weighting: str = "clients") -> Grid:
    """Return the table for a terminal; the best mean of a column is bold, the paper's number is behind the bar."""
    over = f"mean ± sd (divided by n) over seeds {', '.join(map(str, table.seeds))}; behind the bar the paper's"
    grid = Grid(title=f"{table.title}: in %, mean over {weighting}", caption=over)
    grid.add_column("row", overflow="fold")
    for column in table.columns:
        grid.add_column(Text(column), justify="right")
    for label in table.values:
        entries = [entry_text(table, label, column) for column in table.columns]
        grid.add_row(Text(label), *(Text(text, style="bold" if best else "") for text, best in entries))
    return grid


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in text)
