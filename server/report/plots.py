"""Plots of the results: accuracy per distribution and method, and the weights that the methods chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from server.report.drawing import (
    INK,
    MUTED,
    Plot,
    bare,
    legend_above,
    method_style,
    new_figure,
    styled,
    to_svg,
)
from server.report.events import WEIGHT_BINS, Evaluation
from server.report.plots_many import MANY_ROWS, accuracy_lines
from server.report.results import Results
from server.report.tables import Row, percent


@styled
def accuracy_bars(rows: list[Row]) -> Plot | None:
    """Draw grouped bars: accuracy in % per distribution and method, whiskers ± one sd over clients."""
    shifts = list(rows[0].cells) if rows else []
    if not shifts:
        return None
    if len(rows) >= MANY_ROWS:
        return accuracy_lines(rows)
    width = 0.84 / len(rows)
    figure = new_figure(3.6)
    axes = figure.subplots()
    bare(axes)
    for index, row in enumerate(rows):
        cells = [row.cells[shift] for shift in shifts]
        places = [n for n, cell in enumerate(cells) if cell]
        known = [cell for cell in cells if cell]
        x = np.array(places) + (index - (len(rows) - 1) / 2) * width
        height = np.array([100 * cell.mean for cell in known])
        sd = np.array([100 * cell.sd for cell in known])
        axes.bar(x, height, 0.92 * width, **method_style(index))
        # An accuracy is never below 0 or above 100: neither is its whisker.
        whiskers = np.stack([np.minimum(sd, height), np.minimum(sd, 100 - height)])
        axes.errorbar(x, height, whiskers, fmt="none", ecolor=INK, elinewidth=0.8)
    axes.set_xticks(range(len(shifts)), shifts)
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy, %")
    handles = [Patch(label=row.label, **method_style(i)) for i, row in enumerate(rows)]
    legend_above(figure, handles, columns=min(len(rows), 6))
    alt = "Bar chart of accuracy per test distribution and method. " + "; ".join(
        f"{row.label}: " + ", ".join(f"{s} {percent(c.mean)} %" for s, c in row.cells.items() if c) for row in rows
    )
    return to_svg(figure, "accuracy", alt)


@dataclass(frozen=True)
class Weights:
    """The weights e of one method on one distribution, all clients' samples together."""

    counts: np.ndarray  # [WEIGHT_BINS]
    mean: float


def _together(entries: list[Evaluation]) -> Weights:
    """Add the clients' histograms up; a client that gave no mean counts with the middles of its bins."""
    counts = np.array([entry.weight_histogram for entry in entries])  # (clients, bins)
    samples = counts.sum(axis=1)
    middles = (np.arange(WEIGHT_BINS) + 0.5) / WEIGHT_BINS
    means = [
        middles @ row / row.sum() if entry.weight_mean is None else entry.weight_mean
        for entry, row in zip(entries, counts, strict=True)
    ]
    return Weights(counts.sum(axis=0), float(samples @ np.array(means) / samples.sum()))


def weights_of(results: Results) -> dict[tuple[str, str, str], Weights]:
    """Give the weights of each (training, method, distribution) that has some."""
    groups: dict[tuple[str, str, str], list[Evaluation]] = {}
    for entry in results.evaluations:
        if entry.weight_histogram is not None and any(entry.weight_histogram):
            groups.setdefault((entry.training, entry.method, entry.shift), []).append(entry)
    return {key: _together(entries) for key, entries in groups.items()}


@styled
def weight_histograms(results: Results, rows: list[Row]) -> Plot | None:
    """Small multiples of the weight e of the global head: a row a method, a column a distribution."""
    weights = weights_of(results)
    mixing = {(training, method) for training, method, _ in weights}
    drawn = [(index, row) for index, row in enumerate(rows) if (row.training, row.method) in mixing]
    shifts = list(rows[0].cells) if rows else []
    if not drawn or not shifts:
        return None
    words = []
    figure = new_figure(0.75 + 1.15 * len(drawn))
    figure.set_layout_engine("constrained", wspace=0.06)
    grid = figure.subplots(len(drawn), len(shifts), squeeze=False, sharex=True, sharey="row")
    for line, (index, row) in enumerate(drawn):
        grid[line, 0].set_ylabel(row.label, color=INK)
        for axes, shift in zip(grid[line], shifts, strict=True):
            if line == 0:
                axes.set_title(shift)
            found = weights.get((row.training, row.method, shift))
            _weight_panel(axes, found, method_style(index))
            words += [f"{row.label} on {shift}: {found.mean:.2f}"] if found else []
    figure.supxlabel("weight e of the global head", fontsize=9.5, color=MUTED)
    alt = "Histograms of the weight of the global head; means: " + ", ".join(words)
    return to_svg(figure, "weights", alt)


def _weight_panel(axes: Axes, weights: Weights | None, look: dict[str, Any]) -> None:
    """Draw one histogram, as shares of the samples, with its mean; nothing but the axis without samples."""
    bare(axes, grid=False)
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    labels = axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    labels[0].label1.set_horizontalalignment("left")  # the ends stay inside, apart from the neighbours'
    labels[-1].label1.set_horizontalalignment("right")
    if weights is None:
        return
    middles = (np.arange(WEIGHT_BINS) + 0.5) / WEIGHT_BINS
    axes.bar(middles, weights.counts / weights.counts.sum(), 0.92 / WEIGHT_BINS, **look)
    axes.axvline(weights.mean, color=INK, linewidth=1)
    place: dict[str, Any] = {"x": 0.99, "ha": "right"} if weights.mean < 0.5 else {"x": 0.01, "ha": "left"}
    axes.text(y=0.97, s=f"{weights.mean:.2f}", va="top", transform=axes.transAxes, fontsize=8.5, **place)
