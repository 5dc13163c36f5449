"""`python -m fedtta.simulation`: one run from settings on the command line, results and a table."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from fedtta.settings import SettingsError, add_arguments, from_arguments


def main() -> int:
    """Parse, run, print the table; exit status 0 on success, 1 when the run failed, 2 for bad settings."""
    parser = argparse.ArgumentParser(prog="python -m fedtta.simulation", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args()
    console = Console()
    try:
        settings = from_arguments(arguments)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from fedtta.server.events import RunError  # imports torch and Flower, which refusing a setting does not need
    from fedtta.server.report import METRICS_FILE, read_results, render_tables
    from fedtta.simulation.engine import simulate

    try:
        folder = simulate(settings)
    except (SettingsError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"run failed: {error}", file=sys.stderr)
        return 1
    for table in render_tables(read_results(folder / METRICS_FILE)):
        console.print(table)
    console.print(f"Results: {folder}/ (open {folder}/report.html)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
