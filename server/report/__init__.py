"""The report of a run: tables, CSV files and a self-contained page with six plots, generated from its metrics.

`metrics.jsonl` holds the events of a run, one JSON object for each line; everything else is generated from it, by
``python -m fedtta.server.report results/<run>``.
"""

from fedtta.server.report.collaboration import Matrix, Outcome, matrix
from fedtta.server.report.events import WEIGHT_BINS, Evaluation
from fedtta.server.report.journal import METRICS_FILE
from fedtta.server.report.results import Results, read_results
from fedtta.server.report.scores import METRICS, Cell, Metric, Row, table
from fedtta.server.report.tables import (
    COLLABORATION_FILE,
    render_table,
    render_tables,
    write_collaboration,
    write_table,
)

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
    "matrix",
    "read_results",
    "render_table",
    "render_tables",
    "table",
    "write_collaboration",
    "write_table",
]
