"""The report of a run: tables, CSV files and a self-contained page with six plots, generated from its metrics.

`metrics.jsonl` holds the events of a run, one JSON object for each line; everything else is generated from it, by
``python -m server.report results/<run>``.
"""

from server.report.collaboration import Matrix, Outcome, matrix
from server.report.events import WEIGHT_BINS, Evaluation
from server.report.page import build_page, write_report
from server.report.results import METRICS_FILE, Results, read_results
from server.report.scores import METRICS, Cell, Metric, Row, table
from server.report.tables import COLLABORATION_FILE, render_table, render_tables, write_collaboration, write_table

__all__ = [
    "COLLABORATION_FILE",
    "METRICS",
    "METRICS_FILE",
    "WEIGHT_BINS",
    "Cell",
    "Evaluation",
    "Matrix",
    "Metric",
    "Outcome",
    "Results",
    "Row",
    "build_page",
    "matrix",
    "read_results",
    "render_table",
    "render_tables",
    "table",
    "write_collaboration",
    "write_report",
    "write_table",
]
