"""`methods`: every method of the table, what it trains, adapts and needs; with `--cost` also its cost at test time.

The facts come from the tables of methods, trainings and adapters alone. Costs, which `benchmarks.cost` measures, stay
in `methods.json` until they are measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cost import BATCH, REPEATS, SAMPLES, measure, setting_up
from benchmarks.heads import one_core
from benchmarks.record import RESULTS, provenance, write_json
from models import MODELS, write_atomically
from server.methods import METHODS, parse_rows
from server.trainings import BATCHNORM, TRAININGS
from settings import SettingsError
from tta.registry import ADAPTERS

#: What people call the needs of an adapter, see `tta.base.NEEDS`.
WORDS = {
    "personal_head": "a personal head",
    "residual_head": "a residual personal head",
    "rotation_head": "a head for rotations",
    "descriptor": "mean features of the client and of all",
    "dle": "the client's and all clients' rates of silent features",
    "entropy": "mean entropies of both heads",
    "gradients": "many gradients for each sample",
    "batchnorm": "BatchNorm",
    "rates": "learned adaptation rates",
    "datastore": "the client's memorised training samples",
    "label_prior": "pooled label frequencies",
    "confusion": "pooled confusion of labels and predictions",
    "block_scores": "pooled accuracy of each tuned block",
}
OWN_LABELS = "labels of the client's own"
Costs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One method: what is trained, what adapts, what it needs beside a trained network (in words), and which network.

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
    parser.add_argument("--cost", action="store_true", help="measure milliseconds a sample at test time, on one core")
    parser.add_argument("--model", choices=list(MODELS), default="cnn", help="network of --cost (default: cnn)")
    parser.add_argument(
        "--model-options", metavar="TEXT", help="its options (default: norm=batch where there is a choice)"
    )
    for option, default, what in (
        ("--samples", SAMPLES, "length of the stream"),
        ("--batch", BATCH, "samples a batch"),
        ("--repeats", REPEATS, "turns"),
    ):
        parser.add_argument(option, type=_positive, default=default, help=f"{what} (default: {default})")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="of methods.json and .md (default: benchmarks/results)"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Collect the facts, measure costs if asked to, print the table, write `methods.json` and `methods.md`.

    Raises
    ------
    SettingsError
        `methods.json` holds something else, or the network's options do not fit.
    """
    path = arguments.out / "methods.json"
    found = kept_cost(path)
    if arguments.cost:
        set_up = setting_up(arguments.model, arguments.model_options, arguments.samples, arguments.batch)
        with one_core():
            found = {**asdict(set_up), "repeats": arguments.repeats, **provenance()}
            found["adapters"] = {name: asdict(cost) for name, cost in measure(set_up, arguments.repeats).items()}
    listed = entries()
    console.print(rendered(listed, found))
    write_json(path, {"methods": [asdict(entry) for entry in listed], "cost": found})
    write_atomically(path.with_suffix(".md"), markdown(listed, found).encode())
    console.print(f"Written: {path} and .md", highlight=False)


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


def kept_cost(path: Path) -> dict[str, Any] | None:
    """Return what an earlier call measured, None if there is nothing; SettingsError for a file of something else."""
    if not path.exists():
        return None
    try:
        cost = json.loads(path.read_text())["cost"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} is no list of methods ({error!r}); choose another --out or remove it") from error
    return cost


def rendered(listed: Sequence[Entry], found: Mapping[str, Any] | None) -> Table:
    """Return the table for a terminal."""
    grid = Table(title=f"{len(listed)} methods" + (f"; {conditions(found)}" if found else ""))
    columns = ["method", "training", "adapter", "adapts", "needs", "per", "base"]
    for column in columns + (["ms", "over none", "passes"] if found else []):
        grid.add_column(column, justify="right" if column in ("ms", "over none") else "left")
    for entry in listed:
        facts = [entry.method, entry.training, entry.adapter, entry.adapts, "; ".join(entry.needs), entry.per]
        grid.add_row(*facts, entry.base, *(cost_cells(entry.adapter, found["adapters"]) if found else []))
    return grid


def cost_cells(adapter: str, costs: Costs) -> list[str]:
    """Return milliseconds a sample, the ratio to `none`, and images through the network: forward, backward."""
    if adapter not in costs:
        return ["does not fit", "", ""]
    cost = costs[adapter]
    passes = f"{cost['forward']:.3g} + {cost['backward']:.3g}"
    return [f"{cost['processor_milliseconds']:.3g}", f"{cost['ratio']:.3g}", passes]


def conditions(found: Mapping[str, Any]) -> str:
    """Say under which conditions costs were measured."""
    network = f"{found['model']} ({found['model_options']})" if found["model_options"] else found["model"]
    size = f"{found['image_size']}x{found['image_size']}"
    return f"{network}, {found['samples']} images of {size} in batches of {found['batch']}, one CPU thread"


def markdown(listed: Sequence[Entry], found: Mapping[str, Any] | None) -> str:
    """Return the page: one table of all methods, and the papers below it."""
    page = ["# The methods", "", "Made by `python -m benchmarks methods`; in `methods.json` as data.", ""]
    if found:
        page += [
            f"Costs: {conditions(found)}; default options; median of {found['repeats']} turns in one run. Milliseconds "
            "are the processor's, a sample; beside them their ratio to `none` (a plain forward pass) in the same turn, "
            "and how many images go through the encoder for each image predicted, forward + backward. What is prepared "
            f"before the stream is not counted. {found['hardware']}, {found['time']}.",
            "",
        ]
    head = ["method", "what it is", "training", "adapts at test time", "needs", "per", "base"]
    head += ["ms a sample", "over none", "images forward + backward"] if found else []
    page += [_line(head), _line("---" for _ in head)]
    for entry in listed:
        facts = [f"`{entry.method}`", entry.summary, entry.training, entry.adapts, "; ".join(entry.needs), entry.per]
        page.append(_line([*facts, entry.base, *(cost_cells(entry.adapter, found["adapters"]) if found else [])]))
    page += ["", "Every method needs labels somewhere in training; `labels of the client's own` says that the client "]
    page[-1] += "that tests must have some."
    page += ["", "## Trainings", ""]
    page += [f"- `{name}`: {recipe.summary}" for name, recipe in TRAININGS.items()]
    page += ["", "## Adapters", ""]
    page += [f"- `{name}`: {info.paper or info.adapts}" for name, info in ADAPTERS.items()]
    return "\n".join(page) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number, 1 or more")
    return int(text)
