"""`seconds`: BTFL's Table 3, what 1,000 samples take one at a time on three networks, beside the paper's numbers.

The paper measured on a GPU and we on one core, so that only multiples of BTFL's time are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cost import REPEATS, measure, setting_up
from benchmarks.heads import one_core
from benchmarks.papers import values
from benchmarks.record import RESULTS, provenance, write_json
from models import write_atomically

#: Adapter → the paper's row; TTT and MEMO start from the fine-tuned network there, which costs the same.
ROWS = {"ttt": "ttt[base=personalised]", "memo": "memo[base=personalised]", "fedthe": "fedthe", "btfl": "btfl"}
MODELS = ("cnn", "resnet20-gn", "cct-4/3x2")
SAMPLES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seconds`."""
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"length of the stream (default: {SAMPLES})")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"turns (default: {REPEATS})")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="of seconds.json and .md (default: benchmarks/results)"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure all networks, write `seconds.json` and `seconds.md`, print the page."""
    found: dict[str, dict[str, Any]] = {}
    with one_core():
        for model in MODELS:
            costs = measure(setting_up(model, "", arguments.samples, 1), arguments.repeats, ROWS)
            found[model] = {name: asdict(cost) for name, cost in costs.items()}
            console.print(f"{model}: measured", highlight=False)
        content = {"samples": arguments.samples, "repeats": arguments.repeats, "costs": found, **provenance()}
    write_json(arguments.out / "seconds.json", content)
    page = markdown(content)
    write_atomically(arguments.out / "seconds.md", page.encode())
    console.print(page, markup=False, highlight=False)


def multiples(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return every adapter's time as a multiple of BTFL's."""
    return {name: value / seconds["btfl"] for name, value in seconds.items()}


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: seconds here, and multiples of BTFL's time here and in the paper."""
    lines = [f"| method | {' | '.join(content['costs'])} |", "| --- |" + " --: |" * len(content["costs"])]
    ours = {
        model: {name: costs[name]["processor_milliseconds"] for name in ROWS}  # a sample; so seconds for 1,000
        for model, costs in content["costs"].items()
    }
    paper = {model: values("btfl", "3", model=model) for model in ours}
    for name, row in ROWS.items():
        places = [
            f"{seconds[name]:.2f} s, {multiples(seconds)[name]:.1f} / {multiples(paper[model])[row]:.1f}"
            for model, seconds in ours.items()
        ]
        lines.append(f"| {name} | {' | '.join(places)} |")
    words = (
        f"Seconds of one core for 1,000 samples, one at a time ({content['samples']} measured, median of "
        f"{content['repeats']} turns), and as a multiple of BTFL's: here / in the paper, whose times are a GPU's."
    )
    where = f"{content['hardware']}; torch {content['versions'].get('torch')}; load {content['load_average']}."
    command = f"```\npython -m benchmarks seconds --samples {content['samples']} --repeats {content['repeats']}\n```"
    title = "# What 1,000 samples take (BTFL, Table 3)"
    return "\n\n".join([title, words, "\n".join(lines), where, command]) + "\n"
