"""The page's building blocks: a figure, a table, a line about what is missing."""

from __future__ import annotations

from html import escape

from server.report.drawing import Plot


def missing(words: str) -> str:
    """Say that a part is left out, and why."""
    return f'<p class="missing">{escape(words)}</p>'


def picture(plot: Plot, caption: str) -> str:
    """Put a plot and its caption (HTML) in a figure; on a narrow screen the plot scrolls sideways."""
    drawing = f'<div class="scroll">{plot.svg}</div>'
    return f'<figure class="picture">{drawing}<figcaption>{caption}</figcaption></figure>'


def data_table(head: list[str], body: list[str], caption: str, kind: str = "") -> str:
    """Make a table of header cells and body rows, all HTML; headers are <th> already where needed."""
    header = "".join(f'<th scope="col"{cell}</th>' for cell in head)
    return (
        f'<figure class="data"><figcaption>{caption}</figcaption><div class="scroll"><table class="{kind}">'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(body)}</tbody></table></div></figure>"
    )
