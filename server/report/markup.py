"""Building blocks of the page: style sheet, figures, tables, and the format of numbers and times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

LIGHT = {"--page": "#fdfdfc", "--ink": "#1d2226", "--muted": "#5d666d", "--line": "#dcdfdd"}
DARK = {"--page": "#14171a", "--ink": "#e4e7e8", "--muted": "#9aa4ab", "--line": "#343b41"}


def document(title: str, body: str, head: str = "") -> str:
    """Return a whole page; `body` and `head`, which follows the style sheet, are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n{head}</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def section(name: str, content: str) -> str:
    """Return a part of a page under an id that stays the same."""
    return f'<section id="{name}">{content}</section>'


def data_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, kind: str = "") -> str:
    """Return a figure with a table that scrolls inside its own box; the first cell of a row is its header.

    Parameters
    ----------
    head, rows, caption
        HTML.
    kind
        CSS classes of the table: ``average`` sets the second column apart, ``text`` is for words instead of numbers,
        ``cards`` shows each row as a list on a narrow screen.
    """
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    labels = [f' data-label="{cell}"' if "cards" in kind else "" for cell in head]
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td{label}>{cell}</td>" for cell, label in zip(row[1:], labels[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<figure class="data"><figcaption>{caption}</figcaption><div class="scroll"><table class="{kind}">'
        f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def folded(title: str, content: str) -> str:
    """Return a part that opens on request; nothing if it is empty."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def definitions(pairs: Sequence[tuple[str, str]], kind: str) -> str:
    """Return a list of names and values, both HTML."""
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{items}</dl>'


def missing(words: str) -> str:
    """Return a paragraph that says what is missing and why."""
    return f'<p class="missing">{escape(words)}</p>'


def breakable(name: str) -> str:
    """Escape a name and allow line breaks at its punctuation."""
    for mark in ("_", ";", ","):
        name = name.replace(mark, f"{mark}\0")
    return escape(name.replace("[", "\0[").replace("(", "\0(")).replace("\0", "<wbr>")


def text(value: Any) -> str:
    """Format any value as escaped text: short floats, a dash for nothing."""
    if isinstance(value, float):
        return escape(f"{value:g}")
    return escape(str(value)) if value not in (None, "") else "–"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 client, 2 clients."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds: 4.2 s, 2 min 3 s, 1 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def instant(written: str) -> str:
    """Format an ISO 8601 time to the minute, in UTC if it has a time zone; return any other text unchanged."""
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        return written
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def size(count: float) -> str:
    """Format bytes with a decimal unit: 3.2 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"


def _variables(theme: dict[str, str]) -> str:
    return " ".join(f"{name}: {color};" for name, color in theme.items())


CSS = (
    f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)}
  --panel: #f3f4f2; --accent: #1f5f99; --good: #1d7a3c; --bad: #b3261e; --tint: #eaf1f8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_variables(DARK)}
    --panel: #1d2226; --accent: #8ebce8; --good: #7fd197; --bad: #ff9a90; --tint: #1c2a38; }}
}}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55; overflow-wrap: break-word;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; counter-reset: figure table; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .35rem; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem; letter-spacing: -.01em; }
p { margin: .5rem 0; }
a { color: var(--accent); }
.kicker { margin: 0 0 .4rem; color: var(--muted); font-size: .82rem; letter-spacing: .06em;
  text-transform: uppercase; }
.lead { color: var(--muted); font-size: 1.05rem; }
.finding, .warning { margin: 1rem 0 0; padding: .8rem 1rem; background: var(--tint);
  border-left: 3px solid var(--accent); border-radius: 0 .3rem .3rem 0; }
.warning { background: var(--panel); border-left-color: var(--bad); }
.missing { color: var(--muted); font-style: italic; }
.good::before { content: "✓ "; color: var(--good); font-weight: 700; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .9rem 1.5rem;
  margin: 1.6rem 0 0; padding: 1.1rem 0; border: solid var(--line); border-width: 1px 0; }
.facts div { min-width: 0; }
.facts dd { font-size: .95rem; }
dt { color: var(--muted); font-size: .8rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; background:  /* a shadow at the edge beyond which the table continues */
  linear-gradient(to right, var(--page) 50%, transparent) 0 / 2.5rem 100% local,
  linear-gradient(to left, var(--page) 50%, transparent) 100% / 2.5rem 100% local,
  linear-gradient(to right, var(--line), transparent) 0 / .8rem 100%,
  linear-gradient(to left, var(--line), transparent) 100% / .8rem 100%;
  background-repeat: no-repeat; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
figcaption { text-align: left; color: var(--muted); font-size: .86rem; line-height: 1.5; margin-top: .6rem; }
figcaption strong { color: var(--ink); }
th, td { padding: .42rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
thead th { color: var(--muted); font-size: .84rem; border-bottom: 1.5px solid var(--ink); vertical-align: bottom; }
th:first-child, .text td, .text th { text-align: left; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--page); }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
.sd { color: var(--muted); font-size: .82em; }
.average td:nth-child(2), .average th:nth-child(2) { background: var(--tint); }
td strong { font-weight: 700; }
.text td:last-child { white-space: normal; min-width: 14rem; }
figure { margin: 1.2rem 0 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 37rem; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif !important; }
.plot figcaption::before { counter-increment: figure; content: "Figure " counter(figure) ". ";
  color: var(--ink); font-weight: 600; }
.data figcaption::before { counter-increment: table; content: "Table " counter(table) ". ";
  color: var(--ink); font-weight: 600; }
.data figcaption { margin: 0 0 .6rem; }
p.small { font-size: .88rem; color: var(--muted); }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--accent); }
.prose td:not([style]), .prose th:not([style]) { text-align: left; white-space: normal; }
pre { overflow-x: auto; font-size: .84rem; }
progress { display: block; width: 100%; height: .7rem; margin: .4rem 0 .9rem; accent-color: var(--accent); }
.states { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .6rem 0; padding: 0; list-style: none; }
.state-failed, .state-refused, .state-late, .state-gone { color: var(--bad); }
.state-answered { color: var(--good); }
#now { margin-bottom: 2.5rem; }
.now { max-width: 34rem; }
.now th, .now td { text-align: left; }
.settings { columns: 16rem; column-gap: 2rem; margin: .8rem 0 0; font-size: .88rem; }
.settings div { display: flex; justify-content: space-between; gap: 1rem; padding: .22rem 0;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
.settings dt { font-size: inherit; white-space: nowrap; }
.settings dd { text-align: right; font-variant-numeric: tabular-nums; min-width: 0; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--muted);
  font-size: .84rem; overflow-wrap: anywhere; }
@media (max-width: 34rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  .facts { grid-template-columns: 1fr 1fr; gap: .8rem 1rem; }
  th, td { padding: .36rem .3rem; }
  thead th, tbody th { white-space: normal; }
  tbody th { min-width: 4.5rem; max-width: 9rem; }
  .data table { font-size: .8rem; }
  thead th { font-size: .76rem; }
  .sd { display: block; }
  .cards thead { display: none; }  /* each cell has its own label */
  .cards tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .cards tbody th, .cards td { display: flex; justify-content: space-between; gap: 1rem; max-width: none;
    padding: .1rem 0; border: 0; white-space: normal; overflow-wrap: anywhere; }
  .cards tbody tr:last-child > * { border: 0; }
  .cards tbody th { position: static; font-weight: 700; }
  .cards td::before { content: attr(data-label); color: var(--muted); }
}
@media print {
  main { max-width: none; padding: 0; }
  figure { break-inside: avoid; }
}
"""
)
