"""FedICON's numbers beside ours: the page that `fedicon` writes from its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.fedicon_paper import ABLATION, FEDERATED, LONGER, OFFLINE, PAPER, PAPERS_NAMES, TABLE_9
from benchmarks.summary import spread
from settings import Settings

#: Ours that should be above the others on average.
OURS, OTHERS = (OFFLINE, "fedicon", LONGER, *FEDERATED), ("fedavg", "fedavg_ft", "tent")
MISSING = "–"
#: What is set beside Table 9.
TABLES_9 = ("digit5-covariate", "office10-equal-covariate")

Cell = Mapping[str, Any]
#: row → seed → column → accuracy in percent.
Scores = dict[str, dict[int, dict[str, float]]]
ARMS = {
    "digit5-one": "one domain for all",
    "digit5-each": "a domain or two for each",
    "digit5-mixed": "all domains mixed",
}


def markdown(cells: Sequence[Cell], command: str) -> str:
    """Return the page; what has not been run is a dash or not there."""
    parts = ["# FedICON", *(section(cells, table) for table in PAPER if _of(cells, table))]
    if _of(cells, "digit5-covariate"):
        parts += [ablation(cells)]
    if any(_of(cells, table) for table in TABLES_9):
        parts += [unsupervised(cells)]
    parts += [figure_1b(cells), figure_3(cells, "clients"), figure_3(cells, "epochs"), _where(cells)]
    return "\n\n".join(part for part in [*parts, f"```\n{command}\n```"] if part) + "\n"


def scores(cells: Sequence[Cell], table: str) -> Scores:
    """Return a table's accuracies: means over the clients that count for a column."""
    found: Scores = {}
    for cell in _of(cells, table):
        for row, values in cell["accuracy_percent"].items():
            of_seed = found.setdefault(row, {}).setdefault(cell["seed"], {})
            for column in dict.fromkeys(cell["clients"]):
                mine = [v for v, own in zip(values, cell["clients"], strict=True) if own == column]
                of_seed[column] = float(np.mean(mine))
    return found


def averages(row: Mapping[int, Mapping[str, float]], columns: Sequence[str]) -> dict[int, float]:
    """Return seed → mean over the columns, for seeds that have all of them."""
    complete = {seed: found for seed, found in sorted(row.items()) if all(column in found for column in columns)}
    return {seed: float(np.mean([found[column] for column in columns])) for seed, found in complete.items()}


def section(cells: Sequence[Cell], table: str) -> str:
    """Return one table with the paper's number beside each, and where FedICON stands."""
    paper, found, columns, seeds = PAPER[table], scores(cells, table), _columns(cells, table), _seeds(cells, table)
    only = {variant.row for variant in ABLATION} - set(PAPERS_NAMES)
    lines = []
    for row in [*PAPERS_NAMES, *(row for row in found if row not in PAPERS_NAMES and row not in only)]:
        of_row = found.get(row, {})
        by_column = {name: [of_row[s][name] for s in seeds if name in of_row.get(s, {})] for name in columns}
        theirs = {name: paper.value(row, name) for name in columns} | {"average": paper.average(row, columns)}
        ours = by_column | {"average": list(averages(of_row, columns).values())}
        lines.append([f"`{row}`", *(_pair(ours[name], len(seeds), theirs[name]) for name in ours)])
    parts = [
        f"## {paper.title}",
        setting(cells, table),
        _table(["row", *(f"{name}: here / paper" for name in (*columns, "average"))], lines),
        "\n".join(f"- {line}" for line in verdicts(cells, table)),
    ]
    return "\n\n".join(part for part in parts if part)


def setting(cells: Sequence[Cell], table: str) -> str:
    """Say what the numbers of a table are, and what the paper had instead."""
    cell, paper, seeds = _of(cells, table)[0], PAPER[table], _seeds(cells, table)
    known, absent = cell["settings"], [name for name in paper.columns if name not in _columns(cells, table)]
    over = f"mean ± sd over the seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    half = ", local training in bfloat16" if known["autocast"] else ""
    words = [
        f"Accuracy in %, {over}; beside it the paper's mean of three runs. {known['model']}, {known['model-options']}; "
        f"{known['rounds']} rounds (the paper: 100) and {known['classifier-rounds']} of the classifier{half}; "
        f"{len(cell['clients'])} clients, tested on {', '.join(map(str, cell['test_samples']))} pictures; "
        f"`{known['dataset-options']}`.",
    ]
    if absent:
        words.append(
            f"Not in it, as not at hand or not asked for: {', '.join(absent)}. The paper's clients learned from these "
            "too; both averages are over the columns here."
        )
    return " ".join(words)


def verdicts(cells: Sequence[Cell], table: str) -> list[str]:
    """Say whether FedICON is above the others on the average over domains, over the seeds that both have."""
    found, columns, paper = scores(cells, table), _columns(cells, table), PAPER[table]
    lines = []
    for mine in OURS:
        for other in OTHERS:
            high, low = (averages(found.get(row, {}), columns) for row in (mine, other))
            both = [seed for seed in high if seed in low]
            if not both:
                continue
            a, b = (float(np.mean([one[seed] for seed in both])) for one in (high, low))
            often = sum(high[seed] > low[seed] for seed in both)
            theirs = (paper.average(mine, columns), paper.average(other, columns))
            beside = f"; the paper: {theirs[0]:.2f} and {theirs[1]:.2f}" if None not in theirs else ""
            lines.append(
                f"`{mine}` is {'above' if a > b else '**not above**'} `{other}` on average: {a:.2f} and {b:.2f}, "
                f"higher in {often} of {len(both)} seeds{beside}."
            )
    return lines


def ablation(cells: Sequence[Cell]) -> str:
    """Return Table 8."""
    lines = []
    for one in ABLATION:
        parts = ["✓" if part else "" for part in (one.extraction, one.sharing, one.adaptation)]
        lines.append([*parts, f"`{one.row}`", *_average(cells, "digit5-covariate", one.row, one.paper)])
    head = ["invariance extraction", "global sharing", "test-time adaptation", "row", "here", "paper"]
    words = "Average over domains. Without extraction the loss is cross-entropy and nobody fine-tunes."
    return "\n\n".join(["## Digit-5, covariate shift: components (Table 8)", words, _table(head, lines)])


def unsupervised(cells: Sequence[Cell]) -> str:
    """Return Table 9."""
    lines = []
    for row, digits in TABLE_9["digit5"].items():
        office = TABLE_9["office10"][row]
        papers = zip(TABLES_9, (digits, office), strict=True)
        lines.append([f"`{row}`", *(text for table, paper in papers for text in _average(cells, table, row, paper))])
    words = (
        "Average over domains, the paper's over all of its five and four. FedICON-us trains its encoder unlabelled. "
        "Office-10's clients are of equal size here."
    )
    head = ["row", "Digit-5: here", "paper", "Office-10: here", "paper"]
    return "\n\n".join(["## Without labels in the encoder's training (Table 9)", words, _table(head, lines)])


def figure_1b(cells: Sequence[Cell]) -> str:
    """Return Figure 1b's three federations; nothing if none has been run."""
    lines = [[text, *_average(cells, table, "fedavg", None)[:1]] for table, text in ARMS.items() if _of(cells, table)]
    if not lines:
        return ""
    words = (
        "FedAvg on a domain that no client has, mean over the domains left out (with one domain for all, over all "
        "pairs); four clients, as much to learn from in each row. The paper prints no numbers."
    )
    table = _table(["four clients have", "accuracy"], lines)
    return "\n\n".join(["## Digit-5: heterogeneous sources and domain shift (Figure 1b)", words, table])


def figure_3(cells: Sequence[Cell], what: str) -> str:
    """Return Figure 3's table over "clients" or local "epochs"; nothing if its own cells have not been run."""
    own = [cell for cell in cells if cell["table"].startswith(f"digit5-{what}")]
    if not own:
        return ""
    key = "clients" if what == "clients" else "local-epochs"
    tables = {cell["settings"][key]: cell["table"] for cell in [*own, *_of(cells, "digit5-covariate")]}
    lines = [
        [str(number), *(_average(cells, tables[number], row, None)[0] for row in ("fedavg", OFFLINE))]
        for number in sorted(tables)
    ]
    words = "Average over domains; the same pictures in all." if what == "clients" else "Average over domains."
    head = [key, "`fedavg`", f"`{OFFLINE}`"]
    return "\n\n".join([f"## Digit-5, covariate shift: {key} (Figure 3)", words, _table(head, lines)])


def _average(cells: Sequence[Cell], table: str, row: str, paper: float | None) -> list[str]:
    """Return the average over a table's columns, and the paper's number, as texts."""
    values: list[float] = []
    if _of(cells, table):
        values = list(averages(scores(cells, table).get(row, {}), _columns(cells, table)).values())
    here = _pair(values, len(_seeds(cells, table)), None)
    return [here, MISSING if paper is None else f"{paper:.2f}"]


def _pair(ours: Sequence[float], seeds: int, paper: float | None) -> str:
    """Return ours beside the paper's; fewer seeds than the table has are said."""
    here = spread(ours) if ours else MISSING
    if ours and len(ours) < seeds:
        here += f" ({len(ours)} of {seeds} seeds)"
    return here if paper is None else f"{here} / {paper:.2f}"


def _where(cells: Sequence[Cell]) -> str:
    """Say where and how long all of it ran, and with which settings."""
    runs = [run for cell in cells for run in cell["runs"]]
    default, free = Settings().flat(), ("seed", "methods", "clients", "unseen-domain", "dataset-options", "data-dir")
    shown = {key: value for key, value in cells[0]["settings"].items() if key not in free and value != default[key]}
    versions = " and ".join(
        dict.fromkeys(f"torch {r['versions'].get('torch')}, flwr {r['versions'].get('flwr')}" for r in runs)
    )
    words = [
        f"{len(runs)} runs, {sum(run['wall_seconds'] for run in runs) / 60:.0f} minutes in all, on "
        f"{' and '.join(dict.fromkeys(run['hardware'] for run in runs))}; {versions}; commits "
        f"{', '.join(dict.fromkeys(str(run['commit']) for run in runs))}.",
        f"Settings of `{cells[0]['kind']}` that differ from the defaults: "
        + ", ".join(f"`{key} = {value!r}`" for key, value in shown.items()),
    ]
    return "\n\n".join(words)


def _of(cells: Sequence[Cell], table: str) -> list[Cell]:
    return [cell for cell in cells if cell["table"] == table]


def _columns(cells: Sequence[Cell], table: str) -> list[str]:
    return list(_of(cells, table)[0]["columns"])


def _seeds(cells: Sequence[Cell], table: str) -> list[int]:
    return sorted({cell["seed"] for cell in _of(cells, table)})


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (len(head) - 1)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
