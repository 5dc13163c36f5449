"""What a device holds, before it joins a run: `python -m data.sources folder:/data/site-a --classes covid,normal`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.preprocessing import Preprocessing

from .base import SPLITS, open_source
from .own import OwnData, own_data
from .scan import reasons

SHOWN = 20


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(prog="python -m data.sources", description="Show what a device's data hold.")
    made.add_argument("source", help="folder:PATH, npz:FILE, hf:PATH or package.module:Class")
    made.add_argument("--classes", default="", help="the run's classes, comma-separated (default: the source's own)")
    made.add_argument("--class-map", default="", metavar="OWN=RUN;...", help="the device's class names → the run's")
    made.add_argument("--role", choices=("both", "source", "target"), help="default: both with labels, else target")
    made.add_argument("--window", default="", metavar="LOW,HIGH", help="raw values that become black and white")
    made.add_argument("--max-megapixels", type=float, default=100.0, help="larger images are skipped (100)")
    made.add_argument("--index", type=Path, help="the device's index file, which speeds up a second look")
    made.add_argument("--all", action="store_true", help=f"list all skipped samples, not only {SHOWN}")
    return made


def main(words: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Scan a source and print its tables; exit status 2 if it cannot take part."""
    arguments = parser().parse_args(words)
    console = console or Console()
    pairs = [pair.partition("=") for pair in arguments.class_map.split(";") if pair]
    class_map = {own.strip(): name.strip() for own, _, name in pairs}
    try:
        classes = tuple(name.strip() for name in arguments.classes.split(",") if name.strip())
        if not classes:
            own = open_source(arguments.source).classes
            classes = tuple(sorted({class_map.get(name, name) for name in own})) or ("unknown",)
        data = own_data(
            arguments.source,
            classes=classes,
            class_map=class_map,
            preprocessing=Preprocessing(window=arguments.window or None),
            max_skipped=1.0,  # shown, not refused
            max_megapixels=arguments.max_megapixels,
            role=arguments.role,
            index_file=arguments.index,
        )
    except (ValueError, OSError) as error:
        console.print(Text(f"error: {error}"))
        return 2
    show(data, console, None if arguments.all else SHOWN)
    return 0


def show(data: OwnData, console: Console, shown: int | None) -> None:
    """Print classes by split, what is skipped, and the notes."""
    split = {name: getattr(data.split, name) for name in SPLITS}
    table = Table(title=Text(f"{data.images.name}: {data.used} of {data.samples} samples are used, role {data.role}"))
    for column in ("class", *SPLITS, "all"):
        table.add_column(column, justify="left" if column == "class" else "right")
    rows = {name: [int((data.images.labels[part] == i).sum()) for part in split.values()] for i, name in numbered(data)}
    for name, counts in rows.items():
        table.add_row(Text(name), *map(str, counts), str(sum(counts)))
    groups = [len({data.groups[i] for i in part} - {""}) for part in split.values()]
    sizes = [len(part) for part in split.values()]
    table.add_section()
    table.add_row("samples", *map(str, sizes), str(sum(sizes)))
    table.add_row("groups", *map(str, groups), str(sum(groups)))
    console.print(table)
    if data.skipped:
        skipped = Table(
            title=Text(f"{len(data.skipped)} of {data.samples} samples are skipped: {reasons(data.skipped)}")
        )
        skipped.add_column("sample", overflow="fold")
        skipped.add_column("reason", overflow="fold")
        for name, reason in list(data.skipped.items())[:shown]:
            skipped.add_row(Text(name), Text(reason))
        console.print(skipped)
        if shown is not None and len(data.skipped) > shown:
            console.print(f"{len(data.skipped) - shown} more with --all")
    for note in data.notes:
        console.print(Text(f"- {note}"))


def numbered(data: OwnData) -> list[tuple[int, str]]:
    """Return number and name of every class, without labels of the one row of unlabelled samples."""
    return list(enumerate(data.images.classes)) if data.labelled else [(-1, "without labels")]


if __name__ == "__main__":
    sys.exit(main())
