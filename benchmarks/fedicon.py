"""`fedicon`: FedICON's Tables 1, 2 and 5 to 9 and its Figures 1b and 3, beside the paper's numbers.

A cell is one data set under one shift with one seed, and one domain left out where the shift is a new domain. A cell's
rows are kept in one small file; each training is a run of its own, and a row that is kept is not run again. So tables
can grow over several calls: by seeds, rows and figures.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.atp import require_same
from benchmarks.fedicon_paper import ABLATION, FEDERATED, LONGER, OFFLINE
from benchmarks.fedicon_tables import markdown
from benchmarks.protocol import load_protocol
from benchmarks.record import RESULTS, about, write_json
from benchmarks.run import seeds_of, seeds_word
from benchmarks.stages import stage
from data import load
from models import write_atomically
from server.events import RunError
from server.methods import parse_rows, plan
from server.report import Results
from settings import Settings, SettingsError, assignments

#: Few pictures make few steps: at the paper's rate, 0.01, nobody is done; how these were chosen: chosen.toml.
OFFICE = ("dataset=office10", "learning-rate=0.05", "finetune-epochs=60", "classifier-epochs=300")
#: Name → its settings beside the protocol's. Office-10 has 157 to 1,123 pictures a domain; the split that the paper's
#: numbers are fractions of, FedBN's, trains on equally many. The paper's ResNet-18 for DomainNet has learned ImageNet
#: before: `--set model-options='pretrained=<file>'`.
DATA = {
    "digit5": ("dataset=digit5", "dataset-options=per_domain=2000"),
    "office10": (*OFFICE, "dataset-options="),
    "office10-equal": (*OFFICE, "dataset-options=per_domain=157"),
    "domainnet": ("dataset=domainnet", "dataset-options=", "model=resnet18", "model-options=", "rounds=20"),
}
SHIFTS = ("covariate", "domain")
#: (data, shift) → rows beside the protocol's.
MORE = {
    ("digit5", "covariate"): tuple(one.row for one in ABLATION),
    ("office10", "covariate"): (LONGER,),
    ("office10", "domain"): FEDERATED,
}
FIGURES = ("1b", "3-clients", "3-epochs")
FIGURE_ROWS = {"1b": "fedavg", "3-clients": f"fedavg,{OFFLINE}", "3-epochs": f"fedavg,{OFFLINE}"}
SHARES = (1, 2, 4, 8, 16)  # clients a domain; with five domains the paper's 5 to 80 clients
EPOCHS = (1, 5, 10, 20)
FOUR = 4  # clients of Figure 1b


@dataclass(frozen=True)
class Cell:
    """What one file holds.

    Parameters
    ----------
    table : str
        The table that it belongs to, e.g. "digit5-domain".
    kind : str
        Its place there, e.g. "digit5-domain-usps"; cells of one kind differ in their seeds.
    settings : Settings
        With all rows in `methods`.
    clients : tuple of str
        The column of the table that each client counts for.
    columns : tuple of str
        All columns of the table.
    """

    table: str
    kind: str
    settings: Settings
    clients: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its file and of its run folders."""
        return f"{self.kind}-{self.settings.seed}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fedicon`."""
    parser.add_argument("--data", choices=tuple(DATA), required=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shift", choices=SHIFTS, default="covariate", help="of a table (default: covariate)")
    what.add_argument("--figure", choices=FIGURES, help="run what a figure needs instead (after the table: it shares)")
    parser.add_argument("--seeds", type=seeds_of, default=[1, 2, 3], metavar="1,2,3", help="default: 1,2,3")
    parser.add_argument("--methods", help="rows, with commas between them (default: the paper's and a few more)")
    parser.add_argument("--rounds", type=int, help="training rounds (default: the protocol's)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings")
    parser.add_argument("--folder", type=Path, default=Path("results/fedicon"), help="of the run folders")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "fedicon", help="of what is kept (default: benchmarks/results/fedicon)"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run what is missing, write a file a cell and fedicon.md, print the page.

    Raises
    ------
    SettingsError, RunError
        As `stage`, the data are not there, or what is kept was made with other settings.
    """
    base, domains = base_settings(arguments)
    cells = cells_of(arguments, base, domains)
    everything = [seeded(cell, seed) for seed in arguments.seeds for cell in cells]
    check_kept(arguments.out, everything)  # before the first of them runs
    for number, cell in enumerate(everything):
        console.print(f"{number + 1} of {len(everything)}: {cell.name}", highlight=False)
        fill(arguments.out, arguments.folder, cell)
    page = markdown(list(read_cells(arguments.out).values()), command_line(arguments))
    write_atomically(arguments.out / "fedicon.md", page.encode())
    console.print(page, markup=False, highlight=False)


def base_settings(arguments: argparse.Namespace) -> tuple[Settings, tuple[str, ...]]:
    """Return the protocol's settings for the data set and its rows, and the domains that are at hand.

    Raises
    ------
    SettingsError
        The data are not there, or have fewer than three domains: nothing would be left to learn from.
    """
    base = load_protocol("fedicon", [*DATA[arguments.data], *arguments.set])
    if arguments.rounds is not None:
        base = base.replace(rounds=arguments.rounds)
    rows = base.methods
    more = MORE.get((arguments.data.removesuffix("-equal"), arguments.shift), ())
    rows = ",".join([rows, *(row for row in more if row not in rows.split(","))])
    rows = arguments.methods or (FIGURE_ROWS[arguments.figure] if arguments.figure else rows)
    domains = domains_of(base)
    if len(domains) < 3:
        raise SettingsError(f"--data {arguments.data}: domains {', '.join(domains)}; allowed are three or more")
    return with_domains(base.replace(methods=rows), domains), domains


def domains_of(settings: Settings) -> tuple[str, ...]:
    """Return the domains that are at hand, or those that `dataset-options` names.

    Raises
    ------
    SettingsError
        The data cannot be read.
    """
    options: dict[str, Any] = dict(assignments(settings.dataset_options, "dataset-options"))
    try:
        return load(settings.dataset, settings.data_dir or None, settings.image_size, **options).domains
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error


def with_domains(settings: Settings, domains: Sequence[str], **changes: int) -> Settings:
    """Return settings whose data set is these domains, by name, so that a file says what it was made from."""
    known_options = assignments(settings.dataset_options, "dataset-options")
    options = {**known_options, "domains": ",".join(domains), **changes}
    return settings.replace(dataset_options=";".join(f"{name}={value}" for name, value in options.items()))


def cells_of(arguments: argparse.Namespace, base: Settings, domains: tuple[str, ...]) -> list[Cell]:
    """Return the cells of one seed that were asked for.

    Raises
    ------
    SettingsError
        A figure of other data than the paper's, or one that its domains do not allow.
    """
    data, figure = arguments.data, arguments.figure
    if figure and data != "digit5":
        raise SettingsError(f"--figure {figure}: allowed is --data digit5")
    table = f"{data}-covariate"
    if figure == "1b":
        return figure_1b(base, domains)
    if figure == "3-clients":
        sizes = [share * len(domains) for share in SHARES]
        names = [table, *(f"{data}-clients{size}" for size in sizes[1:])]
        return [covariate(base, domains, name, share) for name, share in zip(names, SHARES, strict=True)]
    if figure == "3-epochs":
        others = [epochs for epochs in EPOCHS if epochs != base.local_epochs]
        changed = [covariate(base.replace(local_epochs=one), domains, f"{data}-epochs{one}") for one in others]
        return [covariate(base, domains, table), *changed]
    if arguments.shift == "covariate":
        return [covariate(base, domains, table)]
    return domain_shift(base, domains, f"{data}-domain", clients=len(domains) - 1)


def covariate(base: Settings, domains: tuple[str, ...], table: str, share: int = 1) -> Cell:
    """Return the cell of clients with a domain each, `share` clients a domain, and corrupted test pictures."""
    settings = base.replace(partition="domain", shifts="corrupted", clients=share * len(domains))
    return Cell(table, table, settings, tuple(name for name in domains for _ in range(share)), domains)


def domain_shift(base: Settings, domains: tuple[str, ...], table: str, **changes: Any) -> list[Cell]:
    """Return a cell for each domain that is left out of training and tested on."""
    settings = base.replace(partition="domain", shifts="unseen_domain").replace(**changes)
    return [
        Cell(table, f"{table}-{name}", settings.replace(unseen_domain=name), (name,) * settings.clients, domains)
        for name in domains
    ]


def figure_1b(base: Settings, domains: tuple[str, ...]) -> list[Cell]:
    """Return four clients of one domain, of a domain each, and of all domains mixed, tested on a domain left out.

    The paper's "standalone" clients share one domain; there is as much to learn from as in the other two cases.

    Raises
    ------
    SettingsError
        Four clients cannot have a domain each, or `per_domain` is not a number above 0.
    """
    sources = len(domains) - 1
    amount = assignments(base.dataset_options, "dataset-options").get("per_domain", 0)
    if FOUR % sources:
        raise SettingsError(f"--figure 1b: {len(domains)} domains; allowed are 3 or 5: {FOUR} clients share the others")
    if not isinstance(amount, int) or amount < 1:
        raise SettingsError(f"--figure 1b: per_domain = {amount!r}; allowed is a number of pictures, 1 or more")
    each = domain_shift(base, domains, "digit5-each", clients=FOUR)
    mixed = domain_shift(base, domains, "digit5-mixed", clients=FOUR, partition="iid")
    pairs = [(own, unseen) for unseen in domains for own in domains if own != unseen]
    columns = tuple(f"{own} to {unseen}" for own, unseen in pairs)
    one = []
    for (own, unseen), column in zip(pairs, columns, strict=True):
        settings = with_domains(base, (own, unseen), per_domain=sources * amount)
        settings = settings.replace(partition="domain", shifts="unseen_domain", unseen_domain=unseen, clients=FOUR)
        one.append(Cell("digit5-one", f"digit5-one-{own}-{unseen}", settings, (column,) * FOUR, columns))
    return [*one, *each, *mixed]


def seeded(cell: Cell, seed: int) -> Cell:
    """Return a cell with another seed."""
    return Cell(cell.table, cell.kind, cell.settings.replace(seed=seed), cell.clients, cell.columns)


def read_cells(out: Path) -> dict[Path, dict[str, Any]]:
    """Return path → what is kept of every cell."""
    return {path: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def check_kept(out: Path, cells: Sequence[Cell]) -> None:
    """Raise SettingsError unless a table's seeds, kept and to come, differ in nothing but their seeds and rows."""
    kept = read_cells(out)
    for cell in cells:
        plan(cell.settings)  # an unknown row, or one that does not fit, is refused here
        for path, content in kept.items():
            if content["kind"] == cell.kind:
                free = {"seed": cell.settings.seed, "methods": cell.settings.methods}
                require_same(path, {**content["settings"], **free}, cell.settings)


def fill(out: Path, folder: Path, cell: Cell) -> None:
    """Run the rows of a cell that are not kept, a training at a time, and keep what the tables need.

    Raises
    ------
    SettingsError, RunError
        As `stage`, or a client has no accuracy.
    """
    path = out / f"{cell.name}.json"
    content = json.loads(path.read_text()) if path.exists() else empty(cell)
    missing = [row.label for row in parse_rows(cell.settings.methods) if row.label not in content["accuracy_percent"]]
    trainings = plan(cell.settings.replace(methods=",".join(missing))) if missing else []
    for training in trainings:
        labels = [row.label for row in training.rows]
        earlier = sum(one["training"] == training.name for one in content["runs"])
        place = folder / "-".join([cell.name, training.name, *([str(earlier + 1)] if earlier else [])])
        results = stage(place, cell.settings.replace(methods=",".join(labels)))
        for label in labels:
            content["accuracy_percent"][label] = accuracies(results, label, cell)
        content["test_samples"] = sizes(results, labels[0])
        content["runs"].append({"training": training.name, "methods": labels, **about(results)})
        write_json(path, content)


def empty(cell: Cell) -> dict[str, Any]:
    """Return what a cell's file holds before its first run."""
    settings = {key: value for key, value in cell.settings.flat().items() if key != "methods"}
    place = {"table": cell.table, "kind": cell.kind, "seed": cell.settings.seed}
    columns = {"columns": list(cell.columns), "clients": list(cell.clients)}
    return {**place, **columns, "settings": settings, "accuracy_percent": {}, "test_samples": [], "runs": []}


def accuracies(results: Results, label: str, cell: Cell) -> list[float]:
    """Return a row's accuracy in percent at each client.

    Raises
    ------
    RunError
        A client has none: a mean over fewer compares with nothing.
    """
    found = {one.partition: one for one in results.evaluations if one.method == label and one.total}
    absent = [client for client in range(cell.settings.clients) if client not in found]
    if absent:
        raise RunError(f"{cell.name}: clients {absent} have no accuracy of {label}")
    return [round(100 * found[one].correct / found[one].total, 4) for one in range(cell.settings.clients)]


def sizes(results: Results, label: str) -> list[int]:
    """Return how many samples each client was tested on."""
    found = {one.partition: one.total for one in results.evaluations if one.method == label}
    return [found[one] for one in sorted(found)]


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command that fills these cells again."""
    what = ["--figure", arguments.figure] if arguments.figure else ["--shift", arguments.shift]
    words = ["python", "-m", "benchmarks", "fedicon", "--data", arguments.data, *what]
    words += ["--seeds", seeds_word(arguments.seeds)]
    words += ["--methods", arguments.methods] if arguments.methods else []
    words += ["--rounds", str(arguments.rounds)] if arguments.rounds is not None else []
    return shlex.join([*words, *(["--set", *arguments.set] if arguments.set else [])])
