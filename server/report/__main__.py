"""``python -m fedtta.server.report RUN_DIR``: write `table.csv` and `report.html` of a run folder again.

A run with collaborative rounds at test time also gets `collaboration.csv`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fedtta.server.report.collaboration import matrix
from fedtta.server.report.drawing import standalone, to_png
from fedtta.server.report.journal import METRICS_FILE
from fedtta.server.report.page import write_report
from fedtta.server.report.plots import plots
from fedtta.server.report.results import Results, read_results
from fedtta.server.report.tables import COLLABORATION_FILE, TABLE_FILE, render_tables, write_table
from fedtta.settings.files import write_atomically

PLOTS_FOLDER = "plots"


def main(arguments: list[str] | None = None) -> int:
    """Regenerate the files of one run folder. Return 0, or 2 if a file cannot be read or written."""
    parser = argparse.ArgumentParser(prog="fedtta report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help=f"a run folder with {METRICS_FILE}")
    parser.add_argument("--plots", action="store_true", help=f"also write each plot to {PLOTS_FOLDER}/ as SVG and PNG")
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir
    try:
        results = read_results(run_dir / METRICS_FILE)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    for rendered in render_tables(results):
        console.print(rendered)
    try:
        written = [write_table(results, run_dir / TABLE_FILE), write_report(run_dir)]
        if matrix(results) is not None:
            written.append(run_dir / COLLABORATION_FILE)
        if options.plots:
            written += write_plots(results, run_dir / PLOTS_FOLDER)
    except OSError as error:  # such as a folder of another user
        print(f"error: {error}", file=sys.stderr)
        return 2
    paths = ", ".join(str(path) for path in written)
    console.print(f"wrote {paths}", soft_wrap=True, markup=False, highlight=False)
    return 0


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Write each plot as `<name>.svg`, which follows the reader's theme, and `<name>.png`; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots(results):
        paths.append(write_atomically(folder / f"{plot.name}.svg", standalone(plot).encode()))
        paths.append(write_atomically(folder / f"{plot.name}.png", to_png(plot)))
    return paths


if __name__ == "__main__":
    sys.exit(main())
