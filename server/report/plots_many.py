"""Plots of methods and trainings where there are too many to stand side by side: a line or a panel each."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from server.report.drawing import (
    INK,
    MUTED,
    TRAINING_STYLES,
    Plot,
    bare,
    legend_above,
    new_figure,
    series_style,
    styled,
    to_svg,
)
from server.report.events import Round
from server.report.tables import Row, percent

MANY_ROWS = 14  # from here on bars of a method are too thin
MANY_TRAININGS = len(TRAINING_STYLES) + 1  # from here on colours repeat
ACROSS = 5  # panels in a row


@styled
def accuracy_lines(rows: list[Row]) -> Plot:
    """Draw a line a method, best average first: a mark for each distribution at its accuracy in %."""
    shifts = list(rows[0].cells)
    ordered = sorted(rows, key=lambda row: -1.0 if row.average is None else row.average)
    figure = new_figure(0.7 + 0.19 * len(rows))
    axes = figure.subplots()
    bare(axes)
    for index, shift in enumerate(shifts):
        known = [(100 * cell.mean, y) for y, row in enumerate(ordered) if (cell := row.cells[shift])]
        style = series_style(index) | {"linestyle": "none"}
        axes.plot([x for x, _ in known], [y for _, y in known], markersize=4.5, **style)
    averages = [(100 * row.average, y) for y, row in enumerate(ordered) if row.average is not None]
    axes.scatter([x for x, _ in averages], [y for _, y in averages], marker="|", s=70, color=INK, linewidths=1.4)
    axes.set_yticks(range(len(ordered)), [row.label for row in ordered], fontsize=8)
    axes.set_ylim(-0.7, len(ordered) - 0.3)
    axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy, %")
    handles = [
        Line2D([], [], markersize=4.5, label=shift, **(series_style(i) | {"linestyle": "none"}))
        for i, shift in enumerate(shifts)
    ]
    handles.append(Line2D([], [], marker="|", color=INK, linestyle="none", markersize=8, label="average"))
    legend_above(figure, handles, columns=min(len(handles), 6))
    alt = "Accuracy per method and test distribution, best average first. " + "; ".join(
        f"{row.label}: " + ", ".join(f"{s} {percent(c.mean)} %" for s, c in row.cells.items() if c)
        for row in reversed(ordered)
    )
    return to_svg(figure, "accuracy", alt)


@styled
def curve_panels(groups: dict[str, list[Round]]) -> Plot:
    """Draw a panel a training: validation accuracy of the global and of the personal head over the rounds."""
    down = math.ceil(len(groups) / ACROSS)
    figure = new_figure(0.4 + 1.15 * down)
    panels = figure.subplots(down, ACROSS, squeeze=False, sharey=True).ravel()
    words = []
    for axes, (training, rounds) in zip(panels, groups.items(), strict=False):
        bare(axes)
        x = [entry.round for entry in rounds]
        for values, style in (
            ([entry.validation_accuracy for entry in rounds], "-"),
            ([entry.personal_validation_accuracy for entry in rounds], (0, (4, 2))),
        ):
            y = [math.nan if value is None else 100 * value for value in values]
            axes.plot(x, y, color=TRAINING_STYLES[3][0], linestyle=style, linewidth=1.4, marker=".", markersize=3)
        axes.set_title(training, loc="left", fontsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=4))
        axes.set_ylim(0, 100)
        known = [entry.validation_accuracy for entry in rounds if entry.validation_accuracy is not None]
        words.append(f"{training}: {percent(known[-1])} % at last" if known else f"{training}: none known")
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], color=TRAINING_STYLES[3][0], label="validation accuracy in %, global head"),
        Line2D([], [], color=TRAINING_STYLES[3][0], linestyle=(0, (4, 2)), label="personal head"),
    ]
    legend_above(figure, handles, columns=2)
    return to_svg(figure, "curves", "Validation accuracy over the rounds of each training. " + "; ".join(words))


@styled
def time_bars(groups: dict[str, list[Round]], local: dict[str, list[float]]) -> Plot:
    """Draw a bar a training: mean wall time of a round, local training and the rest.

    Parameters
    ----------
    groups : dict
        training → its rounds.
    local : dict
        training → seconds that local training explains of each round.
    """
    names = list(groups)[::-1]
    figure = new_figure(0.7 + 0.19 * len(names))
    axes = figure.subplots()
    bare(axes)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    inside = np.array([np.mean(local[name]) for name in names])
    wall = np.array([np.mean([entry.wall_seconds for entry in groups[name]]) for name in names])
    colour = TRAINING_STYLES[3][0]
    axes.barh(range(len(names)), inside, 0.75, color=colour)
    axes.barh(range(len(names)), wall - inside, 0.75, left=inside, color=colour, alpha=0.35)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("seconds a round, mean")
    handles = [
        Patch(facecolor=MUTED, label="local training"),
        Patch(facecolor=MUTED, alpha=0.35, label="everything else"),
    ]
    legend_above(figure, handles, columns=2)
    numbers = zip(names, wall, inside, strict=True)
    words = [f"{name}: {whole:.1f} s a round, {part:.1f} s of it local training" for name, whole, part in numbers]
    return to_svg(figure, "times", "Mean wall time of a round. " + "; ".join(words[::-1]))
