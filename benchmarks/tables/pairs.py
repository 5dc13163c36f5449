"""Paired differences: a row's accuracy minus a baseline's on the same clients, with bootstrap intervals.

The bootstrap has two levels, as the samples do: it draws seeds, and within each drawn seed clients, both with
replacement, and pairs rows by client. With one seed it draws clients alone, so its interval says nothing about other
trainings. Intervals are percentiles (Bradley Efron, Robert Tibshirani: An Introduction to the Bootstrap, 1993, ch. 13).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedtta.benchmarks.papers import AVERAGE, PROPOSED, WITH
from fedtta.benchmarks.tables.comparison import Comparison, compare, partial_rows
from fedtta.benchmarks.tables.protocol import Cell, Protocol, Table
from fedtta.benchmarks.tables.results import CONSTANT, Content

#: row → column → seed → accuracy of each client in percent, [N].
ClientValues = Mapping[str, Mapping[str, Mapping[int, NDArray[np.float64]]]]

DRAWS = 2_000
FEDAVG = "fedavg"  # the row that adapts nothing
AUTO = "auto"  # the row that chooses among adapters
LEVEL = 0.95  # coverage of an interval
#: What a part of pFedBBN brings → the row with it and the row without.
PARTS = {
    "averaging − BBN alone": ("bbn @ fedavg", "bbn"),
    "pFedBBN's weights − averaging": ("bbn @ pfedbbn[share=all]", "bbn @ fedavg"),
    "class statistics alone − BBN alone": ("bbn @ pfedbbn[share=statistics]", "bbn"),
}


@dataclass(frozen=True)
class Difference:
    """A mean paired difference in points, the bounds of its interval, and what it was taken over."""

    mean: float
    low: float
    high: float
    seeds: int
    clients: str  # of a seed: "20", or "18 to 20" where seeds have different numbers

    @property
    def sign(self) -> int:
        """Return 1 or -1 if the interval lies on one side of 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def difference(
    own: Mapping[int, NDArray[np.float64]], base: Mapping[int, NDArray[np.float64]], draws: int = DRAWS
) -> Difference | None:
    """Return own - base over the seeds that both have; None if they share none.

    Every seed counts the same, as in the tables: the mean is over seeds of the means over clients.

    Parameters
    ----------
    own, base : mapping
        seed → accuracy of each client [N]; the same clients in both. N may differ between seeds.
    draws : int
        Bootstrap samples; they come from a fixed seed.
    """
    shared = [seed for seed in sorted(own) if seed in base]
    if not shared:
        return None
    gaps = [own[seed] - base[seed] for seed in shared]
    seeds, sizes = len(gaps), np.array([len(one) for one in gaps])  # S, (S,)
    most = int(sizes.max())
    padded = np.stack([np.pad(one, (0, most - len(one))) for one in gaps])  # (S, N)
    seed, client, drawn = _bootstrap(tuple(sizes.tolist()), draws)
    samples = padded[seed, client].mean(2, where=drawn).mean(1)  # (draws,)
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    clients = " to ".join(map(str, dict.fromkeys((int(sizes.min()), most))))
    return Difference(float(np.mean([one.mean() for one in gaps])), float(low), float(high), seeds, clients)


@lru_cache(maxsize=8)
def _bootstrap(sizes: tuple[int, ...], draws: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return which seed, which client of it, and whether it counts, of each draw, for seeds of so many clients."""
    seeds, most, of = len(sizes), max(sizes), np.array(sizes)
    generator = np.random.default_rng(0)
    seed = generator.integers(seeds, size=(draws, seeds, 1))
    client = generator.integers(of[seed], size=(draws, seeds, most))
    return seed, client, np.arange(most) < of[seed]  # as many draws as the seed has clients


def client_values(table: Table, kept: Mapping[str, Mapping[int, Content]]) -> ClientValues:
    """Return the accuracies of clients of all rows of a table, and each client's average over the columns.

    Left out are rows that were kept without them, and those with fewer samples than the others. Where clients are
    columns, the average has all of them in turn.
    """
    found: dict[str, dict[str, dict[int, NDArray[np.float64]]]] = {}
    partial = partial_rows(table, kept)
    for cell in table.cells:
        for seed, content in sorted(kept.get(cell.name, {}).items()):
            for label, row in content["rows"].items():
                if (own := cell.labelled(label)) in partial:
                    continue
                for column, values in clients_of(cell, row).items():
                    found.setdefault(own, {}).setdefault(column, {})[seed] = values
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    apart = any(cell.columns for cell in table.cells)
    for row in found.values() if len(columns) > 1 else ():
        averages = {}
        for seed in row.get(columns[0], {}):
            parts = [row[column][seed] for column in columns if seed in row.get(column, {})]
            if len(parts) == len(columns) and len({len(part) for part in parts}) == 1:
                averages[seed] = np.concatenate(parts) if apart else np.mean(parts, axis=0)
        if averages:
            row[AVERAGE] = averages
    return found


def clients_of(cell: Cell, row: Content) -> dict[str, NDArray[np.float64]]:
    """Return column → accuracy of each client of a kept row."""
    key = "per_client_percent"
    shifts = {name: np.array(one[key].split(), float) for name, one in row["shifts"].items() if key in one}
    return {cell.column: next(iter(shifts.values()))} if cell.column and len(shifts) == 1 else shifts


def is_proposed(label: str) -> bool:
    """Tell whether a row is a method that one of the papers proposes, and not a baseline of it."""
    return label.partition(WITH)[0].partition("[")[0].partition(" ")[0] in PROPOSED


def compared_columns(table: Table, found: Comparison) -> list[str]:
    """Return the columns whose differences are shown: the average, or each column where cells are columns."""
    return [one for one in found.columns if one != AVERAGE] if table.cells[0].column else found.columns[-1:]


def baselines(table: Table, found: Comparison, column: str) -> list[str]:
    """Return the rows that the others are compared with: those that the table names, and last the best baseline."""
    known = [label for label in table.against if column in found.values.get(label, {})]
    means = {
        label: mean
        for label, mean in comparable_means(found, column).items()
        if label != AUTO and not is_proposed(label)
    }
    best = max(means, key=lambda label: means[label], default=None)
    return [*(label for label in known if label != best), *([best] if best else [])]


def comparable_means(found: Comparison, column: str, over: Collection[int] = ()) -> dict[str, float]:
    """Return row → mean over seeds, by default FedAvg's or those of all rows, of the rows that have all of these.

    Rows with fewer samples than the others are left out.
    """
    left_out = {CONSTANT, *found.partial}
    rows = {label: row[column] for label, row in found.values.items() if row.get(column) and label not in left_out}
    counted = [set(rows[FEDAVG])] if FEDAVG in rows else [set(row) for row in rows.values()]
    seeds = set(over) or (set.intersection(*counted) if counted else set())
    complete = {label: row for label, row in rows.items() if seeds and seeds <= set(row)}
    return {label: float(np.mean([row[seed] for seed in sorted(seeds)])) for label, row in complete.items()}


@dataclass(frozen=True)
class Order:
    """Two rows in the paper's order in a column, and whether it holds here: 1, -1 (the opposite does), 0 (neither)."""

    column: str
    better: str
    worse: str
    holds: int


def orders(found: Comparison, clients: ClientValues, columns: Sequence[str]) -> list[Order]:
    """Return the paper's order of each two rows, one of which is proposed by a paper, and whether it holds.

    Two rows are of one experiment of the paper, see `Printed.comparable`. Rows without their clients' accuracies are
    left out.
    """
    result = []
    for column in columns:
        printed = {label: row[column] for label, row in found.paper.items() if column in row and label in clients}
        for one, other in combinations(sorted(printed, key=lambda label: -printed[label].mean), 2):
            if printed[one].mean == printed[other].mean or not (is_proposed(one) or is_proposed(other)):
                continue
            if not printed[one].comparable(printed[other]):
                continue
            measured = difference(clients[one].get(column, {}), clients[other].get(column, {}))
            result.append(Order(column, one, other, measured.sign if measured else 0))
    return result


def differences_table(table: Table, found: Comparison, cells: Mapping[str, Mapping[int, Content]]) -> str:
    """Return each row's paired differences to its baselines, or that its clients' accuracies were not kept."""
    clients = client_values(table, cells)
    if not clients:
        return "Clients' accuracies were not kept with these rows, so their differences have no intervals."
    pairs = [(base, column) for column in compared_columns(table, found) for base in baselines(table, found, column)]
    several = len({column for _, column in pairs}) > 1
    heads = [f"− `{base}`" + (f", {column}" if several else "") for base, column in pairs]
    lines, counts = [], set()
    for label in found.values:
        texts = []
        for base, column in pairs:
            own, other = (clients.get(row, {}).get(column, {}) for row in (label, base))
            measured = difference(own, other) if label != base else None
            counts |= {(measured.seeds, measured.clients)} if measured else set()
            texts.append(str(measured) if measured else "")
        if any(texts):
            lines.append(f"| `{label}` | {' | '.join(texts)} |")
    if not lines:
        return ""
    over = " or ".join(f"{clients} clients in {seeds} seed{'s'[: seeds > 1]}" for seeds, clients in sorted(counts))
    column = "" if several else f", {pairs[0][1]}"
    means = ", means over clients and not over samples as above" if table.cells[0].weighting == "samples" else ""
    return "\n".join(
        [
            f"Paired differences in points{column}{means}, with 95 % bootstrap intervals over {over}; the last "
            "baseline is the best row that none of the papers proposes:",
            "",
            f"| row | {' | '.join(heads)} |",
            "| --- |" + " --: |" * len(heads),
            *lines,
        ]
    )


def orders_lines(table: Table, found: Comparison, cells: Mapping[str, Mapping[int, Content]]) -> list[str]:
    """Return which of the paper's orders hold, which do not, and which cannot be told, a line for each column."""
    lines = []
    for column in compared_columns(table, found):
        known = orders(found, client_values(table, cells), [column])
        words = [
            f"{name} {', '.join(f'`{one.better}` > `{one.worse}`' for one in known if one.holds == holds)}"
            for name, holds in (("hold:", 1), ("are reversed:", -1), ("cannot be told:", 0))
            if any(one.holds == holds for one in known)
        ]
        if words:
            lines.append(f"The paper's orders, {column}: {'; '.join(words)}.")
    return lines


def leaders_table(protocol: Protocol, kept: Mapping[str, Mapping[int, Content]], most: int = 3) -> str:
    """Return a table of the best rows of each shift of a protocol, with what they gain over FedAvg; empty without any.

    Only rows that have all of FedAvg's seeds are compared, over those with clients' accuracies if there are any.

    Parameters
    ----------
    kept : mapping
        Cell → seed → content.
    most : int
        Rows a shift, at most.
    """
    lines = []
    for table, found, clients in _accuracies(protocol, kept):
        for column in found.columns:
            none = clients.get(FEDAVG, {}).get(column, {})
            means = comparable_means(found, column, none)
            if FEDAVG not in means or len(means) < 2:
                continue
            texts = []
            for label in sorted(means, key=lambda label: -means[label])[:most]:
                measured = difference(clients.get(label, {}).get(column, {}), none)
                gain = str(measured) if measured else f"{means[label] - means[FEDAVG]:+.2f}"
                texts.append(f"`{label}`" + ("" if label == FEDAVG else f" {gain}"))
            texts += [""] * (most - len(texts))
            seeds = str(len(none or found.values[FEDAVG][column]))
            lines.append([table.title, column, f"{means[FEDAVG]:.1f}", *texts, seeds])
    ranks = [("best", "second", "third")[place] if place < 3 else f"{place + 1}th" for place in range(most)]
    head = ["table", "shift", f"`{FEDAVG}`, %", *ranks, "seeds"]
    return _markdown(head, ["---", "---", "--:", *["---"] * most, "--:"], lines)


def parts_table(protocol: Protocol, kept: Mapping[str, Mapping[int, Content]]) -> str:
    """Return a table of what each part of pFedBBN brings in each cell that has its rows; empty without any.

    Numbers of seeds are listed, one for each difference, where they differ.

    Parameters
    ----------
    kept : mapping
        Cell → seed → content.
    """
    lines = []
    for cell in protocol.cells:
        partial = partial_rows(Table("", "", (cell,)), kept)
        rows: dict[str, dict[int, NDArray[np.float64]]] = {}
        for seed, content in sorted(kept.get(cell.name, {}).items()):
            for label, row in content["rows"].items():
                for values in clients_of(cell, row).values() if cell.labelled(label) not in partial else ():
                    rows.setdefault(label, {})[seed] = values
        found = [difference(rows.get(more, {}), rows.get(less, {})) for more, less in PARTS.values()]
        if measured := [one for one in found if one]:
            texts = [str(one) if one else "" for one in found]
            counts = [one.seeds for one in measured]
            seeds = ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
            lines.append([f"`{cell.name}`", *texts, seeds])
    return _markdown(["cell", *PARTS, "seeds"], ["---", *["--:"] * (len(PARTS) + 1)], lines)


def choices_table(protocol: Protocol, kept: Mapping[str, Mapping[int, Content]]) -> str:
    """Return a table of `auto` beside no adaptation and the best fixed row of each shift; empty without any `auto`.

    Only rows that have all of FedAvg's seeds with clients' accuracies are compared, over these. A client that is tested
    in several seeds counts for each.

    Parameters
    ----------
    kept : mapping
        Cell → seed → content.
    """
    lines = []
    for table, found, clients in _accuracies(protocol, kept):
        for column in found.columns:
            chosen, none = (clients.get(label, {}).get(column, {}) for label in (AUTO, FEDAVG))
            means = comparable_means(found, column, none)
            fixed = {label: mean for label, mean in means.items() if label != AUTO}
            if column == AVERAGE or not none or not none.keys() <= chosen.keys() or not {AUTO, FEDAVG} <= means.keys():
                continue
            best = max(fixed, key=lambda label: fixed[label])
            gains = np.concatenate([chosen[seed] - none[seed] for seed in sorted(none)])
            numbers = [fixed[FEDAVG], fixed[best], means[AUTO], fixed[best] - means[AUTO], gains.min()]
            shown = [f"{number:.1f}" for number in numbers]
            shown[1] += f" (`{best}`)"
            worse = f"{(gains < -1 - 1e-9).sum()} of {len(gains)}"
            lines.append([table.title, column, *shown, worse, str(len(none))])
    head = ["table", "shift", f"`{FEDAVG}`, %", "best fixed, %", "`auto`, %", "below the best"]
    head += ["worst client over none", "more than 1 below none", "seeds"]
    return _markdown(head, ["---", "---", *["--:"] * 7], lines)


def worst_table(protocol: Protocol, kept: Mapping[str, Mapping[int, Content]]) -> str:
    """Return a table of average, worst client and worst shift of all rows beside `auto`; empty without any `auto`.

    The average is over shifts, clients and seeds; the worst client is the lowest of the averages over shifts, or of
    all clients where each counts for one column. Rows are by average, and have all of FedAvg's seeds.

    Parameters
    ----------
    kept : mapping
        Cell → seed → content.
    """
    lines = []
    for table, found, clients in _accuracies(protocol, kept):
        columns = [column for column in found.columns if column != AVERAGE]
        seeds = sorted(clients.get(FEDAVG, {}).get(columns[0], {})) if AUTO in clients else []
        apart = any(cell.columns for cell in table.cells)
        rows = []
        for label, row in clients.items() if seeds else ():
            if all(seed in row.get(column, {}) for column in columns for seed in seeds):
                means = {name: float(np.concatenate([row[name][seed] for seed in seeds]).mean()) for name in columns}
                average = float(np.mean(list(means.values())))
                rows.append((average, label, _worst_client(row, columns, seeds, apart), means))
        for average, label, worst, means in sorted(rows, key=lambda one: -one[0]):
            shift = min(means, key=lambda name: means[name])
            numbers = [f"{average:.1f}", worst, f"{means[shift]:.1f} ({shift})"]
            lines.append([table.title, f"`{label}`", *numbers, str(len(seeds))])
    head = ["table", "row", "average, %", "worst client, %", "worst shift, %", "seeds"]
    return _markdown(head, ["---", "---", *["--:"] * 4], lines)


def _worst_client(
    row: Mapping[str, Mapping[int, NDArray[np.float64]]], columns: Sequence[str], seeds: Sequence[int], apart: bool
) -> str:
    """Return the lowest accuracy of a client over its columns; a dash where these have different numbers of clients.

    Parameters
    ----------
    apart : bool
        Each client counts for one column.
    """
    if apart or len(columns) == 1:
        return f"{min(row[column][seed].min() for column in columns for seed in seeds):.1f}"
    averages = row.get(AVERAGE, {})
    return f"{min(averages[seed].min() for seed in seeds):.1f}" if averages.keys() >= set(seeds) else "–"


def _accuracies(
    protocol: Protocol, kept: Mapping[str, Mapping[int, Content]]
) -> Iterator[tuple[Table, Comparison, ClientValues]]:
    """Yield each table of plain accuracy with its values, as means and by client."""
    for table in protocol.tables:
        if not table.measure:
            yield table, compare(table, kept), client_values(table, kept)


def _markdown(head: Sequence[str], rules: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; empty without lines."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *lines)) if lines else ""
