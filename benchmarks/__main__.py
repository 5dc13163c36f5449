"""Tables of the papers and measurements of speed: `python -m fedtta.benchmarks COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when Flower is imported

from rich.console import Console

from fedtta.benchmarks import poisoning, privacy
from fedtta.benchmarks.gpu import command as gpu
from fedtta.benchmarks.speed import command as speed
from fedtta.benchmarks.speed import fleet
from fedtta.benchmarks.tables import drift, engine, estimates, index, methods, pages
from fedtta.server.events import RunError
from fedtta.settings import SettingsError
from fedtta.simulation.program import unwind_on_signals

COMMANDS = {
    "list": (index, "the protocols with their cells and kept seeds"),
    "run": (engine, "run the cells of a protocol over several seeds, keep the results, print the tables"),
    "page": (pages, "write pages and plots of all kept tables, speed and poisoning"),
    "speed": (speed, "measure ratios of times and memory side by side"),
    "gpu": (gpu, "what only a GPU can show, where there is one"),
    "fleet": (fleet, "many light devices: our server beside Flower's own FedAvg"),
    "poisoning": (poisoning, "measure what poisoners among ten clients cost the others"),
    "privacy": (privacy, "what messages tell of a client's class mix, and what hiding it costs"),
    "drift": (drift, "measure delay and false alarms of the drift test on streams that switch"),
    "estimates": (estimates, "accuracy estimated without labels, and the adapter that chooses by it"),
    "methods": (methods, "every method: what it trains, adapts, needs and costs at test time"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="fedtta bench", description="Tables of the papers and measurements of speed.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; exit status 0 on success, 1 when a run failed, 2 for bad settings."""
    arguments = parser().parse_args(words)
    module, _ = COMMANDS[arguments.command]
    unwind_on_signals()
    try:
        module.run(arguments, Console())
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, FloatingPointError, OSError) as error:  # such as a full disk
        print(f"{arguments.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
