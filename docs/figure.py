"""The result figure of the README, drawn from kept results: `python -m docs.figure` writes `docs/assets/result.svg`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ASSETS = Path(__file__).parent / "assets"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "brfl"
CELL = "full"
LABELS = {
    "fedavg": "FedAvg (global head)", "personal": "personal head", "fixed_mix": "average of both heads", "btfl": "BTFL",
    "fedavg_ft": "FedAvg, fine-tuned", "fedthe": "FedTHE",
}  # fmt: skip
ADAPTED = ("btfl", "fedthe")
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 700, 60, 340
X, Y = (55.0, 90.0), (25.0, 65.0)  # percent
NEAR = 12  # points closer than this in height have their labels on different sides
LETTER = 7.5  # width of a letter, about

STYLE = """
  .page { fill: #ffffff; } text { fill: #1b1f2a; } .bold { font-weight: 600; }
  .small { font-size: 12px; fill: #4a5160; }
  .grid { stroke: #dde2ec; } .bar { stroke-width: 1.5; } .plain { fill: #6b7488; stroke: #6b7488; }
  .adapted { fill: #2b8a57; stroke: #2b8a57; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171f; } text { fill: #e8ebf2; } .small { fill: #aab2c4; } .grid { stroke: #2c3342; }
    .plain { fill: #9aa5bd; stroke: #9aa5bd; } .adapted { fill: #55bd86; stroke: #55bd86; }
  }
"""


def points() -> dict[str, tuple[list[float], list[float]]]:
    """Return method → accuracies in percent, one a seed, on a client's own test data and on other clients'."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for path in sorted(RESULTS.glob(f"{CELL}-*.json")):
        rows = json.loads(path.read_text())["rows"]
        for name in LABELS:
            for values, shift in zip(found.setdefault(name, ([], [])), ("original", "out_of_client"), strict=True):
                values.append(float(rows[name]["shifts"][shift]["accuracy_percent"]))
    return found


def drawn(found: Mapping[str, tuple[list[float], list[float]]]) -> str:
    """Return the figure as SVG: one mark with both standard deviations for each method."""
    seeds = len(next(iter(found.values()))[0])
    centers = {name: (_x(np.mean(own)), _y(np.mean(others))) for name, (own, others) in found.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="14" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        "<title>Accuracy on a client's own data and on other clients' data</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text class="bold" x="{LEFT}" y="26">A client&#39;s own data against other clients&#39; data</text>',
        f'<text class="small" x="{LEFT}" y="45">CIFAR-10, 20 clients, Dirichlet(0.1), 50 rounds; mean ± sd over '
        f"{seeds} seeds; green adapts at test time</text>",
    ]
    for value in range(int(X[0]) + 5, int(X[1]) + 1, 10):
        parts.append(f'<path class="grid" d="M{_x(value):.1f} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text class="small" x="{_x(value):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{value} %</text>')
    for value in range(int(Y[0]) + 5, int(Y[1]) + 1, 10):
        parts.append(f'<path class="grid" d="M{LEFT} {_y(value):.1f}H{RIGHT}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{_y(value) + 4:.1f}" text-anchor="end">{value} %</text>')
    for name, (own, others) in found.items():
        x, y = centers[name]
        parts.append(
            f'<g class="{"adapted" if name in ADAPTED else "plain"}"><path class="bar" d="'
            f"M{_x(np.mean(own) - np.std(own)):.1f} {y:.1f}H{_x(np.mean(own) + np.std(own)):.1f}"
            f'M{x:.1f} {_y(np.mean(others) - np.std(others)):.1f}V{_y(np.mean(others) + np.std(others)):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/></g>'
        )
        crowded = any(u > x and abs(v - y) < NEAR for u, v in centers.values())
        left = x > (LEFT + RIGHT) / 2 and (crowded or x + LETTER * len(LABELS[name]) > RIGHT)
        anchor, shift = ("end", -10) if left else ("start", 10)
        parts.append(f'<text x="{x + shift:.1f}" y="{y - 7:.1f}" text-anchor="{anchor}">{LABELS[name]}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">accuracy on the client\'s own test data</text>'
    )
    turned = f'transform="rotate(-90 20 {(TOP + BOTTOM) / 2})" text-anchor="middle"'
    parts.append(f'<text x="20" y="{(TOP + BOTTOM) / 2}" {turned}>… on other clients\' data</text>')
    return "\n".join([*parts, "</svg>\n"])


def _x(percent: float | np.floating[Any]) -> float:
    return LEFT + (RIGHT - LEFT) * (float(percent) - X[0]) / (X[1] - X[0])


def _y(percent: float | np.floating[Any]) -> float:
    return BOTTOM - (BOTTOM - TOP) * (float(percent) - Y[0]) / (Y[1] - Y[0])


if __name__ == "__main__":
    (ASSETS / "result.svg").write_text(drawn(points()))
