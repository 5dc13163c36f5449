"""`speed`: ratios of times and memory measured side by side, part by part, kept in one file.

A part keeps its numbers until it is measured again. The load of the machine is recorded with each part: wall-clock
times on a busy machine mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.benchmarks.speed.adapters import adapters, bbn, methods, seconds
from fedtta.benchmarks.speed.agent import agent
from fedtta.benchmarks.speed.deployment import deployment
from fedtta.benchmarks.speed.federation import engines, memory, rounds, shipping
from fedtta.benchmarks.speed.light import light
from fedtta.benchmarks.speed.loops import loops
from fedtta.benchmarks.speed.measurement import Part, Ratio, markdown, one_core
from fedtta.benchmarks.speed.mixing import mixing
from fedtta.benchmarks.speed.options import options
from fedtta.benchmarks.speed.pieces import aggregation, data_path
from fedtta.benchmarks.speed.simulators import simulators, thousand
from fedtta.benchmarks.speed.sources import sources
from fedtta.settings import SettingsError

QUICK = Path("results/quick")
FILE = "speed.json"
PARTS: dict[str, Part] = {
    "adapters": Part("Processor time over the bare forward pass, papers' CNN", adapters, one_core=True),
    "methods": Part("Processor time over the bare forward pass, CNN with BatchNorm", methods, one_core=True),
    "seconds": Part("1,000 samples one at a time over BTFL's time (BTFL, Table 3)", seconds, one_core=True),
    "loops": Part("Speed over that of a naive loop", loops, one_core=True),
    "bbn": Part("BBN over a forward and backward pass of the batch", bbn, one_core=True),
    "rounds": Part("Wall time of a simulated round over its training divided by the workers", rounds),
    "simulators": Part("Seconds of a simulated round over those of Flower's simulation and pfl-research", simulators),
    "simulators-1000": Part("The same with 1,000 clients", thousand),
    "engines": Part("Clients a second of the vectorised engine over the Ray path", engines),
    "shipping": Part("Seconds of a round of a 45 MB network beyond what clients compute", shipping),
    "memory": Part("Growth of a process that simulates 1,000 clients", memory),
    "aggregation": Part("The server's average over adding up in numpy", aggregation, one_core=True),
    "mixing": Part("Peak memory of the server's collaborative round over its inputs", mixing),
    "options": Part("Speed of a training step over the plain one, batch 32", options, one_core=True),
    "data": Part("Corruptions over a copy of the images, partitions over a shuffle", data_path, one_core=True),
    "sources": Part("Growth of a process that reads a device's own images over its bound", sources),
    "agent": Part("Seconds of requests to the agent over the bare forward pass", agent),
    "light": Part("The agent on onnxruntime beside the one in torch", light),
    "deployment": Part("Seconds of a deployed training round over an empty Flower app's", deployment),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `speed`."""
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"the smallest measurement of each part, in {QUICK}")
    parser.add_argument("--out", type=Path, help=f"of {FILE} (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and keep the parts, one after another.

    Raises
    ------
    SettingsError
        An unknown part, or kept results that cannot be read.
    RunError
        A simulated or deployed run failed.
    """
    names = [name for name in arguments.parts.split(",") if name] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise SettingsError(f"--parts {','.join(unknown)}: allowed are {', '.join(PARTS)}")
    path = (arguments.out or (QUICK if arguments.quick else RESULTS)) / FILE
    content = read_speed(path)
    for name in names:
        part = PARTS[name]
        with _threads(part.one_core):
            measured = part.measure(arguments.quick)
        console.print(rendered(part.title, measured.ratios))
        rows = [asdict(ratio) for ratio in measured.ratios]
        own = {"title": part.title, **provenance(), "ratios": rows, "details": dict(measured.details)}
        content[name] = own
        write_json(path, {one: content[one] for one in PARTS if one in content})
    console.print(f"Written: {path}", highlight=False)


def read_speed(path: Path = RESULTS / FILE) -> dict[str, Any]:
    """Return part → what is kept; nothing without a file, SettingsError if it cannot be read."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for part in content.values():
            [Ratio(**row) for row in part["ratios"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); remove it, or choose another --out") from error
    return dict(content)


def speed_page(content: Mapping[str, Any]) -> str:
    """Return all kept parts as a Markdown page."""
    about = "`python -m fedtta.benchmarks speed`; details are in `benchmarks/results/speed.json`."
    return f"# Speed\n\n{about}\n{tables_of(content)}"


def tables_of(content: Mapping[str, Any]) -> str:
    """Return a section for each kept part, with the table of its ratios."""
    lines = []
    for name, part in content.items():
        lines += [
            "",
            f"## {name}: {part['title']}" if "title" in part else f"## {name}",
            "",
            f"{part['hardware']}, load {part['load_average']}, {part['time']}.",
        ]
        lines += ["", *markdown(Ratio(**row) for row in part["ratios"])]
    return "\n".join(lines) + "\n"


def rendered(title: str, ratios: Sequence[Ratio]) -> Table:
    """Return a part's table for a terminal."""
    grid = Table(title=title)
    for column in ("what", "ratio", "target", "", "ours", "beside"):
        grid.add_column(column, justify="right" if column == "ratio" else "left")
    for one in ratios:
        ours, other = f"{one.ours:.3g} {one.unit}", f"{one.other:.3g}: {one.than}"
        grid.add_row(Text(one.what), f"{one.ratio:.3g}", one.wanted, one.mark, ours, other)
    return grid


@contextlib.contextmanager
def _threads(one: bool) -> Iterator[None]:
    """Restrict the process to one core if asked to; keep the number of torch threads for later parts in any case."""
    threads = torch.get_num_threads()
    try:
        with one_core() if one else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
