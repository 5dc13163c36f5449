"""Hyperparameters that were chosen, not taken from a paper: every value tried, and what it gave on validation data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import SettingsError

FILE = Path(__file__).parent / "chosen.toml"


@dataclass(frozen=True)
class Choice:
    """One choice.

    Parameters
    ----------
    where : str
        The benchmark, as on its command line.
    key, value : str
        What was chosen.
    of : str
        What the percentages are of: row, data and rounds.
    percent : mapping
        Every value that was tried, with the share of right answers on validation data in percent.
    """

    where: str
    key: str
    value: str
    of: str
    percent: Mapping[str, float]


def choices(path: Path = FILE) -> list[Choice]:
    """Return all choices.

    Raises
    ------
    SettingsError
        A choice lacks something, has something else besides, or another value was better than the chosen one.
    """
    return [_choice(entry, path) for entry in tomllib.loads(path.read_text())["choice"]]


def _choice(entry: Mapping[str, Any], path: Path) -> Choice:
    if entry.keys() != (keys := {"where", "key", "value", "of", "percent"}):
        raise SettingsError(f"{path}: {sorted(entry)}; allowed are {', '.join(sorted(keys))}")
    made = Choice(entry["where"], entry["key"], str(entry["value"]), entry["of"], entry["percent"])
    if made.percent.get(made.value) != max(made.percent.values()):
        raise SettingsError(
            f"{path}: {made.key} = {made.value}: allowed is the value with the highest of {made.percent}"
        )
    return made


def markdown(found: Sequence[Choice]) -> str:
    """Return a section with a line a choice."""
    lines = [
        f"| `{one.where}` | `{one.key} = {one.value}` | "
        f"{', '.join(f'{value}: {percent:.1f} %' for value, percent in one.percent.items())} | {one.of} |"
        for one in found
    ]
    head = ["| benchmark | chosen | tried | right answers of |", "| --- | --- | --- | --- |"]
    words = (
        "By right answers on validation pictures. FedICON's temperature and views on Digit-5, and Office-10's views, "
        "were chosen on validation pictures, too, before this record was kept."
    )
    return "\n".join(["## Chosen on validation data", "", words, "", *head, *lines, ""])
