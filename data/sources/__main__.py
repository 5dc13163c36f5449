"""What a device holds, before it joins a run: `fedtta data folder:/data/site-a --classes covid,normal`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import Settings, class_names, parse_class_map

from .base import SPLITS, UnusableData, composed
from .own import OwnData, open_source, own_data, skippable

SHOWN = 20


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(prog="fedtta data", description="Show what a device's data hold.")
    made.add_argument("source", help="folder:PATH, npz:FILE, hf:PATH or package.module:Class")
    made.add_argument("--classes", default="", help="the run's classes, or their file (default: the source's own)")
    made.add_argument("--class-map", default="", metavar="OWN=RUN;...", help="the device's class names → the run's")
    made.add_argument("--role", choices=("both", "source", "target"), help="default: both with labels, else target")
    made.add_argument("--window", default="", metavar="LOW,HIGH", help="raw values that become black and white")
    made.add_argument("--max-megapixels", type=float, default=100.0, help="larger images are skipped (100)")
    made.add_argument("--max-skipped", type=float, default=0.1, help="share of samples that may be unusable (0.1)")
    made.add_argument("--all", action="store_true", help=f"list all skipped samples, not only {SHOWN}")
    return made


def main(words: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Scan a source and print its tables; exit status 2 if it cannot take part. Nothing is written."""
    arguments = parser().parse_args(words)
    console = console or Console()
    shown = None if arguments.all else SHOWN
    try:
        limits = Settings(max_megapixels=arguments.max_megapixels, max_skipped=arguments.max_skipped)
        class_map = parse_class_map(arguments.class_map)
        classes = tuple(filter(None, class_names(arguments.classes).split(",")))
        if not classes:
            own, renamed = open_source(arguments.source).classes, {composed(one): to for one, to in class_map.items()}
            classes = tuple(sorted({renamed.get(composed(name), name) for name in own})) or ("unknown",)
        data = own_data(
            arguments.source,
            classes=classes,
            class_map=class_map,
            preprocessing=Preprocessing(window=arguments.window or None),
            max_skipped=1.0,  # shown before it is refused
            max_megapixels=limits.max_megapixels,
            role=arguments.role,
        )
    except (ValueError, OSError) as error:
        if isinstance(error, UnusableData):
            show_skipped(error.skipped, console, shown)
        return refuse(str(error))
    show(data, console)
    show_skipped(data.skipped, console, shown)
    for note in data.notes:
        console.print(Text(f"- {note}"))
    if data.unusable > skippable(limits.max_skipped, data.samples):
        return refuse(f"a run with max-skipped = {limits.max_skipped:g} refuses these data")
    return 0


def refuse(reason: str) -> int:
    """Print why on stderr, in one line, and return the exit status."""
    Console(stderr=True).print(Text(f"error: {reason}"), soft_wrap=True)
    return 2


def show(data: OwnData, console: Console) -> None:
    """Print the samples and groups of each class and split."""
    split = {name: getattr(data.split, name) for name in SPLITS}
    console.print(Text(f"{data.images.name}: {data.used} of {data.samples} samples are used, role {data.role}"))
    table = Table()
    for column in ("class", *SPLITS, "all"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for number, name in numbered(data):
        counts = [int((data.images.labels[part] == number).sum()) for part in split.values()]
        table.add_row(Text(name), *map(str, counts), str(sum(counts)))
    table.add_section()
    groups = [len({data.groups[i] for i in part} - {""}) for part in split.values()]
    for title, counts in (("samples", [len(part) for part in split.values()]), ("groups", groups)):
        table.add_row(title, *map(str, counts), str(sum(counts)))
    console.print(table)


def show_skipped(skipped: Mapping[str, str], console: Console, shown: int | None) -> None:
    """Print the samples that are not used, and why; the first ones only unless `shown` is None."""
    if not skipped:
        return
    table = Table("not used", "reason")
    for name, reason in list(skipped.items())[:shown]:
        table.add_row(Text(name, overflow="fold"), Text(reason, overflow="fold"))
    console.print(table)
    if shown is not None and len(skipped) > shown:
        console.print(f"{len(skipped) - shown} more with --all")


def numbered(data: OwnData) -> list[tuple[int, str]]:
    """Return number and name of every class, without labels of the one row of unlabelled samples."""
    return list(enumerate(data.images.classes)) if data.labelled else [(-1, "without labels")]


if __name__ == "__main__":
    sys.exit(main())
