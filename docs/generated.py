"""The generated parts of the site: tables read from the code's registries and from the kept results.

`section(name)` returns the Markdown that replaces a marker of a written page, `pages()` the pages that are generated
as a whole: one for each package's API, and one for each protocol or result file that no written page presents.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from docs.markdown import PROVENANCE, as_markdown, table, value_text

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
#: Packages with a page of their own in the API reference, in the order of the architecture.
PACKAGES = (
    "settings",
    "messages",
    "privacy",
    "models",
    "data",
    "tta",
    "strategies",
    "client",
    "server",
    "simulation",
    "watch",
)
#: Section of the navigation → folder of its pages.
FOLDERS = {"API": "api", "Results": "results"}


def section(name: str) -> str:
    """Return the Markdown of a marker such as `settings` or `kept brfl`.

    Raises
    ------
    KeyError
        No generator has this name, or nothing is kept under it; the known names are listed.
    """
    kind, _, argument = name.partition(" ")
    if kind == "kept":
        return _of(kept(), argument)
    return _of(SECTIONS, kind)()


def _of(choices: Mapping[str, Any], name: str) -> Any:
    if name not in choices:
        raise KeyError(f"nothing is called {name!r}; there are: {', '.join(choices)}")
    return choices[name]


# Registries


def settings() -> str:
    """Return the reference of all settings, a table for each group; the first group of a setting is its section."""
    from fedtta.settings import Settings, schema

    return _reference(Settings, getattr(schema, "GROUPS", {}))


def agent() -> str:
    """Return the reference of all keys of an agent's configuration."""
    from fedtta.client.config import AgentConfig

    return _reference(AgentConfig, {})


def policy() -> str:
    """Return the reference of all rules of an owner's policy."""
    from fedtta.client.policy import Policy

    return _reference(Policy, {})


def _reference(kind: type, about: Mapping[str, str]) -> str:
    """Return tables of the fields of a class of settings; `about` describes its groups."""
    hints = get_type_hints(kind)
    sections: dict[str, list[list[str]]] = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):  # a table of its own
            continue
        section, *others = field.metadata.get("groups") or ("",)
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        meaning = field.metadata["help"] + (f" (also: {', '.join(others)})" if others else "")
        row = [f"`{field.name.replace('_', '-')}`", hints[field.name].__name__, default, _allowed(field), meaning]
        sections.setdefault(section, []).append(row)
    parts = []
    for name, rows in sections.items():
        parts += [f"## {name}", about.get(name, "")] if name else []
        parts.append(table(["key", "type", "default", "allowed", "meaning"], rows))
    return "\n\n".join(parts)


def _allowed(field: dataclasses.Field[Any]) -> str:
    rule = field.metadata
    if rule.get("choices"):
        return ", ".join(f"`{choice}`" for choice in rule["choices"])
    bounds = (("≥", "low"), (">", "above"), ("≤", "high"))
    return ", ".join(f"{sign} {rule[name]:,}" for sign, name in bounds if rule.get(name) is not None)


def commands() -> str:
    """Return the tables of the words of `fedtta`, a table for each of the groups of its help."""
    from typer.main import get_command

    from fedtta import cli

    tree: Any = get_command(cli.app)
    rows: dict[str, list[list[str]]] = {}
    for name, one in tree.commands.items():
        below = getattr(one, "commands", {})
        found = {f"{name} {path}": command for path, command in below.items()} or {name: one}
        for path, command in found.items():
            about = command.short_help or (command.help or "").partition("\n")[0]
            rows.setdefault(one.rich_help_panel, []).append([f"`fedtta {path}`", about])
    order = [panel for panel in (cli.TRY, cli.FEDERATION, cli.DEVICE, cli.RESULTS) if panel in rows]
    return "\n\n".join(f"## {panel}\n\n{table(['command', 'what it does'], rows[panel])}" for panel in order)


def methods() -> str:
    """Return the table of methods: training, adapter, what adapts at test time, and what each needs."""
    from fedtta.benchmarks.tables.methods import entries

    rows = [
        [f"`{one.method}`", one.summary, f"`{one.training}`", one.adapts, "; ".join(one.needs), one.per, one.base]
        for one in entries()
    ]
    return table(["method", "what it is", "training", "adapts at test time", "needs", "per", "network"], rows)


def adapters() -> str:
    """Return the table of adapters with their papers."""
    from fedtta.tta.registry import ADAPTERS

    rows = [[f"`{name}`", one.adapts, one.paper, "yes" if one.collaborates else ""] for name, one in ADAPTERS.items()]
    return table(["adapter", "adapts", "paper", "collaborates"], rows)


def constants() -> str:
    """Return the table of every method's constants: paper, published code, ours, and why."""
    from fedtta.benchmarks.constants import constants

    rows = [
        [f"`{one.method}`", one.constant, one.paper, one.code, one.default, f"`{one.at}`" if one.at else "", one.why]
        for one in constants()
    ]
    return table(["method", "constant", "paper", "published code", "ours", "set by", "why"], rows)


def trainings() -> str:
    """Return the table of federated trainings with their papers."""
    from fedtta.server.trainings import TRAININGS

    return table(["training", "what it is"], [[f"`{name}`", one.summary] for name, one in TRAININGS.items()])


def collaborations() -> str:
    """Return the table of rules by which clients help each other at test time."""
    from fedtta.strategies import COLLABORATIONS

    return table(["rule", "class", "what it does"], [_class_row(*item) for item in COLLABORATIONS.items()])


def models() -> str:
    """Return the table of backbones with their options."""
    from fedtta.models import MODELS

    rows = [
        [f"`{name}`", one.summary, _names(one.own_options), one.normalisation or ""] for name, one in MODELS.items()
    ]
    return table(["model", "what it is", "options", "normalization"], rows)


def datasets() -> str:
    """Return the table of data sets."""
    from fedtta.data import DATASETS

    rows = [[f"`{name}`", one.description, _names(one.options), _names(one.natural)] for name, one in DATASETS.items()]
    return table(["data set", "what it is", "options", "natural shifts"], rows)


def shifts() -> str:
    """Return the table of test distributions."""
    from fedtta.data import SHIFTS

    return table(["test distribution", "samples"], [[f"`{name}`", one.description] for name, one in SHIFTS.items()])


def protocols() -> str:
    """Return the list of the papers' protocols with their descriptions."""
    from fedtta.benchmarks.tables.protocol_file import protocol_names, read_protocol

    rows = [[f"`{name}`", " ".join(read_protocol(name).about.split())] for name in protocol_names()]
    return table(["protocol", "what it is"], rows)


def tuning() -> str:
    """Return the hyperparameters that were chosen on validation data, with every value tried."""
    from fedtta.benchmarks.tables.tuning import choices

    rows = [
        [
            one.where,
            f"`{one.key} = {one.value}`",
            ", ".join(f"{value}: {p:.1f} %" for value, p in one.percent.items()),
            one.of,
        ]
        for one in choices()
    ]
    return table(["protocol", "chosen", "accuracy of each value", "measured with"], rows)


def metrics() -> str:
    """Return the table of the metrics at `/metrics`, those that an agent has, too, first."""
    from fedtta.messages import exposition
    from fedtta.watch.metrics import documented

    at_agents = {one.exposed for one in exposition.METRICS}
    rows = [
        [f"`{name}`", kind, _names(labels.split(", ")) if labels else "", "yes" if name in at_agents else "", about]
        for name, kind, labels, about in documented()
    ]
    return table(["metric", "type", "labels", "at an agent, too", "meaning"], rows)


def fields_that_leave() -> str:
    """Return a table for each reply: what each field tells the server, and what protects it."""
    from docs.leaving import rows
    from fedtta.messages.replies import REPLIES

    parts = []
    for kind, reply in REPLIES.items():
        head = ["field", "what it tells", "protection"]
        parts += [f"### `{kind}`", (reply.__doc__ or "").partition("\n")[0], table(head, rows(reply))]
    return "\n\n".join(parts)


def privacy() -> str:
    """Return what messages tell of clients' class mix and what hiding it costs, as measured: a table for each file."""
    parts = []
    for path in sorted(RESULTS.glob("privacy*.json")):
        content = json.loads(path.read_text())
        rows = [[value_text(one) for one in row.values()] for row in content["modes"]]
        measured = "; ".join(value_text(content[key]) for key in PROVENANCE)
        settings = ", ".join(f"{key} = {value_text(value)}" for key, value in content["settings"].items())
        about = f"Seeds {value_text(content['seeds'])}; {settings}. Measured: {measured}."
        parts += [f"### {content['title']}", table(list(content["modes"][0]), rows), about]
    return "\n\n".join(parts)


def leaders() -> str:
    """Return the best rows of each test distribution, a table for each protocol."""
    from fedtta.benchmarks.tables.pairs import leaders_table

    return _of_protocols(leaders_table)


def parts() -> str:
    """Return what each part of pFedBBN brings."""
    from fedtta.benchmarks.tables.pairs import parts_table
    from fedtta.benchmarks.tables.protocol_file import read_protocol
    from fedtta.benchmarks.tables.results import read_results_of

    return parts_table(read_protocol("pfedbbn"), read_results_of(RESULTS, "pfedbbn")["pfedbbn"])


def choices() -> str:
    """Return `auto` beside fixed adapters by shift and by client, two tables for each protocol with such a row."""
    from fedtta.benchmarks.tables.pairs import choices_table, worst_table

    def both(protocol: Any, cells: Any) -> str:
        return "\n\n".join(filter(None, (choices_table(protocol, cells), worst_table(protocol, cells))))

    return _of_protocols(both)


def _of_protocols(made: Callable[[Any, Any], str]) -> str:
    """Return what is made of each protocol and its kept cells, under the protocol's name."""
    from fedtta.benchmarks.tables.protocol_file import read_protocol
    from fedtta.benchmarks.tables.results import read_results_of

    tables = {name: made(read_protocol(name), cells) for name, cells in read_results_of(RESULTS).items()}
    return "\n\n".join(f"### {name}\n\n{text}" for name, text in tables.items() if text)


def _class_row(name: str, kind: type) -> list[str]:
    return [f"`{name}`", f"`{kind.__name__}`", (kind.__doc__ or "").strip().partition("\n")[0]]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


SECTIONS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "agent": agent,
    "policy": policy,
    "commands": commands,
    "methods": methods,
    "adapters": adapters,
    "constants": constants,
    "trainings": trainings,
    "collaborations": collaborations,
    "models": models,
    "datasets": datasets,
    "shifts": shifts,
    "protocols": protocols,
    "tuning": tuning,
    "leaders": leaders,
    "choices": choices,
    "parts": parts,
    "metrics": metrics,
    "leaving": fields_that_leave,
    "privacy": privacy,
}


# Kept results


@cache
def kept() -> dict[str, str]:
    """Return name → everything that is kept under it as Markdown: protocols, speed, and labels of kept networks.

    The one place that depends on how `benchmarks` keeps and draws its results.
    """
    from fedtta.benchmarks.gpu import command as gpu
    from fedtta.benchmarks.poisoning import poisoning_page, read_poisoning
    from fedtta.benchmarks.speed import command, fleet
    from fedtta.benchmarks.tables.drift import drift_page, read_drift
    from fedtta.benchmarks.tables.estimates import estimates_page, read_estimates
    from fedtta.benchmarks.tables.pages import protocol_page
    from fedtta.benchmarks.tables.protocol_file import read_protocol
    from fedtta.benchmarks.tables.results import read_results_of

    found = {name: [protocol_page(read_protocol(name), cells)] for name, cells in read_results_of(RESULTS).items()}
    speed = command.read_speed(RESULTS / command.FILE)
    details = [f"### {name}\n\n{as_markdown(part['details'], 4)}" for name, part in speed.items() if part["details"]]
    found["speed"] = [command.speed_page(speed), "## Details", *details]
    found["fleet"] = [f"# Fleet\n{command.tables_of(command.read_speed(RESULTS / fleet.FILE)).replace('## ', '### ')}"]
    found["gpu"] = [gpu.gpu_page(gpu.read_gpu(RESULTS / gpu.FILE))]
    found["poisoning"] = [poisoning_page(read_poisoning())]
    found["drift"] = [drift_page(read_drift())]
    found["estimates"] = [estimates_page(read_estimates())]
    for path in sorted(RESULTS.rglob("*.safetensors.json")):
        name = path.stem.removesuffix(".safetensors") if path.parent == RESULTS else path.parent.name
        label = f"## Kept arrays: {path.stem}\n\n{as_markdown(json.loads(path.read_text()), 3)}"
        found.setdefault(name, [f"# {name}"]).append(label)
    return {name: "\n\n".join(parts).partition("\n")[2].strip() for name, parts in found.items()}  # without its title


# Pages


def pages() -> dict[str, str]:
    """Return path → text of every page that is generated as a whole."""
    found = {f"api/{package}.md": _api_page(package) for package in PACKAGES}
    found["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    found["deployment/containers.md"] = (ROOT / "docker" / "README.md").read_text()
    written = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    claimed = set(re.findall(r"generated: kept (\S+) -->", written))
    for name, text in kept().items():
        if name not in claimed:
            found[f"results/{name}.md"] = f"# {name}\n\n{text}\n"
    return found


def _api_page(package: str) -> str:
    """Return the page of a package: its own docstring, then a section for each public module in it."""
    parts = [f"# `fedtta.{package}`"]
    for path in sorted((ROOT / package).rglob("*.py")):
        words = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(("fedtta", *(words[:-1] if words[-1] == "__init__" else words)))
        if any(word.startswith("_") for word in name.split(".")) or "_pb2" in name:
            continue  # private, or generated from a .proto file
        level = max(2, len(name.split(".")) - 1)
        options: dict[str, Any] = {
            "heading_level": level,
            "show_root_heading": name != f"fedtta.{package}",
            "show_root_toc_entry": name != f"fedtta.{package}",
        }
        if path.name == "__init__.py":  # what it re-exports is shown in the section of its module
            options["members"] = _defined(path)
        lines = "".join(f"\n      {key}: {json.dumps(value)}" for key, value in options.items())
        parts.append(f"::: {name}\n    options:{lines}")
    return "\n\n".join(parts) + "\n"


def _defined(path: Path) -> list[str]:
    """Return the public names that a module itself defines."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def navigation(folder: str) -> list[tuple[str, str]]:
    """Return (title, path) of the pages in a folder, written and generated, but for its index."""
    written = [path.relative_to(DOCS).as_posix() for path in sorted((DOCS / folder).glob("*.md"))]
    found = dict.fromkeys([*written, *(path for path in pages() if path.startswith(f"{folder}/"))])
    return [(_title(path), path) for path in found if Path(path).name != "index.md"]


def _title(path: str) -> str:
    page = DOCS / path
    text = page.read_text() if page.exists() else pages()[path]
    return text.partition("\n")[0].lstrip("# ").replace("`", "")
