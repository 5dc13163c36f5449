"""The look all plots share: colours, axes, and the way from a matplotlib figure to SVG in a page.

Figures are drawn with the object API on their own canvas, never through pyplot's global state. Ink, muted
ink and grid lines are drawn in stand-in colours, which become CSS variables in the SVG: the page's light
and dark themes then reach into the plots. Text stays text, in the page's font.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

WIDTH = 7.6  # inches; figures fill the text column
INK, MUTED, GRID = "#010203", "#040506", "#070809"  # stand-ins, see `to_svg`
# Paul Tol's "bright" scheme (personal.sron.nl/~pault): distinct for colour-blind readers, and on white and
# black. Grey comes first: the first row of a table is usually the plain baseline.
METHOD_COLOURS = ("#999999", "#ccbb44", "#66ccee", "#ee6677", "#4477aa", "#228833", "#aa3377")
# Trainings are no methods: his "vibrant" scheme, with a marker each.
TRAINING_STYLES = (("#ee7733", "o"), ("#009988", "s"), ("#ee3377", "^"), ("#0077bb", "D"))
HATCHES = ("", "////", "....", "xxxx")  # when there are more methods than colours
FEW = 500  # from the least to the most of a logarithmic axis that has room for more than powers of ten
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are not formulas
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
}


Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Plot:
    """A picture as inline SVG, and what it shows in words for those who cannot see it."""

    svg: str
    alt: str
    name: str
    figure: Figure = field(repr=False, compare=False)


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Let a function make and render its figure in this look; matplotlib's settings are restored after it."""

    @functools.wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_figure(height: float) -> Figure:
    """Make a figure of the page's width, `height` inches high, without background."""
    return Figure(figsize=(WIDTH, height), facecolor="none", layout="constrained")


def tinted(values: np.ndarray, highest: float, colour: str = "#4477aa") -> np.ndarray:
    """Give RGBA colours [..., 4] for values [...], stronger for more (square-root scale).

    Opacity carries the value, so that an empty cell is the page itself in either theme.
    """
    colours = np.broadcast_to(to_rgba(colour), (*values.shape, 4)).copy()
    colours[..., 3] = 0.85 * np.sqrt(values / highest if highest > 0 else np.zeros(values.shape))
    return colours


def bare(axes: Axes, grid: bool = True) -> None:
    """Leave only what helps reading: no box, no background, thin horizontal lines."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis="y")


def log_x(axes: Axes) -> None:
    """Make the x axis of what is drawn logarithmic: plain numbers at powers of ten, and 2 and 5 times them if few."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < FEW * low else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def method_style(index: int) -> dict[str, Any]:
    """Give colour and hatch of the method in this row of the table, the same in every plot."""
    return {
        "facecolor": METHOD_COLOURS[index % len(METHOD_COLOURS)],
        "hatch": HATCHES[index // len(METHOD_COLOURS) % len(HATCHES)],
        "edgecolor": INK if index >= len(METHOD_COLOURS) else "none",
    }


def series_style(index: int) -> dict[str, Any]:
    """Give colour and marker of a line, where lines are compared within a panel."""
    return {
        "color": METHOD_COLOURS[index % len(METHOD_COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":")[index // len(METHOD_COLOURS) % 3],
    }


def legend_above(figure: Figure, handles: Iterable[Artist], columns: int) -> None:
    """Put the legend over the plot, in a line if it fits."""
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns, frameon=False, fontsize=9)


def to_svg(figure: Figure, name: str, alt: str) -> Plot:
    """Render a figure as SVG for use inside HTML.

    Parameters
    ----------
    figure
        Drawn inside a `styled` function.
    name
        Letters only and unique in the page: it keeps the ids of several pictures apart.
    alt
        What the plot shows, in words.
    """
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = compact(re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg))  # HTML parsers know SVG without being told
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for stand_in, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line")):
        svg = svg.replace(stand_in, f"var({variable})")
    label = html.escape(alt, quote=True)
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', svg, count=1)
    return Plot(svg, alt, name, figure)


def compact(svg: str) -> str:
    """Shorten matplotlib's SVG by half: hundredths of a point, and the page's font instead of lists of fonts."""

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])

    svg = re.sub(r'\s(d|x|y|points|transform)="[^"]*"', rounded, svg)
    svg = re.sub(r'\stransform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to them
    return re.sub(r"[ ]*\n[ ]*", "\n", re.sub(r">\s+<", "><", svg))
