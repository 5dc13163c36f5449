"""What `wall-clock` shows of its results: a table for a terminal, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

Content = Mapping[str, Any]
#: One line of a table: the row's label, and a cell for every head.
Line = tuple[str, list[str]]


def rendered(content: Content) -> Table:
    """Return the table for a terminal; the best accuracies of each speed are bold."""
    caption = "accuracy in %, a missed sample answered by the unadapted network; in brackets the share not missed"
    grid = Table(title=f"{content['settings']['dataset']}; {pace(content)}", caption=caption)
    grid.add_column("method", overflow="fold")
    heads, lines = main_table(content)
    for head in heads:
        grid.add_column(head, justify="right")
    for label, cells in lines:
        grid.add_row(Text(label), *(Text(one.replace("**", ""), style="bold" if "**" in one else "") for one in cells))
    return grid


def markdown(content: Content, command: str) -> str:
    """Return the page: accuracies, the same with every missed sample wrong, costs, and how to make it again."""
    settings = content["settings"]
    parts = [
        "# wall-clock",
        "Adaptation under a stream that does not wait: what a method gains against what it misses because it is busy. "
        "One network, trained centrally on the union of the clients' training splits, shared by all rows: no federated "
        "training is measured here.",
        f"{settings['dataset']}, {settings['model']} ({settings['model-options']}), {settings['clients']} clients, "
        f"seed {content['seed']}, {training(content['network'])}. {pace(content)}; at speed s, s times as often. "
        f"Of the samples that wait, the newest {content['queue']} can be had; a method defined per sample takes what "
        f"waits at once, one defined per batch waits for {settings['adapt-batch-size']}.",
        "Accuracy in %, mean over clients, then over test distributions; a missed sample has the unadapted network's "
        "answer, as if that cost nothing, so that `fedavg` is the same at any speed. In brackets the share of samples "
        "that the adapter answered; every stream (a client and a distribution) finds a free device, so the first is "
        "never missed. `keeps up to`: the highest speed at which nothing is missed for long.",
        _table(*main_table(content)),
        "The same with every missed sample wrong, for a device that has no time for the unadapted network either:",
        _table(*missed_wrong(content)),
        f"Milliseconds a sample in batches of so many (processor time, one thread, median of {content['repeats']} "
        "turns; where a batch took too long, no larger one was timed), the batches taken, and the longest time in "
        "milliseconds from a sample's arrival to its answer at each speed:",
        _table(*costs(content)),
        "\n".join(f"- {note}" for note in content["notes"]),
        f"{content['hardware']}, load {content['load_average']}; torch {content['versions'].get('torch')}; "
        f"{content['seconds']:.0f} s; commit {content['commit']}; {content['time']}.",
        f"```\n{command}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def training(network: Mapping[str, Any]) -> str:
    """Say how long the network was trained, and how good it is."""
    validation = network["validation_accuracy"]
    known = "" if validation is None else f" (validation {100 * validation:.1f} %)"
    return f"{network['recipe']['epochs']} epochs{known}"


def pace(content: Content) -> str:
    """Say how fast the stream is."""
    rate = f"Speed 1: a sample every {content['interval_milliseconds']:.3g} ms"
    return f"{rate}, what {content['reference']} takes for one that comes alone"


def main_table(content: Content) -> tuple[list[str], list[Line]]:
    """Return heads and lines: the speed that each method keeps up with, and accuracy and share answered at each."""
    columns = by_speed(content)
    top = {speed: f"{max(one['accuracy'] for one in column.values()):.1f}" for speed, column in columns.items()}
    lines = []
    for label, cost in content["costs"].items():
        cells = [times(cost["keeps_up_to"])]
        for speed, column in columns.items():
            text = f"{column[label]['accuracy']:.1f}"
            bold = f"**{text}**" if text == top[speed] else text
            cells.append(f"{bold} ({share(column[label]['answered'])})")
        lines.append((label, cells))
    return ["keeps up to", *map(times, columns)], lines


def missed_wrong(content: Content) -> tuple[list[str], list[Line]]:
    """Return heads and lines: at each speed the accuracy with every missed sample wrong."""
    columns = by_speed(content)
    lines = [
        (label, [f"{column[label]['accuracy_missed_wrong']:.1f}" for column in columns.values()])
        for label in content["costs"]
    ]
    return [*map(times, columns)], lines


def costs(content: Content) -> tuple[list[str], list[Line]]:
    """Return heads and lines: milliseconds a sample by batch, batches taken, longest delays."""
    sizes = sorted({int(size) for cost in content["costs"].values() for size in cost["milliseconds"]})
    columns, lines = by_speed(content), []
    for label, cost in content["costs"].items():
        known = {int(size): one / int(size) for size, one in cost["milliseconds"].items()}
        cells = [f"{known[size]:.3g}" if size in known else "" for size in sizes]
        least, most = cost["least"], cost["most"]
        cells.append(f"{most}" if least == most else f"{least} to {most}")
        lines.append(
            (label, cells + [f"{column[label]['longest_delay_milliseconds']:.3g}" for column in columns.values()])
        )
    return [*map(str, sizes), "taken", *(f"delay at {times(speed)}" for speed in columns)], lines


def by_speed(content: Content) -> dict[float, dict[str, Mapping[str, Any]]]:
    """Return speed → label → result."""
    found: dict[float, dict[str, Mapping[str, Any]]] = {}
    for one in content["results"]:
        found.setdefault(one["speed"], {})[one["method"]] = one
    return found


def times(speed: float) -> str:
    """Return a speed in three digits."""
    return f"{speed:.3g}×"


def share(percent: float) -> str:
    """Return a share, without decimals where they say little; only all is 100 %, and only nothing 0 %."""
    if percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.{0 if 10 <= percent < 99 else 1}f} %"


def _table(heads: Iterable[str], lines: Iterable[Line]) -> str:
    heads = list(heads)
    rows = [f"| method | {' | '.join(heads)} |", "| --- |" + " --: |" * len(heads)]
    return "\n".join(rows + [f"| {label} | {' | '.join(cells)} |" for label, cells in lines])
