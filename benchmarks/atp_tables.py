"""ATP's numbers beside ours: the page that `atp` writes from its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.papers import values
from settings import Scalar

#: Rows: method → what the tables call it.
ROWS = {
    "fedavg": "no adaptation",
    "atp": "ATP-batch",
    "atp[mode=online]": "ATP-online",
    "atp[adapt=params]": "ATP-params",
    "atp[adapt=stats]": "ATP-stats",
}
SHIFTS = ("feature", "label", "hybrid")


def _accuracies(table: str, **setting: Scalar) -> dict[str, dict[str, float]]:
    """Return method → shift → the paper's accuracy in percent, of the methods that are rows here."""
    found = {shift: values("atp", table, shift, **setting) for shift in SHIFTS}
    return {method: {shift: found[shift][method] for shift in SHIFTS} for method in ROWS if method in found["hybrid"]}


def _gains(accuracies: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    return {shift: accuracies[shift] - base[shift] for shift in SHIFTS}


#: Shallow CNN: method → shift → accuracy in percent.
TABLE_5 = _accuracies("5", model="shallow-cnn", dataset="cifar10")
_RESNET = _accuracies("4")
#: ResNet-18: method → shift → gain over no adaptation.
TABLE_4 = {method: _gains(row, _RESNET["fedavg"]) for method, row in _RESNET.items() if method != "fedavg"}
#: ResNet-18: the shift that rates were learned on → the shift that they are tested on → gain over no adaptation.
TABLE_3 = {learned: _gains(_accuracies("3", rates_learned_on=learned)["atp"], _RESNET["fedavg"]) for learned in SHIFTS}
STATISTICS = ("running_mean", "running_var")
MISSING = "–"

#: name of a cell → what it holds: "<shift>-<variant>" and "<learned on>-on-<tested on>".
Cells = Mapping[str, Mapping[str, Any]]


def markdown(cells: Cells, shifts: Sequence[str], seed: int, command: str) -> str:
    """Return the page: our accuracy and gain beside the paper's; what has not been run is a dash."""
    heads = [f"{shift}: here / paper" for shift in shifts]
    rounds = ", ".join(
        f"{s} {' + '.join(map(str, cells[f'{s}-all']['rounds']))}" for s in shifts if f"{s}-all" in cells
    )
    known = next(iter(cells.values()))
    parts = [
        "# ATP on CIFAR-10, shallow CNN",
        f"Accuracy in % on 60 target clients, seed {seed}; gain over no adaptation in brackets, beside it the paper's "
        f"(Table 5). Rounds of global training + of rates: {rounds} (the paper: 200 + 400).",
        _table(["method", *heads], [[ROWS[m], *(_main(cells, m, s) for s in shifts)] for m in TABLE_5]),
        "Gain of the variants (the paper's for ResNet-18, Table 4):",
        _table(["method", *heads], [[ROWS[m], *(_gain(cells, m, s, TABLE_4[m][s]) for s in shifts)] for m in TABLE_4]),
        "Gain of rates learned on one shift (row) and tested on another (column); the paper's (Table 3) for ResNet-18:",
        _table(["learned on", *heads], [[one, *(_cross(cells, one, s) for s in shifts)] for one in shifts]),
        "Mean learned rate of BatchNorm's running mean and variance:",
        _table(
            ["shift", *STATISTICS], [[s, *statistics_rates(cells[f"{s}-all"])] for s in shifts if f"{s}-all" in cells]
        ),
        f"{known['hardware']}; torch {known['versions'].get('torch')}, flwr {known['versions'].get('flwr')}.",
        f"```\n{command}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def statistics_rates(cell: Mapping[str, Any]) -> list[str]:
    """Return the mean learned rate of running means and of running variances (paper, Fig. 4, right)."""
    rates = cell["rates"]
    return [f"{np.mean([rate for name, rate in rates.items() if name.endswith(kind)]):+.4f}" for kind in STATISTICS]


def accuracy(cells: Cells, method: str, shift: str) -> float | None:
    """Return a method's accuracy on a shift, None where it has not been run."""
    variant = {"atp[adapt=params]": "params", "atp[adapt=stats]": "stats"}.get(method, "all")
    return cells.get(f"{shift}-{variant}", {}).get("accuracy_percent", {}).get(method)


def _main(cells: Cells, method: str, shift: str) -> str:
    ours, base, paper = accuracy(cells, method, shift), accuracy(cells, "fedavg", shift), TABLE_5[method][shift]
    their_base = TABLE_5["fedavg"][shift]
    if method == "fedavg":
        return f"{MISSING if ours is None else f'{ours:.1f}'} / {paper:.1f}"
    here = MISSING if ours is None or base is None else f"{ours:.1f} ({ours - base:+.1f})"
    return f"{here} / {paper:.1f} ({paper - their_base:+.1f})"


def _gain(cells: Cells, method: str, shift: str, paper: float) -> str:
    return _difference(accuracy(cells, method, shift), accuracy(cells, "fedavg", shift), paper)


def _cross(cells: Cells, learned: str, tested: str) -> str:
    if learned == tested:
        ours = accuracy(cells, "atp", tested)
    else:
        ours = cells.get(f"{learned}-on-{tested}", {}).get("accuracy_percent", {}).get("atp")
    return _difference(ours, accuracy(cells, "fedavg", tested), TABLE_3[learned][tested])


def _difference(ours: float | None, base: float | None, paper: float) -> str:
    return f"{MISSING if ours is None or base is None else f'{ours - base:+.1f}'} / {paper:+.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * (len(head) - 1)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
