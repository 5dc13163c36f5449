"""The papers' printed numbers: one CSV a paper in `benchmarks/paper`, read once and checked.

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

from settings import Scalar, SettingsError, assignments

FOLDER = Path(__file__).parent / "paper"
FIELDS = ("table", "setting", "row", "method", "column", "unit", "mean", "sd")


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
    for place, line in lines.items():
        if None in line or None in line.values():
            raise ValueError(f"{place}: columns are missing, or there are too many")
        key = tuple(str(line[name]) for name in ("table", "setting", "row", "column"))
        if key in found:
            raise ValueError(f"{place}: {', '.join(key)} occurs twice")
        found[key] = _printed(line, place)
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
    known = {key.replace("_", "-"): value for key, value in setting.items()}
    result: dict[str, Printed] = {}
    for one in printed(paper):
        fits = one.table == table and column in (None, one.column) and known.items() <= one.setting.items()
        if not (fits and one.method):
            continue
        if one.method in result:
            raise ValueError(f"{paper}, table {table}: two numbers of {one.method} fit {column}, {known}")
        result[one.method] = one
    if not result:
        raise Absent(f"{paper}, table {table}: no number fits {column}, {known}")
    return result


def _printed(line: Mapping[str, str], place: str) -> Printed:
    try:
        mean, sd = float(line["mean"]), float(line["sd"]) if line["sd"] else None
        setting = assignments(line["setting"], "setting")
    except (TypeError, ValueError, SettingsError) as error:
        raise ValueError(f"{place}: {error}") from error
    if not (math.isfinite(mean) and (sd is None or sd >= 0)):
        raise ValueError(f"{place}: mean {mean}, sd {sd}; allowed are finite means and sds of 0 or more")
    texts = {name: line[name] for name in ("table", "row", "method", "column", "unit")}
    if empty := [name for name, text in texts.items() if not text and name != "method"]:
        raise ValueError(f"{place}: no {', '.join(empty)}")
    return Printed(setting=setting, mean=mean, sd=sd, **texts)
