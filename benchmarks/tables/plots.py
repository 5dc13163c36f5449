"""Plots of kept results, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtta.benchmarks.tables.comparison import Comparison
from fedtta.benchmarks.tables.results import Content

WIDTH, MARGIN = 9.0, 0.1  # inches
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288", "#882255", "#117733")


def to_svg(figure: Figure) -> str:
    """Return a figure as SVG text without date and random ids, so that equal data give equal files."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "fedtta", "svg.fonttype": "none"}):
        box = figure.get_tightbbox().padded(MARGIN)  # bbox_inches="tight" draws the figure once more to know it
        figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches=box)
    return text.getvalue()


def accuracy_bars(table: Comparison) -> str:
    """Draw the mean of each row by column, whiskers ± one sd over seeds, and a dash at the paper's number."""
    figure = Figure((WIDTH, 3.2))
    axes = figure.subplots()
    width = 0.8 / len(table.values)
    dashes: list[tuple[float, float, float]] = []  # height, from, to
    for index, (label, row) in enumerate(table.values.items()):
        places = {name: i + (index - (len(table.values) - 1) / 2) * width for i, name in enumerate(table.columns)}
        seeds = {places[name]: list(row[name].values()) for name in table.columns if row.get(name)}
        if seeds:
            means, sds = [np.mean(values) for values in seeds.values()], [np.std(values) for values in seeds.values()]
            whiskers = sds if any(sds) else None
            axes.bar(list(seeds), means, width, yerr=whiskers, color=COLOURS[index % len(COLOURS)], label=label)
        printed = table.paper.get(label, {})
        dashes += [(printed[name].mean, x - width / 2, x + width / 2) for name, x in places.items() if name in printed]
    if dashes:
        axes.hlines(*zip(*dashes, strict=True), color="black", linewidth=1.5)
    axes.set_xticks(range(len(table.columns)), table.columns)
    axes.set_ylabel("%")
    axes.set_title(f"{table.title} (dash: the paper)", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)
    return to_svg(figure)


def curves(contents: Sequence[Content]) -> str:
    """Draw test accuracy over training rounds if it was measured, else validation accuracy; empty if neither."""
    tested = [one for one in contents if one.get("curves")]
    lines: dict[str, dict[str, list[dict[int, float]]]] = {}  # panel → line → one curve per seed
    for one in tested:
        for label, row in one["rows"].items():
            for shift in row["shifts"] if label in one["curves"] else ():
                lines.setdefault(shift, {}).setdefault(label, []).append(curve(one, label, shift))
    if not tested:
        for one in contents:
            for name, training in one["trainings"].items():
                texts = training.get("validation_percent", "").split()
                points = {number: float(text) for number, text in enumerate(texts, 1) if text != "-"}
                if points:
                    lines.setdefault(one["cell"], {}).setdefault(name, []).append(points)
    if not lines:
        return ""
    across = min(3, len(lines))
    down = -(-len(lines) // across)
    figure = Figure((WIDTH, 0.5 + 2.2 * down))
    panels = figure.subplots(down, across, squeeze=False, sharey=True).ravel()
    for axes, (title, panel) in zip(panels, lines.items(), strict=False):
        for index, (label, seeds) in enumerate(panel.items()):
            rounds, means = mean_curve(seeds)
            axes.plot(rounds, means, label=label, color=COLOURS[index % len(COLOURS)], marker="o", markersize=2)
        axes.set_title(title, loc="left", fontsize=9)
    for axes in panels[len(lines) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("%" if tested else "validation, %")
    panels[0].legend(fontsize=7, frameon=False)
    return to_svg(figure)


def curve(content: Content, label: str, shift: str) -> dict[int, float]:
    """Return round → accuracy in percent of a row on a test distribution, including the last round."""
    kept = content.get("curves", {}).get(label, {})
    found = {int(round): float(means[shift]) for round, means in kept.items() if shift in means}
    last = content["rows"][label]["shifts"].get(shift)
    return {**found, **({int(content["settings"]["rounds"]): last["accuracy_percent"]} if last and found else {})}


def mean_curve(seeds: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float]]:
    """Return the rounds of the first curve, and the means over all curves that have the same rounds."""
    rounds = sorted(seeds[0])
    same = [one for one in seeds if sorted(one) == rounds]
    return rounds, [float(np.mean([one[round] for one in same])) for round in rounds]


def weight_histograms(contents: Sequence[Content]) -> str:
    """Draw the distribution of the global head's weight e by row, over all clients, seeds and test distributions."""
    counts: dict[str, np.ndarray] = {}
    for one in contents:
        for label, row in one["rows"].items():
            for shift in row["shifts"].values():
                if text := shift.get("weight_histogram"):
                    own = np.array([int(word) for word in text.split()])
                    counts[label] = counts.get(label, 0) + own
    if not counts:
        return ""
    figure = Figure((WIDTH, 2.4))
    panels = figure.subplots(1, len(counts), squeeze=False, sharex=True).ravel()
    for axes, (label, own) in zip(panels, counts.items(), strict=True):
        edges = np.linspace(0, 1, len(own) + 1)
        axes.stairs(own / own.sum(), edges, fill=True, color=COLOURS[0])
        axes.set_title(label, loc="left", fontsize=8)
        axes.set_xlabel("weight e")
    return to_svg(figure)


def learned_rates(contents: Sequence[Content]) -> str:
    """Draw the learned rate of each module, a panel per cell that learned some, a colour per seed (ATP, Figure 4)."""
    learned: dict[str, list[Mapping[str, float]]] = {}  # cell → one module → rate per seed
    for one in contents:
        for training in one["trainings"].values():
            if (rates := training.get("rates", {}).get("all")) and one["settings"].get("rates-rounds"):
                learned.setdefault(one["cell"], []).append(rates)
    if not learned:
        return ""
    modules = list(dict.fromkeys(name for seeds in learned.values() for rates in seeds for name in rates))
    figure = Figure((WIDTH, 0.6 + 0.16 * len(modules)))
    panels = figure.subplots(1, len(learned), squeeze=False, sharey=True).ravel()
    for axes, (cell, seeds) in zip(panels, learned.items(), strict=True):
        for index, rates in enumerate(seeds):
            places = [modules.index(name) for name in rates]
            axes.plot(list(rates.values()), places, "o", color=COLOURS[index % len(COLOURS)], markersize=4, alpha=0.7)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_title(f"rates, {cell}", loc="left", fontsize=9)
    panels[0].set_yticks(range(len(modules)), modules, fontsize=7)
    panels[0].invert_yaxis()
    return to_svg(figure)


def mixing(contents: Sequence[Content]) -> str:
    """Draw the mixing weights W in percent of a cell's first seed, a line per row, a column per round.

    As in pFedBBN's Figure 5.
    """
    kept: dict[str, Mapping[str, str]] = {}
    seeds: dict[str, int] = {}  # cell → the one that is drawn
    for one in contents:
        for label, row in one["rows"].items():
            for shift in row["shifts"].values():
                if (weights := shift.get("weights")) and seeds.setdefault(one["cell"], one["seed"]) == one["seed"]:
                    kept[f"{label}\n{one['cell']}, seed {one['seed']}"] = weights
    if not kept:
        return ""
    across = max(map(len, kept.values()))
    figure = Figure((WIDTH, 2.8 * len(kept)))
    panels = figure.subplots(len(kept), across, squeeze=False, gridspec_kw={"hspace": 0.3})
    for line, (title, weights) in zip(panels, kept.items(), strict=True):
        for axes in line[len(weights) :]:
            axes.set_visible(False)
        for axes, (number, text) in zip(line, weights.items(), strict=False):
            rows = np.array([[float(word) for word in one.split()] for one in text.split(";")])
            axes.imshow(100 * rows, cmap="viridis", vmin=0, vmax=50)
            axes.set_title(f"{title}, round {number}", loc="left", fontsize=6)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
                axis.set_tick_params(labelsize=6)
    return to_svg(figure)
