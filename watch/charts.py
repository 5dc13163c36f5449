"""Small line charts as inline SVG in the colors of the page, with their main numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

#: Position, and value; None: unknown, which interrupts the line.
Point = tuple[float, float | None]

WIDTH, HEIGHT = 420.0, 120.0  # text of 11 units stays readable on a phone
LEFT, TOP, BOTTOM = 62.0, 10.0, 24.0  # margins of a chart, for its labels
MOST = 400  # points of a chart


def sparkline(values: Sequence[float], title: str) -> str:
    """Return values from 0 to 1 as a line the size of a word."""
    points: list[Point] = [(float(number), value) for number, value in enumerate(values[-MOST:])]
    line = "".join(_lines(points, (0.0, 1.0), (1.0, 1.0, 78.0, 18.0)))
    return (
        f'<svg role="img" viewBox="0 0 80 20" style="display:inline-block;width:5rem;height:1.25rem;'
        f'vertical-align:middle"><title>{escape(title)}</title>{line}</svg>'
    )


def line_chart(
    caption: str,
    points: Sequence[Point],
    words: Callable[[float], str],
    limits: tuple[float, float] | None,
    position: Callable[[float], str],
) -> str:
    """Return a figure with a line.

    Parameters
    ----------
    caption : str
        Text.
    points : sequence of (float, float or None)
        In the order of their positions; at least one has a value.
    words, position : callable
        Format a value and a position as text.
    limits : (float, float) or None
        Lowest and highest value of the axis; None: those of the points.
    """
    points = points[-MOST:]
    known = [value for _, value in points if value is not None]
    low, high = limits or (min(known), max(known))
    title = f"{caption}: {words(min(known))} to {words(max(known))}, last {words(known[-1])}"
    area = (LEFT, TOP, WIDTH - LEFT - 10, HEIGHT - TOP - BOTTOM)
    lines = "".join(_lines(points, (low, high), area))
    labels = [
        (LEFT - 6, TOP + 4, "end", words(high)),
        (LEFT - 6, HEIGHT - BOTTOM, "end", words(low) if low != high else ""),
        (LEFT, HEIGHT - 6, "start", position(points[0][0])),
        (WIDTH - 10, HEIGHT - 6, "end", position(points[-1][0]) if len(points) > 1 else ""),
    ]
    texts = "".join(
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="11" style="fill:var(--muted)">'
        f"{escape(label)}</text>"
        for x, y, anchor, label in labels
        if label
    )
    axis = (
        f'<path d="M{LEFT:g} {TOP:g}V{HEIGHT - BOTTOM:g}H{WIDTH - 10:g}" '
        'style="fill:none;stroke:var(--line);stroke-width:1"/>'
    )
    return (
        f'<figure class="plot"><svg role="img" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" style="max-width:30rem">'
        f"<title>{escape(title)}</title>"
        f"{axis}{lines}{texts}</svg><figcaption><strong>{escape(caption)}</strong>, last "
        f"{escape(words(known[-1]))}.</figcaption></figure>"
    )


def _lines(
    points: Sequence[Point], limits: tuple[float, float], area: tuple[float, float, float, float]
) -> Iterator[str]:
    """Yield the parts of a line in an area (x, y, width, height); a part of one point is a dot."""
    (low, high), (left, top, width, height) = limits, area
    first, span = points[0][0], points[-1][0] - points[0][0]
    parts: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            parts.append([])
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        x = left + width * ((at - first) / span if span > 0 else 0.5)
        parts[-1].append((x, top + height * (1 - min(max(share, 0.0), 1.0))))
    for part in parts:
        if len(part) == 1:
            yield f'<circle cx="{part[0][0]:.1f}" cy="{part[0][1]:.1f}" r="2" style="fill:var(--accent)"/>'
        elif part:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in part)
            yield f'<path d="M{path}" style="fill:none;stroke:var(--accent);stroke-width:1.5"/>'
