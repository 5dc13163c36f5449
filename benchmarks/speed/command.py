"""`speed`: ratios of what is measured side by side: adapters, naive loops, simulated rounds, aggregation, data.

Parts that are kept stay until they are measured again. Times on a machine that does other things say little; the load
is noted beside each part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.heads import one_core
from benchmarks.record import RESULTS, provenance, write_json
from benchmarks.speed.adapters import adapters
from benchmarks.speed.federation import engines, memory, rounds, shipping
from benchmarks.speed.figure import Figure
from benchmarks.speed.loops import loops
from benchmarks.speed.options import options
from benchmarks.speed.picture import picture
from benchmarks.speed.pieces import aggregation, data_path
from models import write_atomically
from server.report.drawing import standalone, to_png
from settings import SettingsError

QUICK = Path("results/quick")
#: Part → what it is about, how it is measured, and whether on one core alone.
PARTS: dict[str, tuple[str, Callable[[bool], list[Figure]], bool]] = {
    "adapters": ("Processor time over the bare forward pass, papers' CNN", adapters, True),
    "loops": ("Speed over that of a naive loop", loops, True),
    "rounds": ("Wall time of a simulated round over its training divided by the workers", rounds, False),
    "engines": ("Clients a second of the vectorised engine over the Ray path", engines, False),
    "shipping": ("Seconds of a round of a 45 MB network beyond what clients compute", shipping, False),
    "memory": ("Growth of a process that simulates 1,000 clients", memory, False),
    "aggregation": ("The server's average over adding up in numpy", aggregation, True),
    "options": ("Speed of a training step over the plain one, batch 32", options, True),
    "data": ("Corruptions over a copy of the images, partitions over a shuffle", data_path, True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `speed`."""
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help=f"as little as runs everything, in {QUICK}")
    parser.add_argument("--out", type=Path, help="of speed.json, .svg and .png (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print, and write what was measured part by part.

    Raises
    ------
    SettingsError
        There is no such part, or what is kept cannot be read.
    RunError
        A simulated run failed.
    """
    names = [name for name in arguments.parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        raise SettingsError(f"--parts {','.join(unknown)}: allowed are {', '.join(PARTS)}")
    out = arguments.out or (QUICK if arguments.quick else RESULTS)
    content = kept(out / "speed.json")
    for name in names:
        title, measure, alone = PARTS[name]
        if alone:
            with one_core():
                figures = measure(arguments.quick)
        else:
            figures = measure(arguments.quick)
        console.print(rendered(title, figures))
        rows: list[dict[str, Any]] = [asdict(figure) for figure in figures]
        content = {**content, name: {"title": title, **provenance(), "figures": rows}}
        write_json(out / "speed.json", {part: content[part] for part in PARTS if part in content})
    plot = picture({part: content[part] for part in PARTS if part in content})
    write_atomically(out / "speed.svg", standalone(plot).encode())
    write_atomically(out / "speed.png", to_png(plot))
    console.print(f"Written: {out}/speed.json, speed.svg, speed.png", highlight=False)


def kept(path: Path) -> Mapping[str, Any]:
    """Return the parts that are kept; SettingsError if the file cannot be read."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for part in content.values():
            [Figure(**row) for row in part["figures"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); remove it, or choose another --out") from error
    return dict(content)


def rendered(title: str, figures: list[Figure]) -> Table:
    """Return a part's table for a terminal."""
    grid = Table(title=title)
    for column in ("what", "ratio", "target", "", "ours", "beside"):
        grid.add_column(column, justify="right" if column == "ratio" else "left")
    for one in figures:
        ours, other = f"{one.ours:.3g} {one.unit}", f"{one.other:.3g}: {one.than}"
        grid.add_row(Text(one.what), f"{one.ratio:.3g}", one.wanted, one.mark, ours, other)
    return grid
