"""Protocol files: one TOML file holds the settings, networks, cells and tables of a paper's experiments.

dataset = "cifar10"                      # settings of all cells
[paper]                                  # whose numbers are compared with ours ...
name = "fedthe"
why = "fewer rounds"                     # ... and why they may differ
[networks.central]                       # a trained network that cells start from
train = "central"                        # federated (default), central or source; see `tables.training`
epochs = 15                              # a source model goes on from an earlier one that `from` names, if it does
[cells."dir-{alpha}"]                    # a cell: changed settings; with `each` one cell per combination of values
each = { alpha = [0.1, 1.0] }
title = "Dirichlet({alpha})"
alpha = "{alpha}"
from = "central"                         # the network, and optionally the cell whose learned rates it starts from:
#                                          from = { network = "central", rates = "other-cell" }
paper = { table = "1", alpha = "{alpha}" }
table = "both"                           # cells of one table share its rows, ...
column = "{alpha}"                       # ... and a cell with a single test distribution is one column
[tables.both]
title = "Both degrees of heterogeneity"
baseline = "fedavg"                      # gains over this row are shown
against = ["fedavg", "fixed_mix"]        # paired differences to these rows, and to the best baseline (the default)
[quick]                                  # --quick: which cells, and what all of them change
cells = ["dir-0.1"]
rounds = 1
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtta.benchmarks.papers import papers, read_reference
from fedtta.benchmarks.tables.protocol import AGAINST, Cell, Network, Protocol, Realtime, Start, Table
from fedtta.settings import Settings, SettingsError, from_config
from fedtta.settings.parse import convert

PROTOCOLS = Path(__file__).parent.parent / "protocols"
SECTIONS = ("cells", "networks", "tables", "paper", "quick")
MAIN = "main"  # the only cell of a protocol that names none
WEIGHTINGS = ("clients", "samples")
TRAININGS = ("federated", "central", "source")
#: Settings of a source model unless its section changes them: the common recipe for CIFAR.
SOURCE: dict[str, Any] = {
    "batch-size": 128, "learning-rate": 0.1, "momentum": 0.9, "weight-decay": 5e-4, "autocast": True,
}  # fmt: skip
#: Key → types of its values.
Types = Mapping[str, tuple[type, ...]]
#: Keys of a section that are not settings, with the types of their values.
CELL_KEYS: Types = {
    "title": (str,), "paper": (dict, list), "weighting": (str,), "from": (str, dict), "table": (str,), "column": (str,),
    "columns": (list,), "suffix": (str,), "realtime": (dict,), "each": (dict,),
}  # fmt: skip
NETWORK_KEYS: Types = {
    "train": (str,), "from": (str,), "epochs": (int,), "threads": (int,), "file": (str,), "half": (bool,),
    "each": (dict,),
}  # fmt: skip
TABLE_KEYS: Types = {
    "title": (str,), "baseline": (str,), "measure": (str,), "cells-of": (str,), "against": (list,),
}  # fmt: skip
START_KEYS: Types = {"network": (str,), "rates": (str,)}
REALTIME_KEYS: Types = {"speeds": (list,), "reference": (str,), "queue": (int,), "repeats": (int,)}
TYPES: dict[type, str] = {
    str: "a text", int: "an integer", float: "a decimal number", bool: "true or false", list: "a list", dict: "a table",
}  # fmt: skip


def protocol_names() -> list[str]:
    """Return the names of all protocols."""
    return sorted(path.stem for path in PROTOCOLS.glob("*.toml"))


def read_protocol(name: str, changes: Sequence[str] = (), quick: bool = False) -> Protocol:
    """Read a protocol.

    Parameters
    ----------
    changes : sequence of str
        "key=value", which win over the file in every cell and network.
    quick : bool
        The small version that the file defines for a trial run.

    Raises
    ------
    SettingsError
        An unknown protocol, section, key or table of a paper, or a value of the wrong type or that is not allowed; the
        section is named. Or `quick` without a small version.
    """
    path = PROTOCOLS / f"{name}.toml"
    if not path.exists():
        raise SettingsError(f"unknown protocol {name!r}; there are: {', '.join(protocol_names())}")
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from error
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    if wrong := [key for key in sections if key not in SECTIONS]:
        raise SettingsError(f"{path}: section [{wrong[0]}]; allowed are {', '.join(SECTIONS)}")
    flat = {key: value for key, value in content.items() if key not in sections}
    check_types(name, {key: flat[key] for key in SECTIONS if key in flat}, dict.fromkeys(SECTIONS, (dict,)))
    check_types(f"{name}: [quick]", sections.get("quick", {}), {"cells": (list,)}, settings=True)
    if quick and "quick" not in sections:
        raise SettingsError(f"{name}: --quick: allowed with a section [quick]")
    small = dict(sections.get("quick", {})) if quick else {}
    wanted = small.pop("cells", None)
    described = dict(_expanded(name, "cell", sections.get("cells", {MAIN: {}}), CELL_KEYS))
    networks: dict[str, Network] = {}
    for own, about in _expanded(name, "network", sections.get("networks", {}), NETWORK_KEYS):
        networks[own] = _network(name, own, flat, about, small, changes, networks)
    if wanted and (unknown := set(wanted) - set(described)):
        raise SettingsError(f"{name}: [quick] names unknown cells {', '.join(sorted(unknown))}")
    cells = tuple(
        _cell(name, own, flat, sections.get("paper", {}), about, small, changes)
        for own, about in described.items()
        if not wanted or own in wanted
    )
    for cell in cells:
        if cell.start.network and cell.start.network not in networks:
            raise SettingsError(
                f"{name}, cell {cell.name}: from = {cell.start.network!r}; networks: {', '.join(networks)}"
            )
        if cell.start.rates and cell.start.rates not in described:
            raise SettingsError(f"{name}, cell {cell.name}: from = {cell.start.rates!r} is no cell")
    tables = _tables(
        name, cells, sections.get("tables", {}), {cell.get("table") or own for own, cell in described.items()}
    )
    return Protocol(name, _description(path), networks, cells, tables)


def changed(config: Mapping[str, Any], changes: Sequence[str]) -> Settings:
    """Return settings from a flat mapping with changes of the form key=value applied; the last one wins.

    Raises
    ------
    SettingsError
        A change has another form, or a key or value is not allowed.
    """
    found = dict(config)
    for change in changes:
        key, equals, word = change.partition("=")
        if not equals:
            raise SettingsError(f"--set {change!r}: allowed is key=value")
        found[key] = convert(key, word)
    return from_config(found)


def check_types(where: str, section: Any, types: Types, settings: bool = False) -> None:
    """Refuse what is no table, or has a key of another type or, unless the others are settings, another key.

    Raises
    ------
    SettingsError
        It names the place, the key and what is allowed.
    """
    if not isinstance(section, dict):
        raise SettingsError(f"{where} = {section!r}; allowed is {TYPES[dict]}")
    for key, value in section.items():
        if key not in types and not settings:
            raise SettingsError(f"{where}: key {key!r}; allowed are {', '.join(types)}")
        if key in types and type(value) not in types[key]:
            allowed = " or ".join(TYPES[one] for one in types[key])
            raise SettingsError(f"{where}: {key} = {value!r}; allowed is {allowed}")


def _expanded(
    protocol: str, kind: str, sections: Mapping[str, Mapping[str, Any]], keys: Types
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name → section, one for each combination of the values in `each`.

    Combinations in which two variables have the same value are left out (a domain is not held out from itself).
    """
    for name, section in sections.items():
        where = f"{protocol}, {kind} {name}"
        check_types(where, section, keys, settings=True)
        each: Mapping[str, Sequence[Any]] = section.get("each", {})
        check_types(f"{where}: each", each, dict.fromkeys(each, (list,)))
        for values in itertools.product(*each.values()):
            if len(set(values)) < len(values):
                continue
            variables = dict(zip(each, values, strict=True))
            own = str(_filled(name, variables))
            if not re.fullmatch(r"[a-z0-9._-]+", own):
                allowed = "lower-case letters, digits, dots, hyphens, underscores"
                raise SettingsError(f"{protocol}: name {own!r}; allowed are {allowed}")
            yield own, {key: _filled(value, variables) for key, value in section.items() if key != "each"}


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """Replace {variable} in a string, list or table; a string that is nothing else becomes the variable's value."""
    if isinstance(value, Mapping):
        return {key: _filled(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, variables) for one in value]
    if not isinstance(value, str):
        return value
    for name, one in variables.items():
        if value == f"{{{name}}}":
            return one
        value = value.replace(f"{{{name}}}", str(one))
    return value


def _settings(
    where: str, parts: Sequence[Mapping[str, Any]], other: Collection[str], changes: Sequence[str]
) -> Settings:
    """Return the settings that several sections add up to; the later win, `other` keys are left out."""
    merged = {key: value for part in parts for key, value in part.items() if key not in other}
    try:
        return changed(merged, changes)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error


def _network(
    protocol: str,
    name: str,
    flat: Mapping[str, Any],
    about: Mapping[str, Any],
    small: Mapping[str, Any],
    changes: Sequence[str],
    before: Mapping[str, Network],
) -> Network:
    """Return a network; a source model depends on its own section alone, and --quick and the user do not change it."""
    where = f"{protocol}, network {name}"
    train = str(about.get("train", "federated"))
    if train not in TRAININGS:
        raise SettingsError(f"{where}: train = {train!r}; allowed are {', '.join(TRAININGS)}")
    source = train == "source"
    parts, more = ([SOURCE, about], ()) if source else ([flat, about, small], changes)
    settings = _settings(where, parts, NETWORK_KEYS, more).replace(init="", collaborations="")
    if train == "federated":
        settings = settings.replace(methods="fedavg")
    epochs, threads = about.get("epochs", 20), about.get("threads", 1)
    for key, value in (("epochs", epochs), ("threads", threads)):
        if value < 1:
            raise SettingsError(f"{where}: {key} = {value}; allowed is 1 or more")
    file = str(about.get("file", f"{protocol}/{name}-{{seed}}.safetensors"))
    half = about.get("half", False)
    if half and not source:
        raise SettingsError(f"{where}: half = true; allowed with train = 'source' only")
    start = about.get("from")
    starts = [own for own, one in before.items() if one.train == train == "source" and "{seed}" not in one.file + file]
    if start is not None and start not in starts:
        raise SettingsError(f"{where}: from = {start!r}; allowed are source models before it: {', '.join(starts)}")
    epochs = 1 if small and not source else epochs
    return Network(name, train, epochs, file, settings, threads, half, before[start] if start else None)


def _cell(
    protocol: str,
    name: str,
    flat: Mapping[str, Any],
    paper: Mapping[str, Any],
    about: Mapping[str, Any],
    small: Mapping[str, Any],
    changes: Sequence[str],
) -> Cell:
    """Return a cell: the file's settings, then the cell's, then those of --quick, then the user's."""
    where = f"{protocol}, cell {name}"
    settings = _settings(where, [flat, about, small], CELL_KEYS, changes)
    weighting = str(about.get("weighting", "clients"))
    if weighting not in WEIGHTINGS:
        raise SettingsError(f"{where}: weighting = {weighting!r}; allowed are {', '.join(WEIGHTINGS)}")
    start = about.get("from", "")
    start = {"network": start} if isinstance(start, str) else start
    check_types(f"{where}: from", start, START_KEYS)
    start = Start(**start)
    if start.network:
        settings = settings.replace(rounds=0)
    if start.rates:
        if not (start.network or settings.init):
            raise SettingsError(f"{where}: from = {{ rates = {start.rates!r} }}: a network is missing, or init")
        settings = settings.replace(rates_rounds=0)
    own = about.get("paper", {})
    own = own if isinstance(own, list) else [own]
    for one in own:
        check_types(f"{where}: paper", one, {}, settings=True)
    references = [{**paper, **one} for one in own]
    named = [reference.get("name", "") for reference in references if "table" in reference]
    if wrong := [paper for paper in named if paper not in papers()]:
        raise SettingsError(f"{where}: paper {wrong[0]!r}; there are: {', '.join(papers())}")
    columns = tuple(about.get("columns", ()))
    if columns and len(columns) != settings.clients:
        raise SettingsError(
            f"{where}: clients = {settings.clients}; allowed is {len(columns)}, one for each of columns"
        )
    return Cell(
        name,
        str(about.get("title", protocol if name == MAIN else name)),
        settings,
        tuple(read_reference(reference) for reference in references if "table" in reference),
        weighting,
        start,
        table=str(about.get("table", "")),
        column=str(about.get("column", "")),
        columns=columns,
        suffix=str(about.get("suffix", "")),
        realtime=_realtime(f"{where}: realtime", about["realtime"], bool(small)) if "realtime" in about else None,
    )


def _realtime(where: str, about: Mapping[str, Any], quick: bool) -> Realtime:
    """Return how a cell is evaluated in real time."""
    check_types(where, about, REALTIME_KEYS)
    speeds = about.get("speeds", Realtime.speeds)
    if not speeds or not all(type(one) in (int, float) and one > 0 for one in speeds):
        raise SettingsError(f"{where}: speeds = {speeds!r}; allowed are numbers above 0")
    for key in ("queue", "repeats"):
        if about.get(key, 1) < 1:
            raise SettingsError(f"{where}: {key} = {about[key]}; allowed is 1 or more")
    more: dict[str, Any] = {"speeds": tuple(map(float, speeds)), **({"repeats": 3} if quick else {})}
    return Realtime(**{**about, **more})


def _tables(
    protocol: str, cells: Sequence[Cell], sections: Mapping[str, Mapping[str, Any]], table_names: set[str | None]
) -> tuple[Table, ...]:
    """Return the tables in the order of their first cells; a cell that names no table has its own."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.table or cell.name, []).append(cell)
    found = []
    for name, about in sections.items():
        where = f"{protocol}: [tables.{name}]"
        check_types(where, about, TABLE_KEYS)
        if about.get("cells-of", name) not in {*table_names, *grouped}:
            raise SettingsError(f"{where}: no cell belongs to it")
    for name, own in grouped.items():
        about = sections.get(name, {})
        title = str(about.get("title", own[0].title))
        against = tuple(about.get("against", AGAINST))
        found.append(Table(name, title, tuple(own), str(about.get("baseline", "")), against=against))
        found += [
            Table(other, str(more.get("title", other)), tuple(own), measure=str(more.get("measure", "")))
            for other, more in sections.items()
            if more.get("cells-of") == name
        ]
    return tuple(found)


def _description(path: Path) -> str:
    """Return the comment at the top of a protocol's file."""
    match = re.match(r"(?:#.*\n)+", path.read_text())
    return re.sub(r"^# ?", "", match[0], flags=re.MULTILINE).strip() if match else ""
