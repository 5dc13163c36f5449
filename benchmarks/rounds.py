"""`rounds`: what a simulated round costs beyond the local training of its clients.

The wall time of a round, seen from the server, against the time its clients spent in local training divided by the
workers that ran them, both from the same run. The first round, in which the workers start, is left out.
"""

from __future__ import annotations

import argparse
import statistics as averages
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.protocol import changed
from benchmarks.record import RESULTS, mark, provenance, write_json
from server.events import Event, RunError
from settings import Settings, SettingsError

#: Wall time of a round over local training divided by the workers.
TARGET = 1.25
#: One training, and as little after it as a run allows.
BASE = {"dataset": "cifar10", "fraction": 0.2, "model": "cnn", "methods": "fedavg", "shifts": "original"}


@dataclass(frozen=True)
class RoundTime:
    """One round: wall seconds, the sum of its clients' training seconds divided by the workers, and their ratio."""

    round: int
    wall_seconds: float
    training_seconds: float
    ratio: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rounds`."""
    parser.add_argument("--clients", type=int, default=20, help="default: 20")
    parser.add_argument("--rounds", type=int, default=5, help="the first is left out (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--out", type=Path, default=RESULTS, help="of rounds.json (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Simulate, print each round and write `rounds.json`.

    Raises
    ------
    SettingsError
        An impossible setting, fewer than two rounds, or no data.
    RunError
        The run failed, or a client did: its round would be too short.
    """
    numbers = {"clients": arguments.clients, "rounds": arguments.rounds, "workers": arguments.workers}
    settings = changed({**BASE, **numbers}, arguments.set)
    if settings.rounds < 2:
        raise SettingsError(f"rounds = {settings.rounds}: allowed is 2 or more, the first one is left out")
    times = round_times(simulated(settings), settings.workers)
    ratio = averages.median(time.ratio for time in times)
    console.print(rendered(times, ratio))
    content = {"ratio_median": ratio, "ratio_target": TARGET, "rounds": [asdict(time) for time in times]}
    path = write_json(arguments.out / "rounds.json", {**content, "settings": settings.flat(), **provenance()})
    console.print(f"Written: {path}", highlight=False)


def simulated(settings: Settings) -> list[Event]:
    """Run a simulation in a folder that is thrown away and return its `round` events."""
    from simulation import simulate

    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        simulate(settings, Path(folder) / "run", [events.append])
    return [event for event in events if event["event"] == "round"]


def round_times(rounds: Sequence[Event], workers: int) -> list[RoundTime]:
    """Return the times of all rounds but the first; RunError if a client of one of them did not reply."""
    times = []
    for event in rounds[1:]:
        if event["replied"] != event["sampled"]:
            raise RunError(f"round {event['round']}: only {len(event['replied'])} of {len(event['sampled'])} replied")
        training = sum(event["train_seconds"]) / workers
        wall = event["wall_seconds"]
        times.append(RoundTime(event["round"], wall, training, wall / training))
    return times


def rendered(times: Sequence[RoundTime], ratio: float) -> Table:
    """Return the table for a terminal."""
    caption = f"median ratio {ratio:.3f}, target ≤ {TARGET} {mark(ratio, TARGET)}"
    grid = Table(title="Seconds of a simulated round", caption=caption)
    for column in ("round", "wall", "training / workers", "ratio"):
        grid.add_column(column, justify="right")
    for time in times:
        values: tuple[Any, ...] = (time.wall_seconds, time.training_seconds, time.ratio)
        grid.add_row(str(time.round), *(f"{value:.3f}" for value in values))
    return grid
