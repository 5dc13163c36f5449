"""Plots of the run: learning curves, who has what, where the time went."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from server.report.drawing import (
    MUTED,
    TRAINING_STYLES,
    Plot,
    bare,
    legend_above,
    new_figure,
    styled,
    tinted,
    to_svg,
)
from server.report.events import Clients, Round
from server.report.plots_many import MANY_TRAININGS, curve_panels, time_bars
from server.report.results import Results

_MARKED_ROUNDS = 30  # with more, the marks of a curve run into each other
_NUMBERED_CELLS = 320  # a heat map with more cells than this has no room for numbers
_VECTOR_CELLS = 2500  # and with more than this it is drawn as one bitmap


def _curve(axes: Axes, rounds: list[Round], values: list[float | None], **line: Any) -> None:
    """Draw one curve over the rounds; a missing or infinite value is a gap."""
    y = [math.nan if value is None or not math.isfinite(value) else value for value in values]
    markers = 3.5 if len(rounds) <= _MARKED_ROUNDS else 0
    axes.plot([entry.round for entry in rounds], y, markersize=markers, linewidth=1.5, **line)


@styled
def learning_curves(results: Results) -> Plot | None:
    """Two panels per round and training: validation accuracy (global and personal) and training loss."""
    if not results.rounds:
        return None
    if len(by_training(results)) >= MANY_TRAININGS:
        return curve_panels(by_training(results))
    figure = new_figure(2.9)
    left, right = figure.subplots(1, 2)
    handles = []
    words = []
    for index, (training, rounds) in enumerate(by_training(results).items()):
        colour, marker = TRAINING_STYLES[index % len(TRAINING_STYLES)]
        line: dict[str, Any] = {"color": colour, "marker": marker}
        received = [_percentage(entry.validation_accuracy) for entry in rounds]
        personal = [_percentage(entry.personal_validation_accuracy) for entry in rounds]
        _curve(left, rounds, received, **line)
        _curve(left, rounds, personal, **line, linestyle=(0, (4, 2)), markerfacecolor="none")
        _curve(right, rounds, [entry.train_loss for entry in rounds], **line)
        handles.append(Line2D([], [], **line, markersize=3.5, linewidth=1.5, label=training))
        words.append(_ends(training, received))
    handles.append(Line2D([], [], color=MUTED, linestyle=(0, (4, 2)), label="personal head"))
    for axes, title in ((left, "validation accuracy, %"), (right, "training loss")):
        bare(axes)
        axes.set_title(title, loc="left")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    left.set_ylim(0, 100)
    legend_above(figure, handles, columns=5)
    return to_svg(figure, "curves", "Learning curves over the rounds. " + "; ".join(words))


def _percentage(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _ends(training: str, values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{training}: no validation accuracy"
    return f"{training}: validation accuracy from {known[0]:.1f} % to {known[-1]:.1f} %"


def by_training(results: Results) -> dict[str, list[Round]]:
    """Give the rounds of each training, sorted by number."""
    groups: dict[str, list[Round]] = {}
    for entry in sorted(results.rounds, key=lambda entry: entry.round):
        groups.setdefault(entry.training, []).append(entry)
    return {name: groups[name] for name in results.trainings() if name in groups}


@styled
def class_map(clients: Clients | None) -> Plot | None:
    """Heat map of samples per class (rows) and client (columns), darker for more, by square root."""
    if clients is None or not clients.class_counts or not clients.classes:
        return None
    counts = np.array(clients.class_counts).T  # (classes, clients)
    classes, number = counts.shape
    figure = new_figure(min(0.7 + 0.24 * classes, 7.0))
    axes = figure.subplots()
    bare(axes, grid=False)
    axes.spines["bottom"].set_visible(False)
    colours = tinted(counts, counts.max())
    edges: dict[str, Any] = {"edgecolors": "none", "linewidth": 0, "rasterized": counts.size > _VECTOR_CELLS}
    axes.pcolormesh(np.arange(number + 1) - 0.5, np.arange(classes + 1) - 0.5, colours, **edges)
    axes.invert_yaxis()
    if counts.size <= _NUMBERED_CELLS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                axes.text(column, row, str(count), ha="center", va="center", fontsize=8)
    _named_ticks(axes, [str(name) for name in clients.classes])
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20, min_n_ticks=1))
    empty = int((counts == 0).sum())
    alt = f"Heat map of samples: {number} clients, {classes} classes; {empty} of {counts.size} pairs empty"
    return to_svg(figure, "classes", alt)


def _named_ticks(axes: Axes, names: list[str]) -> None:
    """Name every class while there is room, else every n-th."""
    step = math.ceil(len(names) / 25)
    axes.set_yticks(range(0, len(names), step), names[::step])


def local_training_seconds(entry: Round, workers: int | None) -> float:
    """Give the part of a round's wall time that local training explains, in seconds.

    With simulated clients that share `workers`: the sum over clients divided by the workers (no more of
    them than clients). Where each client is a machine of its own (None): the slowest client's time.
    """
    if not entry.train_seconds:
        return 0.0
    if workers is None:
        return min(max(entry.train_seconds), entry.wall_seconds)
    share = sum(entry.train_seconds) / min(workers, len(entry.train_seconds))
    return min(share, entry.wall_seconds)


def workers_of(results: Results) -> int | None:
    """Give the number of workers of a simulation; None in deployment (there no class counts are known)."""
    simulated = results.clients is not None and results.clients.class_counts is not None
    workers = results.setting("workers")
    return workers if simulated and isinstance(workers, int) and workers > 0 else None


@styled
def round_times(results: Results) -> Plot | None:
    """Stacked bars, a panel a training: wall time of each round, local training and the rest."""
    groups = by_training(results)
    if not groups:
        return None
    workers = workers_of(results)
    if len(groups) >= MANY_TRAININGS:
        times = {name: [local_training_seconds(entry, workers) for entry in found] for name, found in groups.items()}
        return time_bars(groups, times)
    figure = new_figure(2.5)
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    words = []
    for index, (axes, (training, rounds)) in enumerate(zip(panels, groups.items(), strict=True)):
        bare(axes)
        x = [entry.round for entry in rounds]
        local = np.array([local_training_seconds(entry, workers) for entry in rounds])
        wall = np.array([entry.wall_seconds for entry in rounds])
        colour = TRAINING_STYLES[index % len(TRAINING_STYLES)][0]
        axes.bar(x, local, 0.8, color=colour)
        axes.bar(x, wall - local, 0.8, bottom=local, color=colour, alpha=0.35)
        axes.set_title(training, loc="left")
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        words.append(f"{training}: {wall.mean():.1f} s a round, {local.mean():.1f} s of it local training")
    panels[0].set_ylabel("seconds")
    handles = [
        Patch(facecolor=MUTED, label="local training"),
        Patch(facecolor=MUTED, alpha=0.35, label="everything else"),
    ]
    legend_above(figure, handles, columns=2)
    return to_svg(figure, "times", "Wall time per round. " + "; ".join(words))
