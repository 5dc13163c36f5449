"""Common style of the plots, and their conversion from matplotlib figures to SVG and PNG.

Figures are drawn with matplotlib's object API on their own canvas, never through pyplot's global state. Text and lines
are drawn in the colors of the light theme; in the SVG these become CSS variables, so that plots follow the page's
light or dark theme. Text stays text, in the page's font.
"""

from __future__ import annotations

import functools
import html
import io
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from fedtta.server.report.markup import DARK, LIGHT

WIDTH = 5.0  # inches; text stays readable when a phone shows the plot at four fifths of this size
#: Colors of the page and of the plots in it, as CSS variables.
INK, MUTED, GRID = LIGHT["--ink"], LIGHT["--muted"], LIGHT["--line"]
# Paul Tol's "bright" scheme (personal.sron.nl/~pault): distinguishable by colorblind readers, on white and on black.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DPI = 160

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
    "figure.constrained_layout.w_pad": 0.04,
    "figure.constrained_layout.h_pad": 0.04,
}

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Plot:
    """A plot as inline SVG, with an alternative text that gives its main numbers."""

    svg: str
    alt: str
    name: str
    figure: Figure = field(repr=False, compare=False)


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """Run a drawing function in this style; matplotlib's settings are restored afterwards."""

    @functools.wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_figure(height: float) -> Figure:
    """Return a figure of the page's width and a height in inches, without background."""
    return Figure(figsize=(WIDTH, height), facecolor="none", layout="constrained")


def bare(axes: Axes, grid: Literal["x", "y", "both", ""] = "y") -> None:
    """Remove box and background; `grid` names the axes with grid lines."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis=grid)


def integer_x(axes: Axes) -> None:
    """Place the ticks of the x axis at integers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10], nbins=8))


def series_style(index: int) -> dict[str, Any]:
    """Return color, marker and line style of a series."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":")[index // len(COLORS) % 3],
    }


def heat_map(axes: Axes, values: np.ndarray, numbers: Callable[[float], str] | None = None) -> None:
    """Draw values [R, C] from 0 to 1 as the opacity of cells; NaN shows the page itself, in both themes.

    `numbers` formats the text of a cell. Large maps are drawn as bitmaps.
    """
    bare(axes, grid="")
    axes.spines["bottom"].set_visible(False)
    rows, columns = values.shape
    colors = np.broadcast_to(to_rgba(COLORS[0]), (rows, columns, 4)).copy()
    colors[..., 3] = 0.75 * np.nan_to_num(values)
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    axes.pcolormesh(*edges, colors, edgecolors="none", linewidth=0, rasterized=values.size > 2500)
    axes.invert_yaxis()
    if numbers:
        size = float(np.clip(90 / max(columns, 1), 6.0, 8.5))
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axes.text(column, row, numbers(value), ha="center", va="center", fontsize=size)


def legend_above(figure: FigureBase, handles: Iterable[Artist], columns: int) -> None:
    """Place a legend above a figure or subfigure, in at most `columns` columns that fit the page's width."""
    handles = list(handles)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    fitting = max(1, int(WIDTH / (0.5 + 0.075 * longest)))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(columns, fitting), frameon=False, fontsize=9)


def to_svg(figure: Figure, name: str, alt: str) -> Plot:
    """Render a figure as SVG for use inside HTML.

    Parameters
    ----------
    figure
        Drawn inside a `styled` function.
    name
        Letters only and unique in the page: it distinguishes the ids of several plots.
    alt
        Alternative text.
    """
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the reader's fonts draw the text
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = compact(re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg))  # HTML needs no namespaces
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    for color, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line")):
        svg = svg.replace(color, f"var({variable})")
    label = html.escape(alt, quote=True)
    svg = re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{label}" ', svg, count=1)
    return Plot(svg, alt, name, figure)


def compact(svg: str) -> str:
    """Halve the size of matplotlib's SVG: coordinates in hundredths of a point, and the page's font."""

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute[0])

    svg = re.sub(r'\s(d|x|y|points|transform)="[^"]*"', rounded, svg)
    svg = re.sub(r'\stransform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to the ids of groups
    return re.sub(r"[ ]*\n[ ]*", "\n", re.sub(r">\s+<", "><", svg))


def plot_figure(plot: Plot, caption: str) -> str:
    """Return a figure with a plot and its caption (HTML)."""
    return f'<figure class="plot">{plot.svg}<figcaption>{caption}</figcaption></figure>'


def standalone(plot: Plot) -> str:
    """Return a plot as an SVG document of its own that follows the reader's light or dark theme."""
    light, dark = (";".join(f"{name}:{color}" for name, color in theme.items()) for theme in (LIGHT, DARK))
    style = (
        f"<style>:root{{{light};background:var(--page);font-family:sans-serif}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    )
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening, rest = plot.svg.replace("<svg ", f"<svg {names} ", 1).split(">", 1)
    return f"{opening}>{style}{rest}"


@styled
def to_png(plot: Plot) -> bytes:
    """Render a plot as PNG in the light theme."""
    buffer = io.BytesIO()
    plot.figure.savefig(buffer, format="png", dpi=_DPI, facecolor=LIGHT["--page"], metadata={"Software": None})
    return buffer.getvalue()
