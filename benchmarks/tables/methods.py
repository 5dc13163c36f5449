"""`methods`: every method with its training, adapter and needs, and its cost at test time as kept by `speed`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedtta.benchmarks.provenance import RESULTS
from fedtta.benchmarks.speed.command import FILE, read_speed
from fedtta.server.methods import METHODS, parse_rows
from fedtta.server.trainings import BATCHNORM, TRAININGS
from fedtta.tta.registry import ADAPTERS

#: The needs of an adapter in words, see `tta.table.NEEDS`.
WORDS = {
    "personal_head": "a personal head",
    "residual_head": "a residual personal head",
    "rotation_head": "a head for rotations",
    "descriptor": "mean features of the client and of all clients",
    "dle": "the client's and all clients' rates of silent features",
    "entropy": "mean entropies of both heads",
    "gradients": "many gradients for each sample",
    "batchnorm": "BatchNorm",
    "nonnegative": "features that are not negative",
    "rates": "learned adaptation rates",
    "datastore": "the client's memorised training samples",
    "candidates": "labelled samples that its candidates are calibrated on",
    "clients": "how many clients there are",
    "label_prior": "pooled label frequencies",
    "confusion": "pooled confusion of labels and predictions",
    "block_scores": "pooled accuracy of each tuned block",
}
OWN_LABELS = "labels of the client's own"


@dataclass(frozen=True)
class Entry:
    """A method: its training, its adapter, what it needs beside a trained network (in words), and its network.

    `training_source` and `adapter_source` are the papers, the latter empty for a plain baseline.
    """

    method: str
    summary: str
    training: str
    training_source: str
    adapter: str
    adapter_source: str
    adapts: str
    needs: tuple[str, ...]
    per: str
    base: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `methods`."""
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of {FILE} (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Print the table of all methods."""
    console.print(rendered(entries(), kept_costs(arguments.out)))


def kept_costs(out: Path) -> Mapping[str, Any]:
    """Return setup and cost of every adapter as `speed` measured them last; empty if it has not."""
    return read_speed(out / FILE).get("methods", {}).get("details", {})


def entries() -> list[Entry]:
    """Return the facts of every method, in the table's order."""
    return [_entry(name) for name in METHODS]


def _entry(name: str) -> Entry:
    (row,) = parse_rows(name)
    adapter, recipe = ADAPTERS[row.method.adapter], TRAININGS[row.training]
    needs = [text for need, text in WORDS.items() if need in adapter.needs]
    if any(stage.local == BATCHNORM for stage in recipe.stages):
        needs.append(WORDS["batchnorm"])
    if row.personal:
        needs.append(OWN_LABELS)
    trained, adapting = (row.training, recipe.summary), (adapter.name, adapter.paper, adapter.adapts)
    return Entry(name, row.method.summary, *trained, *adapting, tuple(needs), adapter.per, row.base)


def rendered(listed: Sequence[Entry], costs: Mapping[str, Any]) -> Table:
    """Return the table for a terminal."""
    grid = Table(title=f"{len(listed)} methods" + (f"; {conditions(costs)}" if costs else ""))
    columns = ["method", "training", "adapter", "adapts", "needs", "per", "base"]
    for column in columns + (["ms", "over none", "passes"] if costs else []):
        grid.add_column(column, justify="right" if column in ("ms", "over none") else "left")
    for entry in listed:
        facts = [entry.method, entry.training, entry.adapter, entry.adapts, "; ".join(entry.needs), entry.per]
        grid.add_row(*facts, entry.base, *(cost_texts(entry.adapter, costs) if costs else []))
    return grid


def cost_texts(adapter: str, costs: Mapping[str, Any]) -> list[str]:
    """Return milliseconds per sample, the ratio to `none`, and images through the network: forward + backward."""
    if adapter not in costs["adapters"]:
        return ["", "", ""]
    cost = costs["adapters"][adapter]
    passes = f"{cost['forward']:.3g} + {cost['backward']:.3g}"
    return [f"{cost['processor_milliseconds']:.3g}", f"{cost['ratio']:.3g}", passes]


def conditions(costs: Mapping[str, Any]) -> str:
    """Return network, stream and batch of the measured costs."""
    network = f"{costs['model']} ({costs['model_options']})" if costs["model_options"] else costs["model"]
    size = f"{costs['image_size']}x{costs['image_size']}"
    return f"{network}, {costs['samples']} images of {size} in batches of {costs['batch']}, one CPU thread"


def methods_page(listed: Sequence[Entry], costs: Mapping[str, Any]) -> str:
    """Return a Markdown page: one table of all methods, and the papers below it."""
    page = ["# Methods", ""]
    if costs:
        page += [
            f"Costs: {conditions(costs)}; default options; median of {costs['repeats']} turns in one run. Milliseconds "
            "are processor time per sample; beside them the ratio to `none` (a plain forward pass) in the same turn, "
            "and images through the encoder per predicted image, forward + backward. Preparation is not counted.",
            "",
        ]
    head = ["method", "what it is", "training", "adapts at test time", "needs", "per", "base"]
    head += ["ms a sample", "over none", "images forward + backward"] if costs else []
    page += [_line(head), _line(["---"] * len(head))]
    for entry in listed:
        facts = [f"`{entry.method}`", entry.summary, entry.training, entry.adapts, "; ".join(entry.needs), entry.per]
        page.append(_line([*facts, entry.base, *(cost_texts(entry.adapter, costs) if costs else [])]))
    page += ["", "Every method needs labels in training; `labels of the client's own`: the tested client needs some."]
    page += ["", "## Trainings", "", *(f"- `{name}`: {recipe.summary}" for name, recipe in TRAININGS.items())]
    page += ["", "## Adapters", "", *(f"- `{name}`: {info.paper or info.adapts}" for name, info in ADAPTERS.items())]
    return "\n".join(page) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
