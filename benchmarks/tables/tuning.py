"""Tuning: hyperparameters chosen on validation data, with the accuracy of every value that was tried."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtta.settings import SettingsError

FILE = Path(__file__).parent.parent / "tuning.toml"


@dataclass(frozen=True)
class Choice:
    """One choice.

    Parameters
    ----------
    where : str
        Protocol and prefix of the names of its cells.
    key, value : str
        The chosen setting or option.
    of : str
        Row, data and rounds that the percentages were measured with.
    percent : mapping
        Every value that was tried, with its accuracy on validation data in percent.
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
