"""``python -m server.report RUN_DIR``: write table.csv and report.html of a run folder again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from server.report.page import write_report
from server.report.results import METRICS_FILE, read_results
from server.report.tables import TABLE_FILE, render_table, write_table


def main(arguments: list[str] | None = None) -> int:
    """Regenerate both files of one run folder; 0 when they are written, 2 when the metrics cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m server.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help=f"a run folder, with its {METRICS_FILE}")
    run_dir: Path = parser.parse_args(arguments).run_dir
    try:
        results = read_results(run_dir / METRICS_FILE)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(render_table(results))
    table_path = write_table(results, run_dir / TABLE_FILE)
    report_path = write_report(run_dir)
    console.print(f"wrote {table_path} and {report_path}", soft_wrap=True, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
