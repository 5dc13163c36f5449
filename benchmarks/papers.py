"""The papers' printed numbers, one CSV per paper in `benchmarks/paper`, and references to them.

Columns: table (its number in the paper), setting (`key=value;...`, our settings' names where there are such), row (the
paper's name), method (our row, empty where there is none), column, unit, mean and sd as printed; FedICON calls its sd a
standard error. Where a paper contradicts itself, the file has what is printed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedtta.settings import Scalar, SettingsError, assignments

FOLDER = Path(__file__).parent / "paper"
FIELDS = ("table", "setting", "row", "method", "column", "unit", "mean", "sd")
AVERAGE = "average"
#: Keys of a `paper` entry of a protocol that are no settings.
KEYS = ("name", "table", "column", "why", "baseline-table")
#: Methods that the papers propose; all others are baselines.
PROPOSED = ("fedthe", "fedthe_plus", "btfl", "atp", "bbn", "fedicon", "fedicon_us")
#: Settings in which the rows of one experiment of a paper differ.
OF_ROWS = ("collaborations", "rates-learned-on")
#: Separates a method from its collaboration in the label of a row.
WITH = " @ "


class Absent(ValueError):
    """A paper has no such number."""


@dataclass(frozen=True)
class Printed:
    """One printed number: `mean`, and `sd` where the paper has one, in `unit`."""

    table: str
    setting: Mapping[str, Scalar] = field(hash=False)
    row: str
    method: str
    column: str
    unit: str
    mean: float
    sd: float | None

    def comparable(self, other: Printed) -> bool:
        """Tell whether another number of the paper is of the same experiment: what both settings state is equal."""
        both = (self.setting.keys() & other.setting.keys()) - set(OF_ROWS)
        return all(self.setting[name] == other.setting[name] for name in both)


@cache
def printed(paper: str) -> tuple[Printed, ...]:
    """Return every number of a paper, e.g. of "fedthe".

    Raises
    ------
    ValueError
        There is no such file, or a line of it is not a number with its place (file and line are named), or a place
        occurs twice.
    """
    path = FOLDER / f"{paper}.csv"
    if not path.exists():
        raise ValueError(f"no numbers of {paper!r}; there are: {', '.join(papers())}")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(f"{path}: columns {reader.fieldnames}; allowed are {', '.join(FIELDS)}")
        lines = {f"{path}, line {reader.line_num}": line for line in reader}
    found: dict[tuple[str, ...], Printed] = {}
    for position, line in lines.items():
        if None in line or None in line.values():
            raise ValueError(f"{position}: columns are missing, or there are too many")
        key = tuple(str(line[name]) for name in ("table", "setting", "row", "column"))
        if key in found:
            raise ValueError(f"{position}: {', '.join(key)} occurs twice")
        found[key] = _printed(line, position)
    return tuple(found.values())


def papers() -> list[str]:
    """Return the papers whose numbers are there."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def values(paper: str, table: str, column: str | None = None, **setting: Scalar) -> dict[str, float]:
    """Return method → mean of one table; see `numbers`."""
    return {method: one.mean for method, one in numbers(paper, table, column, **setting).items()}


def numbers(paper: str, table: str, column: str | None = None, **setting: Scalar) -> dict[str, Printed]:
    """Return method → number of one table, in the paper's order, without rows that are not ours.

    Parameters
    ----------
    paper, table : str
    column : str, optional
        One column; the default is the only one of the table.
    setting
        Parts of the setting (underscores for hyphens) that tell blocks of a table apart.

    Raises
    ------
    Absent
        Nothing fits.
    ValueError
        Two numbers fit: more of the setting is needed.
    """
    conditions = {key.replace("_", "-"): value for key, value in setting.items()}
    result: dict[str, Printed] = {}
    for one in printed(paper):
        fits = one.table == table and column in (None, one.column) and conditions.items() <= one.setting.items()
        if not (fits and one.method):
            continue
        if one.method in result:
            raise ValueError(f"{paper}, table {table}: two numbers of {one.method} fit {column}, {conditions}")
        result[one.method] = one
    if not result:
        raise Absent(f"{paper}, table {table}: no number fits {column}, {conditions}")
    return result


def _printed(line: Mapping[str, str], position: str) -> Printed:
    try:
        mean, sd = float(line["mean"]), float(line["sd"]) if line["sd"] else None
        setting = assignments(line["setting"], "setting")
    except (TypeError, ValueError, SettingsError) as error:
        raise ValueError(f"{position}: {error}") from error
    if not (math.isfinite(mean) and (sd is None or sd >= 0)):
        raise ValueError(f"{position}: mean {mean}, sd {sd}; allowed are finite means and sds of 0 or more")
    texts = {name: line[name] for name in ("table", "row", "method", "column", "unit")}
    if empty := [name for name, text in texts.items() if not text and name != "method"]:
        raise ValueError(f"{position}: no {', '.join(empty)}")
    return Printed(setting=setting, mean=mean, sd=sd, **texts)


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
