"""A protocol: one TOML file of settings, and the cells of its tables, which change some of them.

dataset = "cifar10"                      # settings of all cells, flat
[paper]                                  # whose numbers stand beside ours
name = "fedthe"
why = "fewer rounds"                     # ... and why they may differ
[cells."dir-1"]                          # one cell: what it changes ...
title = "Dirichlet(1.0)"
alpha = 1.0
paper = { table = "1", alpha = 1.0 }     # ... and which of the paper's numbers are its own
[quick]                                  # --quick: which cells, and what all of them change
cells = ["dir-1"]
rounds = 1
[calls]                                  # commands that run after the cells, with {seeds}, {runs}, {out} and {results}
all = ["fedicon --data digit5 --seeds {seeds}"]
quick = ["fedicon --data digit5 --rounds 1 --seeds {seeds} --folder {runs}/fedicon --out {out}/fedicon"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.papers import Absent, Printed, numbers, papers
from settings import Scalar, Settings, SettingsError, from_config
from settings.parse import convert

PROTOCOLS = Path(__file__).parent / "protocols"
TABLES = ("cells", "paper", "quick", "calls")
#: What a cell says beside settings.
ABOUT = ("title", "paper", "weighting")
MAIN = "main"  # the only cell of a protocol that names none

#: What a place in a paper says beside the setting that tells blocks of a table apart.
PLACE = ("name", "table", "column", "why")
WEIGHTINGS = ("clients", "samples")

#: Settings that say where a run computes, not what.
WHERE_KEYS = ("device", "engine", "workers", "stacked-clients", "num-gpus", "results", "run-name", "state-dir")


@dataclass(frozen=True)
class Reference:
    """Where a paper's numbers of a cell stand: a table, and the part of it with this setting.

    `only` is the paper's column for a cell whose one test distribution has no name there; `why` says why ours may
    differ.
    """

    paper: str
    table: str
    setting: Mapping[str, Scalar] = field(default_factory=dict, hash=False)
    only: str = ""
    why: str = ""

    def column(self, name: str) -> dict[str, Printed]:
        """Return row → the paper's number in one column; nothing where it has no such column."""
        try:
            return numbers(self.paper, self.table, self.only or name, **self.setting)
        except Absent:
            return {}


@dataclass(frozen=True)
class Cell:
    """One place of a protocol's tables: settings with all rows in `methods`, and the paper's numbers for it.

    `weighting` says whether a mean counts every client the same (FedTHE, BTFL) or every sample (ATP).
    """

    name: str
    title: str
    settings: Settings
    reference: Reference | None = None
    weighting: str = "clients"


@dataclass(frozen=True)
class Protocol:
    """A protocol's name, what its file says of it, its cells in the order of the file, and commands beside them."""

    name: str
    about: str
    cells: tuple[Cell, ...]
    calls: tuple[str, ...] = ()


def load_protocol(name: str, changes: Sequence[str] = ()) -> Settings:
    """Return the settings that all cells of `protocols/<name>.toml` share, with changes of the form key=value.

    Raises
    ------
    SettingsError
        An unknown protocol (the known ones are listed), key or value.
    """
    return changed(_read(name)[0], changes)


def read_protocol(name: str, changes: Sequence[str] = (), only: Sequence[str] = (), quick: bool = False) -> Protocol:
    """Read a protocol with its cells, or `only` some of them, by name.

    Parameters
    ----------
    changes : sequence of str
        "key=value", which win over the file in every cell; {seed} in `init` stands for the seed.
    quick : bool
        The small version that the file has for looking whether all of it runs.

    Raises
    ------
    SettingsError
        An unknown protocol, cell, key or value, or a paper's table that is not there; file and place are named.
    """
    flat, tables = _read(name)
    calls = tables.get("calls", {})
    known: Mapping[str, Mapping[str, Any]] = tables.get("cells", {} if calls else {MAIN: {}})
    if wrong := [cell for cell in (*known, *only) if cell not in known or not re.fullmatch(r"[a-z0-9.-]+", cell)]:
        raise SettingsError(f"{name}: cell {wrong[0]!r}; there are: {', '.join(known)}")
    small = tables.get("quick", {}) if quick else {}
    wanted = only or small.get("cells") or list(known)
    config = {key: value for key, value in small.items() if key != "cells"}
    paper = tables.get("paper", {})
    return Protocol(
        name,
        description(name),
        tuple(_cell(name, cell, flat, paper, known[cell], config, changes) for cell in known if cell in wanted),
        () if only else tuple(calls.get("quick" if quick else "all", ())),
    )


def _cell(
    protocol: str,
    name: str,
    flat: Mapping[str, Any],
    paper: Mapping[str, Any],
    about: Mapping[str, Any],
    small: Mapping[str, Any],
    changes: Sequence[str],
) -> Cell:
    """Return a cell: the file's settings, what the cell changes, what --quick changes, what the user changes."""
    where = f"{protocol}, cell {name}"
    own = {key: value for key, value in about.items() if key not in ABOUT}
    try:
        settings = changed({**flat, **own, **small}, changes)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error
    place = {**paper, **about.get("paper", {})}
    reference = None
    if "table" in place:
        if place.get("name") not in papers():
            raise SettingsError(f"{where}: paper {place.get('name')!r}; there are: {', '.join(papers())}")
        setting = {key: value for key, value in place.items() if key not in PLACE}
        more = [str(place.get(key, "")) for key in ("column", "why")]
        reference = Reference(str(place["name"]), str(place["table"]), setting, *more)
    title = str(about.get("title", protocol if name == MAIN else name))
    weighting = str(about.get("weighting", "clients"))
    if weighting not in WEIGHTINGS:
        raise SettingsError(f"{where}: weighting = {weighting!r}; allowed are {', '.join(WEIGHTINGS)}")
    return Cell(name, title, settings, reference, weighting)


def protocol_path(name: str) -> Path:
    """Return the file of a protocol; SettingsError lists the known ones."""
    path = PROTOCOLS / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in PROTOCOLS.glob("*.toml")))
        raise SettingsError(f"unknown protocol {name!r}; there are: {known}")
    return path


def description(name: str) -> str:
    """Return the comment at the top of a protocol's file."""
    match = re.match(r"(?:#.*\n)+", protocol_path(name).read_text())
    return re.sub(r"^# ?", "", match[0], flags=re.MULTILINE).strip() if match else ""


def changed(config: Mapping[str, Any], changes: Sequence[str]) -> Settings:
    """Return settings from a flat mapping with changes of the form key=value applied, the last one winning.

    Raises
    ------
    SettingsError
        A change is of another form, or a key or value is not allowed.
    """
    found = dict(config)
    for change in changes:
        key, equals, word = change.partition("=")
        if not equals:
            raise SettingsError(f"--set {change!r}: allowed is key=value")
        found[key] = convert(key, word)
    return from_config(found)


def of_seed(settings: Settings, seed: int) -> Settings:
    """Return the settings of one seed; {seed} in `init` stands for it."""
    return settings.replace(seed=seed, init=settings.init.replace("{seed}", str(seed)))


def _read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's settings and its tables; SettingsError names a table or a key of it that is none."""
    path = protocol_path(name)
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from error
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    if wrong := [key for key in tables if key not in TABLES]:
        raise SettingsError(f"{path}: table [{wrong[0]}]; allowed are {', '.join(TABLES)}")
    return {key: value for key, value in content.items() if key not in tables}, tables
