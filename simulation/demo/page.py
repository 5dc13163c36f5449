"""The demo's page: what each site has, what it gained from the others, and what adaptation gained after the shift."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtta.server.report.markup import CSS, data_table
from fedtta.settings.files import write_atomically
from fedtta.simulation.demo.sites import Site

SHOWN = 6  # images of each site
STRIP = "display:block;width:100%;max-width:37rem;image-rendering:pixelated"


@dataclass(frozen=True)
class Outcome:
    """What happened at a site; accuracies are shares of the images that arrive after deployment.

    Parameters
    ----------
    site : Site
    samples, classes : int
        Usable images of its folder; classes that occur in its training split, None where there are no labels.
    training : int
        Images that it trained on.
    joined : int or None
        The round before which it joined; None: at the start.
    alone : float or None
        Accuracy of a model that the site trained on its own; None without labels.
    federated : float
        Accuracy of the federated model, before the shift.
    shifted, adapted : float
        Accuracy after the shift, of the federated model as it came and of the agent that adapts it.
    arrivals : int
        Images behind each accuracy.
    images : ndarray uint8 [n, C, H, W]
        Some of them under the shift.
    """

    site: Site
    samples: int
    classes: int | None
    training: int
    joined: int | None
    alone: float | None
    federated: float
    shifted: float
    adapted: float
    arrivals: int
    images: NDArray[np.uint8]


def write_page(path: Path, outcomes: Sequence[Outcome], about: Sequence[str]) -> Path:
    """Write the page; `about` are lines on what was run."""
    parts = [
        "<h1>Four sites, one model, a shift after deployment</h1>",
        *(f'<p class="lead">{escape(line)}</p>' for line in about),
        "<h2>What each site has</h2>", _data(outcomes),
        "<h2>What it gained from the others</h2>", _gained(outcomes),
        "<h2>What adaptation gained after the shift</h2>", _adapted(outcomes),
    ]  # fmt: skip
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>FedTTA demo</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )
    return write_atomically(path, page.encode())


def _data(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        classes = "no labels" if one.classes is None else str(one.classes)
        since = "the start" if one.joined is None else f"round {one.joined}"
        rows.append([escape(one.site.name), str(one.samples), str(one.training), classes, since])
    head = ["site", "images", "trains on", "classes", "takes part from"]
    return data_table(head, rows, "Data of each site. They never leave it.")


def _gained(outcomes: Sequence[Outcome]) -> str:
    rows = [
        [escape(one.site.name), _percent(one.alone), _percent(one.federated), _gain(one.federated, one.alone)]
        for one in outcomes
    ]
    caption = (
        f"Accuracy in % on {outcomes[0].arrivals} new images without a shift: of a model that the site trains alone, "
        f"in as many rounds, and of the federated one. Standard error: at most {_error(outcomes[0].arrivals)} points."
    )
    return data_table(["site", "alone", "federated", "gain"], rows, caption)


def _adapted(outcomes: Sequence[Outcome]) -> str:
    rows, strips = [], []
    for one in outcomes:
        numbers = [_percent(value) for value in (one.federated, one.shifted, one.adapted)]
        rows.append([escape(one.site.name), escape(one.site.cause), *numbers, _gain(one.adapted, one.shifted)])
        caption = f"{one.site.name}: {one.site.cause} ({one.site.shift.replace('_', ' ')})"
        strips.append(f'<figure><img style="{STRIP}" alt="" src="{_strip(one.images)}">'
                      f"<figcaption>{escape(caption)}</figcaption></figure>")  # fmt: skip
    finding = " ".join(_findings(outcomes))
    caption = (
        "Accuracy in % on the new images: without the shift, under it with the model as it came, and with the agent "
        "that adapts the model to what it is asked, without labels."
    )
    head = ["site", "what changed", "before", "after, as it came", "after, adapted", "gain"]
    return f'<p class="finding">{escape(finding)}</p>' + data_table(head, rows, caption) + "".join(strips)


def _findings(outcomes: Sequence[Outcome]) -> list[str]:
    """Say where adaptation paid, where it made no difference beyond the standard error, and where it cost accuracy."""
    kinds: dict[str, list[str]] = {"Adaptation paid at": [], "It made no clear difference at": [], "It cost at": []}
    for one in outcomes:
        gain, error = one.adapted - one.shifted, math.sqrt(0.25 / one.arrivals)
        kind = 0 if gain > error else 2 if gain < -error else 1
        kinds[list(kinds)[kind]].append(f"{one.site.name} ({_gain(one.adapted, one.shifted)} points)")
    return [f"{kind} {', '.join(names)}." for kind, names in kinds.items() if names]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _gain(new: float, old: float | None) -> str:
    return "–" if old is None else f"{100 * (new - old):+.1f}"


def _error(count: int) -> str:
    """Return the largest standard error of a share of `count` samples, in points."""
    return f"{100 * math.sqrt(0.25 / count):.1f}"


def _strip(images: NDArray[np.uint8]) -> str:
    """Return images side by side as a data URI."""
    strip = np.concatenate(list(images[:SHOWN].transpose(0, 2, 3, 1)), axis=1)
    buffer = io.BytesIO()
    Image.fromarray(strip).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
