"""Every ratio that was measured, part by part, with its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.speed.figure import Figure
from server.report.drawing import INK, Plot, bare, log_x, new_figure, styled, to_svg

REACHED, MISSED, FREE = "#228833", "#ee6677", "#4477aa"
LINE = 0.2  # inches


def picture(content: Mapping[str, Mapping[str, Any]]) -> Plot:
    """Return the plot of `speed.json`: a dot a ratio on a logarithmic line, a stroke for its target."""
    return _draw({part["title"]: [Figure(**row) for row in part["figures"]] for part in content.values()})


@styled
def _draw(parts: Mapping[str, list[Figure]]) -> Plot:
    heights = [0.5 + LINE * len(figures) for figures in parts.values()]
    figure = new_figure(sum(heights) + 0.4 * len(parts))
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    words = []
    for axes, (title, figures) in zip(panels, parts.items(), strict=True):
        lines = range(len(figures))
        shown = [max(one.ratio, 1e-3) for one in figures]
        colours = [{"": FREE, "✓": REACHED, "✗": MISSED}[one.mark] for one in figures]
        axes.scatter(shown, lines, c=colours, s=22, zorder=3)
        for line, one in zip(lines, figures, strict=True):
            if one.target is not None:
                axes.plot([one.target] * 2, [line - 0.35, line + 0.35], color=INK, linewidth=1.5)
        log_x(axes)
        axes.set_yticks(list(lines), [one.what for one in figures])
        axes.set_ylim(len(figures) - 0.5, -0.5)
        axes.set_title(title, loc="left")
        bare(axes)
        words += [f"{one.what}: {one.ratio:.3g}{f' ({one.wanted})' if one.wanted else ''}" for one in figures]
    return to_svg(figure, "speed", "Ratios; a dark stroke is the target. " + "; ".join(words))
