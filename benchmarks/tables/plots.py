"""Tables that have a command and a Markdown page of their own, as sections of the page with pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from markdown_it import MarkdownIt

from benchmarks.atp_tables import SHIFTS
from models import load_arrays
from server.report import Results
from server.report.drawing import Plot
from server.report.events import AdaptRound, Rates
from server.report.markup import picture
from server.report.plots_collaboration import weight_maps
from server.report.plots_rates import rates_by_module

#: Whose weights are drawn: the paper's method; the others' are in collaborate.json.
SHOWN = {("bbn", "pfedbbn"), ("bbn", "pfedbbn[share=statistics]")}
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def other_tables(out: Path) -> dict[str, str]:
    """Return a section of HTML for each table of a folder of results that has a page of its own, by its name."""
    return {path.stem: _section(path) for path in pages(out) if path.stem in PICTURES}


def pages(out: Path) -> list[Path]:
    """Return the Markdown pages of a folder of results, but for those that `README.md` is made of."""
    return [path for path in sorted([*out.glob("*.md"), *out.glob("*/*.md")]) if path.name != "README.md"]


def _section(path: Path) -> str:
    """Return a page as HTML, with the pictures of what is kept beside it."""
    plot, caption = PICTURES[path.stem](path.parent)
    drawn = [picture(plot, caption)] if plot else []
    return prose(path.stem, path.read_text(), *drawn)


def prose(name: str, markdown: str, *pictures: str) -> str:
    """Return Markdown as a section of HTML that can be linked to, with pictures below it."""
    return "\n".join([f'<section class="prose" id="{name}">', to_html(markdown), *pictures, "</section>"])


def to_html(markdown: str) -> str:
    """Return Markdown as HTML: headings a level lower, and tables that scroll sideways on a narrow screen."""
    tokens = MARKDOWN.parse(markdown)
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{int(token.tag[1]) + 1}"
    html: str = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
    return html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")


def learned_rates(folder: Path) -> tuple[Plot | None, str]:
    """Return ATP's figure 4: the rates learned under each shift, by block and by type of module."""
    entries = []
    for shift in SHIFTS:
        path = folder / f"{shift}-all.json"
        if path.exists():
            rates = json.loads(path.read_text())["rates"]
            arrays = load_arrays(folder / f"{shift}.safetensors")[0]
            entries.append(Rates("atp", shift, rates, {name: arrays[name].size for name in rates}))
    caption = "<strong>Learned adaptation rates</strong> under each shift; a dot is a module (ATP, Figure 4)."
    return rates_by_module(Results(rates=entries)), caption


def mixing_weights(folder: Path) -> tuple[Plot | None, str]:
    """Return pFedBBN's figure 5: the weights that clients give each other, for the rows of `SHOWN`."""
    entries = [
        AdaptRound(f"{method}, {mix}", together, int(number), list(range(len(rows))), rows, 0.0, 0, 0, 0)
        for method, row in json.loads((folder / "collaborate.json").read_text())["cells"].items()
        for together, mixes in row.items()
        if (method, together) in SHOWN
        for mix, cell in mixes.items()
        for number, text in cell.get("weights", {}).items()
        if (rows := [[float(word) for word in line.split()] for line in text.split(";")])
    ]
    caption = (
        "<strong>Weights in %</strong> that each client (row) gives the others' networks (pFedBBN, Figure 5); "
        "iid, 0.01, 0.005: the class mix of the streams."
    )
    return weight_maps(Results(adapt_rounds=entries)), caption


def no_picture(folder: Path) -> tuple[Plot | None, str]:
    """Return nothing: the tables of this page are all there is."""
    return None, ""


#: Page → what draws a picture from the files beside it.
PICTURES: dict[str, Callable[[Path], tuple[Plot | None, str]]] = {
    "seconds": no_picture,
    "atp": learned_rates,
    "collaborate": mixing_weights,
    "fedicon": no_picture,
}
