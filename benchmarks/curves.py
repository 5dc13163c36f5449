"""Accuracy on the test distributions on the way (FedTHE, Figures 8 to 13): every few rounds of one training.

A run of fewer rounds is the beginning of a longer one, so each point is tested from a checkpoint of the training that
is kept; nothing is trained twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from benchmarks.cache import evaluated
from benchmarks.cells import Content, read_cell, row_content
from benchmarks.protocol import Cell, of_seed
from benchmarks.record import write_json
from server.methods import Training, plan
from server.report.drawing import Plot, bare, legend_above, new_figure, series_style, styled, to_svg
from settings import Settings, SettingsError

ACROSS = 3  # panels in a row


def points(settings: Settings, every: int) -> list[int]:
    """Return the rounds that are tested on the way to the last one."""
    return list(range(every, settings.rounds, every))


def missing_points(path: Path, settings: Settings, every: int) -> list[tuple[int, Training, list[str]]]:
    """Return (round, training, rows) of all that a cell's file lacks.

    Raises
    ------
    SettingsError
        A training has several phases: its beginning is no shorter training.
    """
    kept = read_cell(path).get("curves", {}) if path.exists() else {}
    found = []
    for training in plan(settings):
        if len(training.recipe.stages) > 1:
            raise SettingsError(f"--every {every}: allowed with trainings of one phase; {training.name} has several")
        for round in points(settings, every):
            labels = [row.label for row in training.rows if str(round) not in kept.get(row.label, {})]
            if labels:
                found.append((round, training, labels))
    return found


def fill_curves(path: Path, protocol: str, cell: Cell, seed: int, every: int, folder: Path) -> Iterator[str]:
    """Test the rows of a cell that is filled on the way to its last round; each point is kept and named.

    Raises
    ------
    SettingsError, RunError
        As `missing_points` and `evaluated`.
    """
    settings = of_seed(cell.settings, seed)
    for round, training, labels in missing_points(path, settings, every):
        short = settings.replace(rounds=round, methods=",".join(labels))
        place = folder / protocol / f"{cell.name}-{seed}" / f"{training.name}-{round}"
        results = evaluated(short, folder / "trainings", place, of=settings)
        content = read_cell(path)
        curves = content.setdefault("curves", {})
        for label in labels:
            shifts = row_content(results, label, training.name)["shifts"]
            means = {shift: one["accuracy_percent"] for shift, one in shifts.items()}
            curves[label] = dict(sorted({**curves.get(label, {}), str(round): means}.items(), key=lambda p: int(p[0])))
        write_json(path, content)
        yield f"{training.name} after round {round}"


def curve(content: Content, label: str, shift: str) -> dict[int, float]:
    """Return round → accuracy in percent of one row on one distribution, the last round included."""
    kept = content.get("curves", {}).get(label, {})
    found = {int(round): float(means[shift]) for round, means in kept.items() if shift in means}
    last = content["rows"][label]["shifts"].get(shift)
    return {**found, **({int(content["settings"]["rounds"]): last["accuracy_percent"]} if last and found else {})}


@styled
def curve_panels(contents: Mapping[int, Content]) -> Plot | None:
    """Draw a panel a distribution: accuracy over the rounds, mean over the seeds that have all of a row's points."""
    first = contents[min(contents)]
    labels = [label for label in first["rows"] if label in first.get("curves", {})]
    shifts = list(dict.fromkeys(shift for label in labels for shift in first["rows"][label]["shifts"]))
    if not labels:
        return None
    down = -(-len(shifts) // ACROSS)
    figure = new_figure(0.5 + 2.0 * down)
    panels = figure.subplots(down, ACROSS, squeeze=False, sharey=True).ravel()
    words = []
    for axes, shift in zip(panels, shifts, strict=False):
        bare(axes)
        axes.set_title(shift, loc="left")
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=5))
        for index, label in enumerate(labels):
            rounds, mean = _mean([curve(one, label, shift) for one in contents.values() if label in one["rows"]])
            axes.plot(rounds, mean, markersize=3, linewidth=1.3, **series_style(index))
            words += [f"{label} on {shift}: {mean[0]:.1f} to {mean[-1]:.1f} %"] if rounds else []
    for axes in panels[len(shifts) :]:
        axes.set_visible(False)
    handles = [Line2D([], [], label=label, markersize=3, **series_style(i)) for i, label in enumerate(labels)]
    legend_above(figure, handles, columns=min(len(handles), 5))
    return to_svg(figure, "rounds", "Accuracy in % over the rounds. " + "; ".join(words))


def _mean(curves: list[dict[int, float]]) -> tuple[list[int], list[float]]:
    """Return the rounds of the first curve, and the means over all curves that have the same."""
    rounds = sorted(curves[0])
    same = [one for one in curves if sorted(one) == rounds]
    return rounds, [float(np.mean([one[round] for one in same])) for round in rounds]
