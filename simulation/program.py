"""What the programs that run a federation on this machine share: they end cleanly on a signal and show a run's results.

A program imports this before it has refused bad settings, which needs neither torch nor Flower.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal is closed, or its connection lost


def unwind_on_signals() -> None:
    """From now on, end by an exception on `ENDING`, so that everything is stopped on the way.

    A hang-up that the caller has the process ignore (`nohup`) stays ignored.
    """
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _unwind)


def _unwind(number: int, frame: object) -> None:
    """Exit by an exception, and ignore further signals meanwhile."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the terminal is gone
        print("interrupted; stopping all processes", file=sys.stderr)
    sys.exit(128 + number)


def show_results(folder: Path, *more: Table) -> None:
    """Print the tables of a run, then others, and where its files are."""
    from fedtta.server.report import METRICS_FILE, read_results, render_tables  # imports Flower

    console = Console()
    for table in [*render_tables(read_results(folder / METRICS_FILE)), *more]:
        console.print(table)
    text = f"Results: {folder}/ (open {folder}/report.html)"
    console.print(text, soft_wrap=True, markup=False, highlight=False)  # a path is copied, and may have brackets
