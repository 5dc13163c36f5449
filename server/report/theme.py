"""The page's style sheet: one column, system font, light and dark, readable on a phone and on paper."""

#: The colours that plots use, too.
LIGHT = {"--page": "#fdfdfc", "--ink": "#1d2226", "--muted": "#5d666d", "--line": "#dcdfdd"}
DARK = {"--page": "#14171a", "--ink": "#e4e7e8", "--muted": "#9aa4ab", "--line": "#343b41"}


def _variables(theme: dict[str, str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in theme.items())


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
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .35rem;
  letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem; letter-spacing: -.01em; }
p { margin: .5rem 0; }
a { color: var(--accent); }
.kicker { margin: 0 0 .4rem; color: var(--muted); font-size: .82rem; letter-spacing: .06em;
  text-transform: uppercase; }
.lead { color: var(--muted); font-size: 1.05rem; }
.finding { margin: 1.4rem 0 0; padding: .8rem 1rem; background: var(--tint);
  border-left: 3px solid var(--accent); border-radius: 0 .3rem .3rem 0; }
.warning { margin: 1rem 0 0; padding: .8rem 1rem; background: var(--panel); border-left: 3px solid var(--bad);
  border-radius: 0 .3rem .3rem 0; }
.missing { color: var(--muted); font-style: italic; }
.good::before { content: "✓ "; color: var(--good); font-weight: 700; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .9rem 1.5rem;
  margin: 1.6rem 0 0; padding: 1.1rem 0; border: solid var(--line); border-width: 1px 0; }
.facts div { min-width: 0; }
dt { color: var(--muted); font-size: .8rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.facts dd { font-size: .95rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption, figcaption { text-align: left; color: var(--muted); font-size: .86rem; line-height: 1.5; }
figcaption strong { color: var(--ink); }
th, td { padding: .42rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
thead th { color: var(--muted); font-size: .84rem; border-bottom: 1.5px solid var(--ink);
  vertical-align: bottom; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--page); }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
.swatch { display: inline-block; width: .7em; height: .7em; margin-right: .5em; border-radius: .15em; }
.sd { color: var(--muted); font-size: .82em; }
.average { background: var(--tint); border-left: 1px solid var(--line); }
td strong { font-weight: 700; }
.wrap td:last-child { white-space: normal; min-width: 14rem; }
figure { margin: 1.2rem 0 0; }
figure svg { display: block; width: 100%; height: auto; min-width: 36rem; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
  sans-serif !important; }
figcaption { margin-top: .6rem; }
main { counter-reset: figure table; }
.picture figcaption::before { counter-increment: figure; content: "Figure " counter(figure) ". ";
  color: var(--ink); font-weight: 600; }
.data figcaption::before { counter-increment: table; content: "Table " counter(table) ". ";
  color: var(--ink); font-weight: 600; }
.data figcaption { margin: 0 0 .6rem; }
p.small { font-size: .88rem; color: var(--muted); }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--accent); }
.prose td:not([style]), .prose th:not([style]) { text-align: left; white-space: normal; }
pre { overflow-x: auto; font-size: .84rem; }
.settings { columns: 16rem; column-gap: 2rem; margin: .8rem 0 0; font-size: .88rem; }
.settings div { display: flex; justify-content: space-between; gap: 1rem; padding: .22rem 0;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
.settings dt { font-size: inherit; white-space: nowrap; }
.settings dd { text-align: right; font-variant-numeric: tabular-nums; min-width: 0; }
footer { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); color: var(--muted);
  font-size: .84rem; }
@media (max-width: 34rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  .facts { grid-template-columns: 1fr 1fr; gap: .8rem 1rem; }
  th, td { padding: .38rem .45rem; }
  thead th { white-space: normal; }
  .data table:not(.text) { font-size: .85rem; }
  .sd { display: block; }
}
@media print {
  main { max-width: none; padding: 0; }
  figure { break-inside: avoid; }
  figure svg { min-width: 0; }
}
"""
)
