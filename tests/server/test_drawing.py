"""What is taken out of matplotlib's SVG, and what stays."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np

from server.report.drawing import Plot, compact, log_x, new_figure, styled, to_svg


@styled
def drawn() -> Plot:
    figure = new_figure(2.0)
    axes = figure.subplots()
    axes.hist(np.random.default_rng(0).random(500), bins=50)
    axes.set_xlim(0.4, 20)
    log_x(axes)
    axes.set_title("e of two  words < 1")
    axes.text(0.5, 1.0, "turned", rotation=30)
    return to_svg(figure, "example", 'a "picture"')


def test_texts_and_shapes_stay() -> None:
    root = ElementTree.fromstring(drawn().svg.replace("xlink:href", "href"))
    texts = ["".join(one.itertext()) for one in root.iter("text")]
    assert "e of two  words < 1" in texts
    assert {"1", "2", "5", "10"} <= set(texts)
    assert not [text for text in texts if "$" in text]
    (turned,) = (one for one in root.iter("text") if one.text == "turned")
    assert "rotate(-30" in turned.get("transform", "")
    assert len([one for one in root.iter("path") if one.get("clip-path")]) >= 50
    defined = {one.get("id") for one in root.iter() if one.get("id")}
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', drawn().svg))
    assert used <= defined


def test_numbers_are_rounded_where_they_are_places() -> None:
    long = '<g id="a_1">\n  <path d="M 1.23456 2 \nL 3.5 10.98765" style="fill-opacity: 0.209352"/>\n</g>'
    assert compact(long) == '<g><path d="M 1.23 2\nL 3.5 10.98" style="fill-opacity: 0.209352"/></g>'
    style = "font-size: 7px; font-family: 'A', serif; fill: red"
    text = f'<text style="{style}" x="1.999" transform="rotate(-0 1 2)">a</text>'
    assert compact(text) == '<text style="font-size: 7px; fill: red" x="1.99">a</text>'
