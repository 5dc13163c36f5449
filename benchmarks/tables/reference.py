"""References: where a paper prints the numbers that a cell is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.papers import Absent, Printed, numbers
from settings import Scalar

AVERAGE = "average"
#: Keys of a `paper` entry that are no settings.
KEYS = ("name", "table", "column", "why", "baseline-table")
#: Separates a method from its collaboration in the label of a row.
WITH = " @ "


@dataclass(frozen=True)
class Reference:
    """A table of a paper, and the part of it with this setting.

    Parameters
    ----------
    column : str
        The paper's column for a cell with one test distribution that the paper names differently.
    why : str
        Why our numbers may differ.
    baseline_table : str
        Table that holds the row over which gains are computed; empty: the same table.
    """

    paper: str
    table: str
    setting: Mapping[str, Scalar] = field(default_factory=dict, hash=False)
    column: str = ""
    why: str = ""
    baseline_table: str = ""

    def number(self, label: str, column: str) -> Printed | None:
        """Return the paper's number of a row in a column; None where there is none.

        A label such as "bbn @ pfedbbn[share=all]" is a method under a collaboration, a setting in the paper's table.
        """
        method, _, collaboration = label.partition(WITH)
        setting = dict(self.setting)
        if collaboration or "stream-mix" in setting or "stream-concentration" in setting:
            setting["collaborations"] = collaboration.partition("[")[0] or "none"
            method = method.partition("[")[0]
        return self._find(self.table, method, column, setting)

    def baseline(self, label: str, column: str) -> Printed | None:
        """Return the paper's number of the baseline row."""
        if not self.baseline_table:
            return self.number(label, column)
        return self._find(self.baseline_table, label, column, {})

    def _find(self, table: str, method: str, column: str, setting: Mapping[str, Scalar]) -> Printed | None:
        if self.column and column == AVERAGE:
            return None
        try:
            return numbers(self.paper, table, self.column or column, **setting).get(method)
        except Absent:
            return None


def read_reference(entry: Mapping[str, Any]) -> Reference:
    """Return the reference that a `paper` entry of a protocol describes."""
    setting = {key: value for key, value in entry.items() if key not in KEYS}
    more = (str(entry.get(key, "")) for key in ("column", "why", "baseline-table"))
    return Reference(str(entry["name"]), str(entry["table"]), setting, *more)
