"""`python -m benchmarks <command>`: the papers' protocols over several seeds, and what the methods cost in time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when Flower is imported

from rich.console import Console

from benchmarks import (
    agent,
    atp,
    bbn,
    central,
    collaborate,
    deployment,
    fedicon,
    heads,
    methods,
    mixing,
    overview,
    rounds,
    run,
    seconds,
    source,
    wall_clock,
)
from benchmarks.speed import command as speed
from server.events import RunError
from settings import SettingsError

COMMANDS = {
    "run": (run, "a protocol's cells over several seeds, beside the paper's numbers: tables, JSON files, a page"),
    "page": (overview, "the index and the page with pictures of everything that `run` has kept"),
    "heads": (heads, "time of head interpolation alone, beside a naive loop over samples"),
    "rounds": (rounds, "wall time of a simulated round over the local training in it"),
    "atp": (atp, "ATP's tables for the shallow CNN: global model, rates, every shift's rates on every other"),
    "fedicon": (fedicon, "FedICON's tables and figures for Digit-5 and Office-10, beside the paper's numbers"),
    "methods": (methods, "every method: what it trains, adapts and needs; with --cost also its cost at test time"),
    "seconds": (seconds, "BTFL's Table 3: seconds for 1,000 samples, one at a time, on three networks"),
    "collaborate": (collaborate, "test-time methods under collaborations on class-imbalanced corruption streams"),
    "bbn": (bbn, "time of adapting to a batch with BBN over a plain forward and backward pass of it"),
    "wall-clock": (wall_clock, "accuracy under a constant-speed stream: a method that is too slow misses samples"),
    "speed": (
        speed,
        "ratios side by side: adapters, naive loops, rounds, aggregation, data; JSON and a plot",
    ),
    "mixing": (mixing, "time and memory of the server's N x N work for 1,000 clients"),
    "source": (source, "train a source network on one part of a data set"),
    "agent": (agent, "latency, predictions a second and memory of the resident agent, and 50 streams at once"),
    "deployment": (deployment, "seconds of a training round on real nodes, beside an empty Flower app's"),
    "central": (central, "train a protocol's network on the union of its clients' training splits"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; exit status 0 on success, 1 when a run failed, 2 for bad settings."""
    arguments = parser().parse_args(words)
    module, _ = COMMANDS[arguments.command]
    try:
        module.run(arguments, Console())
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, FloatingPointError) as error:
        print(f"{arguments.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
