"""Pages that follow what they show: sections with ids, of which a browser gets those that have changed.

A page and its updates have one address. Without a query it is a whole page; with ``?have=now.1f2e,...``, the sections
that the browser has, it is JSON with the sections that differ (`live.js` does this).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from fedtta.server.report.markup import document

#: Link of the bar at the top → address.
Links = Mapping[str, str]

STYLE = """<link rel="icon" href="data:,">
<style>
.bar { max-width: 54rem; margin: 0 auto; padding: .8rem 1.25rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem;
  align-items: baseline; font-size: .92rem; }
.bar p { margin: 0 0 0 auto; color: var(--muted); min-height: 1.55em; }
.bar p.lost { color: var(--bad); font-weight: 600; }
.bar a { padding: .15rem 0; }
main { padding-top: 1.2rem; }
#runs th, #runs td { text-align: left; }
main > section:first-child > h2:first-child { margin-top: 0; }
a:focus-visible, summary:focus-visible, input:focus-visible, button:focus-visible, .scroll:focus-visible {
  outline: 2px solid var(--accent); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { position: static; }
@media (min-width: 60rem) {  /* a table of many columns may be wider than the text */
  #devices .scroll { width: min(94vw, 96rem); margin-left: calc(50% - min(47vw, 48rem)); }
}
form { display: grid; gap: .8rem; max-width: 24rem; margin-top: 1rem; }
input, button { font: inherit; padding: .45rem .6rem; border: 1px solid var(--muted); border-radius: .3rem;
  background: var(--page); color: var(--ink); }
button { cursor: pointer; }
@media (max-width: 34rem) { .bar { padding: .8rem 1rem 0; } }
</style>
"""


@dataclass(frozen=True)
class View:
    """The content of a page at a moment.

    Parameters
    ----------
    title : str
        Text.
    sections : mapping
        id → HTML of the element with this id, in order; see `fedtta.server.report.markup.section`.
    ended : bool
        Whether the page will not change any more.
    seconds : float
        Time between two updates.
    """

    title: str
    sections: Mapping[str, str] = field(default_factory=dict)
    ended: bool = False
    seconds: float = 1.0

    def respond(self, request: Request, status: int = 200) -> Response:
        """Return the page, or what has changed for a browser that has it."""
        digests = {name: hashlib.sha256(html.encode()).hexdigest()[:12] for name, html in self.sections.items()}
        have = request.query_params.get("have")
        if have is None:
            known = ",".join(f"{name}.{digest}" for name, digest in digests.items())
            body = (
                f'<main id="page" data-have="{escape(known)}" data-seconds="{self.seconds:g}" '
                f'data-ended="{str(self.ended).lower()}" tabindex="-1">' + "\n".join(self.sections.values()) + "</main>"
            )
            return page(request, self.title, body, '<script src="/live.js" defer></script>\n', status)
        there = dict(pair.split(".", 1) for pair in have.split(",") if "." in pair)
        changed = {
            name: {"html": html, "digest": digests[name]}
            for name, html in self.sections.items()
            if there.get(name) != digests[name]
        }
        about = {"title": _titled(self.title), "ended": self.ended, "seconds": self.seconds}
        return JSONResponse({**about, "order": list(self.sections), "changed": changed}, status)


def page(request: Request, title: str, main: str, head: str = "", status: int = 200) -> HTMLResponse:
    """Return a page with the links of the app above its `main` element; both, and `head`, are HTML."""
    links: Links = getattr(request.app.state, "links", {})
    shown = " ".join(
        f'<a href="{escape(address)}"{" aria-current=page" if address == request.url.path else ""}>{escape(text)}</a>'
        for text, address in links.items()
    )
    bar = (
        '<a class="skip" href="#page">Skip to the content</a>\n'
        f'<nav class="bar" aria-label="Pages">{shown}<p id="connection" role="status"></p></nav>\n'
    )
    return HTMLResponse(document(_titled(title), bar + main, STYLE + head), status)


def _titled(title: str) -> str:
    return f"{title} · FedTTA"
