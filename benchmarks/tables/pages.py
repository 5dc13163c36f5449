"""The page of one protocol: every cell's table beside the paper's, and all that is needed to make it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import Content, kept
from benchmarks.protocol import Cell, Protocol, read_protocol
from benchmarks.summary import Summary, beyond_words, shares, spread, summarise, to_markdown
from models import write_atomically
from settings import Settings

PAGE = "README.md"


def write_page(name: str, out: Path, command: str) -> Path:
    """Write `<out>/<protocol>/README.md` from all that is kept of a protocol, and return its path."""
    contents = kept(out).get(name, {})
    page = markdown_page(read_protocol(name), contents, command)
    return write_atomically(out / name / PAGE, page.encode())


def markdown_page(protocol: Protocol, contents: Mapping[str, Mapping[int, Content]], command: str) -> str:
    """Return the page; `contents` is cell → seed → what is kept."""
    parts = [f"# {protocol.name}", protocol.about]
    parts += [section(protocol.name, cell, contents[cell.name]) for cell in protocol.cells if cell.name in contents]
    if absent := [cell.name for cell in protocol.cells if cell.name not in contents]:
        parts.append(f"Not run: {', '.join(absent)}.")
    return "\n\n".join([*parts, f"```\n{command}\n```"]) + "\n"


def section(protocol: str, cell: Cell, kept_cell: Mapping[int, Content]) -> str:
    """Return a cell's table, what of the gap is recovered, where it ran and with which settings."""
    summary = summarise(cell, kept_cell)
    first = kept_cell[min(kept_cell)]
    default = Settings().flat()
    own = {key: value for key, value in first["settings"].items() if key != "seed" and value != default.get(key)}
    beside = ""
    if cell.reference is not None:
        beside = f"; behind the bar the paper's mean ({cell.reference.paper}, Table {cell.reference.table})"
    parts = [
        "" if cell.title == protocol else f"## {cell.title}",
        f"Accuracy in %, mean over {cell.weighting}; {over(summary.seeds)}{beside}.",
        to_markdown(summary),
        beyond_words(summary, cell.reference.why) if cell.reference is not None else "",
        "\n".join(f"- {line}" for line in share_lines(summary)),
        "\n".join(f"- Seed {seed}: {run_words(content)}." for seed, content in sorted(kept_cell.items())),
        "\n".join(f"- {note}" for note in dict.fromkeys(n for one in kept_cell.values() for n in one["notes"])),
        "Settings that differ from the defaults: " + ", ".join(f"`{key} = {value!r}`" for key, value in own.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def over(seeds: Sequence[int]) -> str:
    """Say over which seeds a mean is."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"mean ± standard deviation (divided by n) over the seeds {', '.join(map(str, seeds))}"


def share_lines(summary: Summary) -> list[str]:
    """Return one line a row: the share of the gap personal → FedAvg that it recovers out of client."""
    parts = {method: spread(values) for method, values in shares(summary).items()}
    words = "of the gap personal → FedAvg recovered on out_of_client"
    return [f"{method}: {text} % {words}" if text != "–" else f"{method}: no gap" for method, text in parts.items()]


def run_words(content: Content) -> str:
    """Say of one seed where it ran, for how long, and that its test samples were new to it."""
    runs: Sequence[Mapping[str, Any]] = content["runs"]
    first = runs[0]
    checked = sum(run["test_samples_checked"] for run in runs)
    leaked = sum(run["test_samples_trained_on"] for run in runs)
    known = [run for run in runs if "start" in run]
    words = [
        start_words(known[0]["start"]) if known else "",
        f"{checked} test samples, by index {leaked or 'none'} of them trained on",
        f"{sum(run['wall_seconds'] for run in runs):.0f} s on {first['hardware']}",
        f"torch {first['versions'].get('torch', '?')}, flwr {first['versions'].get('flwr', '?')}",
        f"commit {', '.join(dict.fromkeys(run['commit'] for run in runs if run['commit']))}",
    ]
    return "; ".join(word for word in words if word)


def start_words(start: Mapping[str, Any]) -> str:
    """Say what network a run started from."""
    accuracy = start["validation_accuracy"]
    return f"started from a {start['kind']} network" + (f" (validation {100 * accuracy:.2f} %)" if accuracy else "")
