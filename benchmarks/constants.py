"""Constants of every method: what the paper says, what published code does, what is the default here, and why.

`benchmarks/constants.csv` has one constant a line. Its columns: method (an adapter, training, aggregation or
collaboration), constant, paper, code ("–": not told, or not known to us), place, ours, why. A default is not typed:
`place` says where it is, and it is read from there.

- `option:<adapter>.<option>`: an option of an adapter
- `setting:<key>`: a setting of a run
- `default:<module>:<class>.<argument>`: the default of an argument
- `constant:<module>:<name>`: a name of a module, or an attribute of one

`ours` has words where there is no such place, or where the default there is None: it follows from something else.
"""

from __future__ import annotations

import csv
import importlib
import inspect
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedtta.settings import Settings
from fedtta.tta.registry import info

FILE = Path(__file__).parent / "constants.csv"


@dataclass(frozen=True)
class Constant:
    """A line of the file; see the module."""

    method: str
    constant: str
    paper: str
    code: str
    place: str
    ours: str
    why: str

    @property
    def at(self) -> str:
        """What a run sets it by, `fedthe[beta]` or `rounds`, or the name of the default; empty without a place."""
        kind, _, name = self.place.rpartition(":")
        return f"{name.replace('.', '[')}]" if kind == "option" else name

    @property
    def default(self) -> str:
        """What we take by default, as text: the value at `place`, or `ours` in words."""
        value = default_at(self.place) if self.place else None
        return self.ours if value is None else _text(value)


def constants(path: Path = FILE) -> tuple[Constant, ...]:
    """Return every constant, in the file's order.

    Raises
    ------
    ValueError
        A line has other columns, says nothing somewhere, occurs twice, names a place that there is not, or has words
        for what is read from its place; file and line are named.
    """
    names = [field.name for field in fields(Constant)]
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != names:
            raise ValueError(f"{path}: columns {reader.fieldnames}; allowed are {', '.join(names)}")
        lines = [(f"{path}, line {reader.line_num}", line) for line in reader]
    found: dict[tuple[str, str], Constant] = {}
    for position, line in lines:
        if None in line or None in line.values():
            raise ValueError(f"{position}: columns are missing, or there are too many")
        one = Constant(**line)
        if empty := [name for name in names if name not in ("place", "ours") and not line[name]]:
            raise ValueError(f"{position}: no {', '.join(empty)}")
        if (one.method, one.constant) in found:
            raise ValueError(f"{position}: {one.method}, {one.constant} occurs twice")
        try:
            derived = one.place and default_at(one.place) is not None
        except (ValueError, KeyError, AttributeError, ImportError) as error:
            raise ValueError(f"{position}: place {one.place!r}: {error}") from error
        if bool(derived) == bool(one.ours):
            raise ValueError(f"{position}: ours = {one.ours!r}; words are for what cannot be read from a place")
        found[one.method, one.constant] = one
    return tuple(found.values())


def default_at(place: str) -> Any:
    """Return the default at a place, such as 0.3 at "option:fedthe.beta".

    Raises
    ------
    ValueError, KeyError, AttributeError, ImportError
        There is no such place.
    """
    kind, _, rest = place.partition(":")
    if kind == "setting":
        return Settings().flat()[rest]
    if kind == "option":
        adapter, _, option = rest.partition(".")
        return info(adapter).options[option][1]
    module, _, name = rest.partition(":")
    if kind == "constant":
        return attrgetter(name)(importlib.import_module(module))
    if kind == "default":
        owner, _, argument = name.rpartition(".")
        default = inspect.signature(attrgetter(owner)(importlib.import_module(module))).parameters[argument].default
        if default is inspect.Parameter.empty:
            raise ValueError("the argument has no default")
        return default
    raise ValueError(f"unknown kind {kind!r}; there are: option, setting, default, constant")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
