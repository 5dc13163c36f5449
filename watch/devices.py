"""Devices in the terminal: a live table of the fleet, or one line for each device where nothing can be redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedtta.messages.record import printable
from fedtta.messages.replies import Telemetry
from fedtta.simulation.devices import Device
from fedtta.simulation.superlink import FlowerError
from fedtta.watch.fleet import FleetDevice, damaged_lines, latency, read_fleet

UNKNOWN = "-"
BARS = "▁▂▃▄▅▆▇█"
SHOWN = 16  # values of a sparkline
CUT = 60  # characters of a cell; a node chooses the words
REFRESH = 2.0  # seconds between two looks at the files
#: The columns of the table: a heading, and what is shown below each other.
COLUMNS = (
    ("device", ("name", "status")),
    ("last seen\nasked", ("seen", "told")),
    ("model\nsoftware", ("model", "software")),
    ("candidate\nrefused", ("candidate", "refused")),
    ("adapter\nsamples", ("adapter", "samples")),
    ("weight e\nover time", ("weight", "weights")),
    ("est. acc.\ndrift", ("accuracy", "drift")),
    ("guard\nevents", ("guard", "events")),
    ("disk used, free\nmemory", ("disk", "memory")),
    ("p50\np95", ("p50", "p95")),
)


def cells(device: FleetDevice, now: float) -> dict[str, str]:
    """Return everything that is shown of a device, as short texts without control characters.

    Parameters
    ----------
    now : float
        Seconds since 1970.
    """
    found = {
        "name": device.name,
        "status": device.status,
        "seen": _age(device.last_seen, now),
        "told": _age(device.telemetry_at, now),
    }
    if device.telemetry is not None:
        found |= _told(device.telemetry)
    names = [name for _, column in COLUMNS for name in column]
    return {name: printable(found.get(name) or UNKNOWN, CUT) for name in names}


def _told(one: Telemetry) -> dict[str, str]:
    unsaved = f", {one.unsaved_samples:,} unsaved" if one.unsaved_samples else ""
    return {
        "model": one.model,
        "software": " ".join(f"{package} {version}" for package, version in sorted(one.software.items())),
        "candidate": one.candidate,
        "refused": one.refused,
        "adapter": f"{one.adapter}: {one.choice}" if one.choice else one.adapter,
        "samples": f"{one.samples:,}{unsaved}" + (" (saving fails)" if one.saving_fails else ""),
        "weight": UNKNOWN if one.weight is None else f"{one.weight:.2f}",
        "weights": sparkline(one.weights),
        "accuracy": _percent(one.estimated_accuracy),
        "drift": UNKNOWN if one.drift is None else f"{one.drift:.2f}",
        "guard": "holding" if one.holding else "open",
        "events": ", ".join(f"{kind} {count}" for kind, count in sorted(one.guard_events.items()) if count),
        "disk": f"{decimal(one.disk_used)}, {decimal(one.disk_free)}" if one.knows_disk else UNKNOWN,
        "memory": decimal(one.memory) if one.memory else UNKNOWN,
        "p50": _seconds(latency(one, 0.5)),
        "p95": _seconds(latency(one, 0.95)),
    }


def sparkline(values: Sequence[float]) -> str:
    """Return the last values, in [0, 1], as one character each."""
    return "".join(BARS[min(len(BARS) - 1, int(value * len(BARS)))] for value in values[-SHOWN:])


def table(devices: Sequence[FleetDevice], now: float) -> Table:
    """Return a table with two lines for each device."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for heading, _ in COLUMNS:
        made.add_column(heading, overflow="fold")
    for device in devices:
        shown = cells(device, now)
        made.add_row(*(Text("\n".join(shown[name] for name in column)) for _, column in COLUMNS))
    return made


def lines(devices: Sequence[FleetDevice], now: float) -> list[str]:
    """Return one line for each device: its name, and key=value of what is known."""
    found = []
    for device in devices:
        shown = cells(device, now)
        parts = [f"{key}={_quoted(text)}" for key, text in shown.items() if key != "name" and text != UNKNOWN]
        found.append(" ".join((_quoted(shown["name"]), *parts)))
    return found


def follow(
    results: Path,
    listed: Callable[[], Sequence[Device]],
    every: float,
    console: Console,
    ensure: Callable[[], None] = lambda: None,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show the fleet, until the process is interrupted.

    A SuperLink that does not answer later is named below the table, and asked again.

    Parameters
    ----------
    results : Path
        Folder of run folders.
    listed : callable
        Returns what the SuperLink lists.
    every : float
        Seconds between two questions to the SuperLink, and between two printings where nothing can be redrawn.
    console : Console
    ensure : callable
        Called as often, before `listed`.
    once : bool
        Show it once and return.

    Raises
    ------
    FlowerError
        The SuperLink does not answer the first time.
    """

    def ask() -> Sequence[Device]:
        ensure()
        return listed()

    enrolled, due, problem = ask(), clock() + every, ""
    if once or not console.is_terminal:
        while True:
            _print(results, enrolled, console)
            if once:
                return
            sleep(every)
            enrolled, problem = _asked(ask, enrolled)
            if problem:
                console.print(problem, markup=False, highlight=False, soft_wrap=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            made = table(read_fleet(results, enrolled), time.time())
            made.caption, made.caption_justify = Text(problem or _damage(results)), "left"
            live.update(made, refresh=True)
            sleep(min(REFRESH, every))
            if clock() >= due:
                (enrolled, problem), due = _asked(ask, enrolled), clock() + every


def _asked(ask: Callable[[], Sequence[Device]], before: Sequence[Device]) -> tuple[Sequence[Device], str]:
    """Return what the SuperLink lists; if it does not answer, what it listed before, and why."""
    try:
        return ask(), ""
    except FlowerError as error:
        return before, printable(" ".join(str(error).split()))


def _print(results: Path, enrolled: Sequence[Device], console: Console) -> None:
    devices, now = read_fleet(results, enrolled), time.time()
    if console.is_terminal:
        console.print(table(devices, now))
    else:
        for line in lines(devices, now):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if damage := _damage(results):
        console.print(damage, markup=False, highlight=False, soft_wrap=True)


def _damage(results: Path) -> str:
    count = damaged_lines(results)
    return f"{count} lines of telemetry in {printable(str(results))} cannot be read" if count else ""


def _age(at: float | None, now: float) -> str:
    """Return how long ago a time was."""
    if at is None:
        return "never"
    seconds = max(0.0, now - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{1000 * value:.1f} ms" if value < 0.99995 else f"{value:.1f} s"


def _quoted(text: str) -> str:
    """Return a value of key=value, in quotes where it has spaces."""
    return f'"{text.replace(chr(34), chr(39))}"' if " " in text or '"' in text or not text else text
