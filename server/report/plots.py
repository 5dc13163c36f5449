"""The six plots of a run. A plot without data is None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedtta.server.report.collaboration import Matrix, matrix, mixing_rounds, plain_mixing
from fedtta.server.report.drawing import (
    COLORS,
    INK,
    MUTED,
    Plot,
    bare,
    heat_map,
    integer_x,
    legend_above,
    new_figure,
    series_style,
    styled,
    to_svg,
)
from fedtta.server.report.events import WEIGHT_BINS, AdaptRound, Rates
from fedtta.server.report.rates import MODULE_TYPES, block_of, module_type, variant_labels
from fedtta.server.report.results import Results
from fedtta.server.report.scores import METRICS, Row, by_method, client_accuracy, percent, row_labels, table

_TOGETHER = 4  # training curves in a pair of panels
_MARKED_ROUNDS = 30  # with more rounds the markers of a curve run into each other
_NUMBERED_CELLS = 320  # a heat map with more cells is drawn without numbers
_NAMED_CLIENTS = 24  # names of clients below a heat map
_ACROSS = 3  # heat maps of W in a line
_DASHED: Any = (0, (4, 2))


def plots(results: Results) -> list[Plot]:
    """Draw every plot for which the run has data, in the order of the page."""
    drawn = (
        accuracy_by_shift(table(results)),
        accuracy_by_client(results),
        collaboration(results),
        weight_histograms(results),
        rates_by_module(results),
        training_curves(results),
    )
    return [plot for plot in drawn if plot is not None]


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """Return limits of an axis of percentages, in tens."""
    numbers = [value for value in values if math.isfinite(value)] or [0.0, 100.0]
    return max(0.0, 10 * math.floor(min(numbers) / 10 - 0.1)), min(100.0, 10 * math.ceil(max(numbers) / 10 + 0.1))


# 1. Accuracy by method and distribution


@styled
def accuracy_by_shift(rows: Sequence[Row]) -> Plot | None:
    """Draw a line for each method, the best average first, with a marker for each distribution."""
    shifts = list(rows[0].cells) if rows else []
    if not shifts:
        return None
    ordered = sorted(rows, key=lambda row: -1.0 if row.average is None else row.average)
    figure = new_figure(0.9 + 0.22 * len(rows))
    axes = figure.subplots()
    bare(axes, grid="both")
    handles = []
    for index, shift in enumerate(shifts):
        style = series_style(index) | {"linestyle": "none", "markersize": 5}
        points = [(100 * cell.mean, y) for y, row in enumerate(ordered) if (cell := row.cells[shift])]
        axes.plot([x for x, _ in points], [y for _, y in points], **style, clip_on=False)
        handles.append(Line2D([], [], **style, label=shift))
    averages = [(100 * row.average, y) for y, row in enumerate(ordered) if row.average is not None]
    if len(shifts) > 1:
        axes.scatter([x for x, _ in averages], [y for _, y in averages], marker="|", s=80, color=INK, linewidths=1.5)
        handles.append(Line2D([], [], marker="|", color=INK, linestyle="none", markersize=8, label="average"))
    axes.set_yticks(range(len(ordered)), [row.label for row in ordered], fontsize=8.5)
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.set_xlim(*_limits(100 * cell.mean for row in rows for cell in row.cells.values() if cell))
    axes.set_xlabel("accuracy, %")
    legend_above(figure, handles, columns=6)
    alt = "Accuracy by method and test distribution, best average first. " + "; ".join(
        f"{row.label}: " + ", ".join(f"{name} {percent(cell.mean)} %" for name, cell in row.cells.items() if cell)
        for row in reversed(ordered)
    )
    return to_svg(figure, "accuracy", alt)


# 2. Accuracy of each client


@styled
def accuracy_by_client(results: Results) -> Plot | None:
    """Draw a heat map of accuracies in %: a row for each method, or method and collaboration; a column for a client."""
    found = client_accuracy(results)
    together = matrix(results)
    for outcome in together.outcomes if together else []:
        accuracies = {
            client: float(value) for client, value in enumerate(outcome.scores.per_client) if not np.isnan(value)
        }
        found[outcome.label] = accuracies
    if not found:
        return None
    columns = results.columns(1 + max(client for values in found.values() for client in values))
    clients, names = len(columns), [results.name(client) for client in columns]
    values = np.array([[row.get(client, math.nan) for client in columns] for row in found.values()])
    figure = new_figure(0.6 + 0.24 * len(found))
    axes = figure.subplots()
    numbered = values.size <= _NUMBERED_CELLS and clients <= 24
    heat_map(axes, values, (lambda value: percent(value, 0)) if numbered else None)
    axes.set_yticks(range(len(found)), list(found), fontsize=8.5)
    if names == [str(position) for position in range(clients)]:
        integer_x(axes)
    else:
        _client_ticks(axes, names)
    axes.set_xlabel("client")
    words = [
        f"{label}: from {percent(min(row.values()))} % to {percent(max(row.values()))} %"
        for label, row in found.items()
    ]
    return to_svg(figure, "clients", "Accuracy of each client. " + "; ".join(words))


def _client_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of clients below a heat map; of many only some."""
    ticks = range(0, len(names), math.ceil(len(names) / _NAMED_CLIENTS))
    axes.set_xticks(ticks, [names[tick] for tick in ticks], rotation=30, ha="right", fontsize=7.5)


# 3. Collaboration at test time: accuracy over the rounds, and the weights W


@styled
def collaboration(results: Results) -> Plot | None:
    """Draw the accuracy over the rounds of adaptation, and below it the weights W that clients give each other."""
    found = matrix(results)
    if found is None:
        return None
    mixed = _mixed(results)
    heights = [1.55 * len(found.methods) + 0.6, 1.95 * len(mixed)]
    figure = new_figure(sum(heights))
    parts: Any = figure.subfigures(2, 1, height_ratios=heights) if mixed else [figure]
    for part in parts:
        part.set_facecolor("none")
    _draw_rounds(parts[0], found)
    words = [f"{outcome.label}: {percent(outcome.scores.accuracy)} %" for outcome in found.outcomes]
    if mixed:
        words += _draw_weights(parts[1], mixed, results)
    return to_svg(figure, "collaboration", "Accuracy over the rounds at test time; at the end " + "; ".join(words))


def accuracy_so_far(correct: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the accuracy of all rounds up to each one, [R], from counts [R, K]."""
    return correct.sum(axis=1).cumsum() / total.sum(axis=1).cumsum().clip(1)


def _draw_rounds(figure: FigureBase, found: Matrix) -> None:
    """Draw a panel for each method and a line for each collaboration."""
    panels = figure.subplots(len(found.methods), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    seen: list[float] = []
    for axes, method in zip(panels, found.methods, strict=True):
        bare(axes)
        axes.set_title(method, loc="left")
        axes.set_ylabel("accuracy, %")
        for index, name in enumerate(found.collaborations):
            if (method, name) in found.cells:
                outcome = found.cells[method, name]
                percents = 100 * accuracy_so_far(outcome.correct, outcome.total)
                seen.extend(percents)
                size = 3 if len(outcome.rounds) <= _MARKED_ROUNDS else 0
                axes.plot(outcome.rounds, percents, **series_style(index), markersize=size, linewidth=1.5)
        integer_x(axes)
    panels[0].set_ylim(*_limits(seen))
    panels[-1].set_xlabel("round")
    handles = [
        Line2D([], [], **series_style(index), markersize=3, label=name)
        for index, name in enumerate(found.collaborations)
    ]
    legend_above(figure, handles, columns=5)


def _mixed(results: Results) -> dict[tuple[str, str], list[AdaptRound]]:
    """Return the rounds of `mixing_rounds` whose W is neither uniform nor the identity."""
    return {pair: rounds for pair, rounds in mixing_rounds(results).items() if not plain_mixing(rounds)}


def _draw_weights(figure: FigureBase, mixed: Mapping[tuple[str, str], list[AdaptRound]], results: Results) -> list[str]:
    """Draw heat maps of W, rows and columns being clients, and return a summary of each line."""
    grid = figure.subplots(len(mixed), _ACROSS, squeeze=False)
    words = []
    for line, ((method, name), rounds) in zip(grid, mixed.items(), strict=True):
        highest = max(max(row) for entry in rounds for row in entry.weights)
        for axes, entry in zip(line, rounds, strict=False):
            clients = len(entry.weights)
            heat_map(axes, np.sqrt(np.array(entry.weights) / highest))  # small weights stay visible
            axes.set_aspect("equal")
            axes.set_title(f"round {entry.round}", color=MUTED, fontsize=8.5)
            step = math.ceil(clients / 8)
            ticks, names = range(0, clients, step), [results.name(partition) for partition in entry.replied][::step]
            turned = {"rotation": 30, "ha": "right"} if max(map(len, names)) > 3 else {}
            axes.set_xticks(ticks, names, fontsize=7.5, **turned)
            axes.set_yticks(ticks, names, fontsize=7.5)
        for axes in line[len(rounds) :]:
            axes.set_axis_off()
        line[0].set_ylabel(f"{method}\n" + name.replace("[", "\n["), color=INK, fontsize=8.5)
        own = float(np.mean(np.diag(rounds[-1].weights)))
        words.append(f"{method} with {name}: a client's mean weight for itself is {own:.2f} in the last round")
    return words


# 4. Weight e of the global head


@styled
def weight_histograms(results: Results) -> Plot | None:
    """Draw histograms of the weight e of the global head: a row for each method, a column for each distribution."""
    labels = row_labels(results)
    histograms: dict[str, dict[str, np.ndarray]] = {}
    for pair, shifts in by_method(results).items():
        for shift, entries in shifts.items():
            counts = np.array([one.weight_histogram for one in entries if one.weight_histogram is not None])
            if counts.any():
                histograms.setdefault(labels[pair], {})[shift] = counts.sum(axis=0)
    if not histograms:
        return None
    (metric,) = (one for one in METRICS if one.name == "weight_mean")
    means = {row.label: row for row in table(results, metric)}
    columns = list(dict.fromkeys(shift for row in table(results) for shift in row.cells))
    figure = new_figure(0.75 + 0.85 * len(histograms))
    grid = figure.subplots(len(histograms), len(columns), squeeze=False, sharex=True, sharey="row")
    words = []
    for line, (label, found) in zip(grid, histograms.items(), strict=True):
        line[0].set_ylabel(label, color=INK, fontsize=8.5)
        for axes, shift in zip(line, columns, strict=True):
            mean = means[label].mean(shift)
            _weight_panel(axes, found.get(shift), mean)
            words += [f"{label} on {shift}: {mean:.2f}"] if mean is not None else []
    for axes, shift in zip(grid[0], columns, strict=True):
        first, mark, last = shift.rpartition("_")
        axes.set_title(f"{first}{mark}\n{last}" if len(shift) > 10 else shift, fontsize=8.5)
    figure.supxlabel("weight e of the global head", fontsize=9.5, color=MUTED)
    return to_svg(figure, "weights", "Histograms of the weight of the global head; means: " + ", ".join(words))


def _weight_panel(axes: Axes, counts: np.ndarray | None, mean: float | None) -> None:
    """Draw one histogram, as shares of the samples, with its mean; only the axis without samples."""
    bare(axes, grid="")
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    labels = axes.set_xticks([0, 0.5, 1], ["0", "½", "1"], fontsize=8)
    labels[0].label1.set_horizontalalignment("left")  # keep the outer labels inside the panel
    labels[-1].label1.set_horizontalalignment("right")
    if counts is None or mean is None:
        return
    centers = (np.arange(WEIGHT_BINS) + 0.5) / WEIGHT_BINS
    axes.bar(centers, counts / counts.sum(), 0.92 / WEIGHT_BINS, color=COLORS[0])
    axes.axvline(mean, color=INK, linewidth=1)
    anchor: dict[str, Any] = {"x": 0.99, "ha": "right"} if mean < 0.5 else {"x": 0.01, "ha": "left"}
    axes.text(y=0.97, s=f"{mean:.2f}", va="top", transform=axes.transAxes, fontsize=8.5, **anchor)


# 5. Learned adaptation rates (ATP, Figure 4)


@styled
def rates_by_module(results: Results) -> Plot | None:
    """Draw the mean size |α| of the rates by block, and the mean α by type of module, with a dot for each rate."""
    if not any(entry.rates for entry in results.rates):
        return None
    labels = list(variant_labels((entry.training, entry.variant) for entry in results.rates).values())
    names = dict.fromkeys(name for entry in results.rates for name in entry.rates)
    sizes = {name: number for entry in results.rates for name, number in entry.sizes.items()}
    blocks = block_of(list(names))
    types = {name: module_type(name, sizes) for name in names}
    by_type = [_grouped(entry, types, float) for entry in results.rates]
    figure = new_figure(5.4)
    upper, lower = figure.subplots(2, 1)
    by_block = [_grouped(entry, blocks, abs) for entry in results.rates]
    _bars(upper, by_block, dict.fromkeys(blocks.values()), "mean size of the rates by block")
    _bars(lower, by_type, MODULE_TYPES, "mean rate by type of module")
    lower.axhline(0, color=MUTED, linewidth=0.7)
    if len(labels) > 1:
        legend_above(figure, [Patch(color=COLORS[i % len(COLORS)], label=one) for i, one in enumerate(labels)], 4)
    words = [
        f"{label}: " + ", ".join(f"{kind} {np.mean(rates):+.3g}" for kind, rates in found.items())
        for label, found in zip(labels, by_type, strict=True)
    ]
    return to_svg(figure, "rates", "Learned adaptation rates, mean by type of module. " + "; ".join(words))


def _grouped(entry: Rates, groups_of: Mapping[str, str], value: Callable[[float], float]) -> dict[str, list[float]]:
    """Return the values of each group's rates, for the modules that the variant adapts."""
    groups: dict[str, list[float]] = {}
    for name, rate in entry.rates.items():
        running = name.endswith((".running_mean", ".running_var"))
        if entry.variant != ("params" if running else "stats"):
            groups.setdefault(groups_of[name], []).append(value(rate))
    return groups


def _bars(axes: Axes, series: list[dict[str, list[float]]], order: Iterable[str], title: str) -> None:
    """Draw grouped bars of means, with a dot for each value; `order` has all possible groups."""
    names = [name for name in order if any(name in found for found in series)]
    width = 0.8 / len(series)
    bare(axes)
    axes.set_title(title, loc="left")
    for index, found in enumerate(series):
        x = np.array([names.index(name) for name in found]) + (index - (len(series) - 1) / 2) * width
        axes.bar(x, [float(np.mean(values)) for values in found.values()], 0.9 * width, color=COLORS[index % 7])
        dots = [(position, value) for position, values in zip(x, found.values(), strict=True) for value in values]
        axes.plot(*zip(*dots, strict=True), ".", color=INK, markersize=3, alpha=0.6)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)


# 6. Training curves


def curves(results: Results) -> dict[str, dict[str, list[float]]]:
    """Return the curves of each training and each learning of rates, by round; unknown values are NaN.

    ``round``, ``accuracy`` and ``personal`` (validation accuracy in %, of the global and the personal head), ``loss``.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for training, rounds in results.by_training().items():
        found[training] = {
            "round": [entry.round for entry in rounds],
            "accuracy": [_percent(entry.validation_accuracy) for entry in rounds],
            "personal": [_percent(entry.personal_validation_accuracy) for entry in rounds],
            "loss": [_finite(entry.train_loss) for entry in rounds],
        }
    labels = variant_labels((entry.training, entry.variant) for entry in results.rates_rounds)
    for pair, label in labels.items():
        chosen = [entry for entry in results.rates_rounds if (entry.training, entry.variant) == pair]
        ordered = sorted(chosen, key=lambda entry: entry.round)
        found[f"rates: {label}"] = {
            "round": [entry.round for entry in ordered],
            "accuracy": [_percent(entry.accuracy) for entry in ordered],
            "personal": [math.nan] * len(ordered),
            "loss": [_finite(entry.loss) for entry in ordered],
        }
    return found


def _finite(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


@styled
def training_curves(results: Results) -> Plot | None:
    """Draw accuracy and loss over the rounds, with at most four trainings in a pair of panels."""
    found = list(curves(results).items())
    if not found:
        return None
    groups = [found[start : start + _TOGETHER] for start in range(0, len(found), _TOGETHER)]
    figure = new_figure(2.5 * len(groups))
    parts: Any = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, group in zip(parts, groups, strict=True):
        part.set_facecolor("none")
        _draw_curves(part, group)
    words = []
    for label, one in found:
        accuracies = [value for value in one["accuracy"] if not math.isnan(value)]
        words.append(
            f"{label}: {accuracies[0]:.1f} % to {accuracies[-1]:.1f} %" if accuracies else f"{label}: accuracy unknown"
        )
    return to_svg(figure, "curves", "Accuracy (from, to) and loss over the rounds. " + "; ".join(words))


def _draw_curves(figure: FigureBase, group: Sequence[tuple[str, dict[str, list[float]]]]) -> None:
    left, right = figure.subplots(1, 2)
    handles = []
    for index, (label, one) in enumerate(group):
        style = series_style(index) | {"linewidth": 1.5}
        marked = style | {"markersize": 3 if len(one["round"]) <= _MARKED_ROUNDS else 0}
        left.plot(one["round"], one["accuracy"], **marked)
        left.plot(one["round"], one["personal"], **(marked | {"linestyle": _DASHED, "markerfacecolor": "none"}))
        right.plot(one["round"], one["loss"], **marked)
        handles.append(Line2D([], [], **style, markersize=3, label=label))
    if any(not math.isnan(value) for _, one in group for value in one["personal"]):
        handles.append(Line2D([], [], color=MUTED, linestyle=_DASHED, label="personal head"))
    for axes, title in ((left, "validation accuracy, %"), (right, "training loss")):
        bare(axes)
        axes.set_title(title, loc="left")
        axes.set_xlabel("round")
        integer_x(axes)
    left.set_ylim(0, 100)
    legend_above(figure, handles, columns=5)
