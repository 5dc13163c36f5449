"""The report: a run folder's metrics become a table, a page of plots and a CSV file.

Results are data. `metrics.jsonl` holds what happened, one JSON object a line, and everything else in this
room is generated from it and can be generated again: ``python -m server.report results/<run>``.
The page is one file: no script, no font, no image comes from anywhere else.
"""

from server.report.events import WEIGHT_BINS, Clients, End, Evaluation, Incident, LeakCheck, Round, RunInfo
from server.report.page import write_report
from server.report.results import METRICS_FILE, Results, read_results
from server.report.tables import Cell, Row, render_table, table, write_table

__all__ = [
    "METRICS_FILE",
    "WEIGHT_BINS",
    "Cell",
    "Clients",
    "End",
    "Evaluation",
    "Incident",
    "LeakCheck",
    "Results",
    "Round",
    "Row",
    "RunInfo",
    "read_results",
    "render_table",
    "table",
    "write_report",
    "write_table",
]
