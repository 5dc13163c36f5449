"""The data of each plot, and the conversion to SVG."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from fedtta.server.report import WEIGHT_BINS, matrix, plots, table
from fedtta.server.report.drawing import INK, Plot, compact, new_figure, standalone, styled, to_svg
from fedtta.server.report.markup import DARK, LIGHT
from fedtta.server.report.rates import block_of, module_type, variant_labels
from tests.report.runs import (
    adapt_round,
    adapted,
    evaluation,
    layer_sizes,
    rates,
    rates_round,
    results_of,
    training_round,
    whole_run,
)


def test_plots_appear_only_with_their_data(tmp_path: Path) -> None:
    def drawn(*events: dict[str, Any]) -> list[str]:
        return [plot.name for plot in plots.plots(results_of(tmp_path, list(events)))]

    assert drawn() == []
    assert drawn(evaluation("a", "x", 0, 1, 2)) == ["accuracy", "clients"]
    assert drawn(evaluation("a", "x", 0, 0, 0)) == []
    histogram = [1] * WEIGHT_BINS
    assert "weights" in drawn(evaluation("a", "x", 0, 1, 2, weight_histogram=histogram, weight_mean=0.5))
    assert drawn(training_round("ce", 1)) == drawn(rates_round(1)) == ["curves"]
    assert drawn(rates({"a.weight": 0.5}, {"a.weight": 1})) == ["rates"]
    assert drawn(adapted(1, 0, [1], [2])) == ["clients", "collaboration"]


def test_accuracy_by_shift_marks_every_mean(tmp_path: Path) -> None:
    events = [
        evaluation("a", "x", 0, 3, 4), evaluation("a", "y", 0, 1, 4),
        evaluation("b", "x", 0, 1, 1), evaluation("b", "y", 0, 1, 1), evaluation("c", "x", 0, 1, 2),
    ]  # fmt: skip
    plot = plots.accuracy_by_shift(table(results_of(tmp_path, events)))
    assert plot is not None
    (axes,) = plot.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a", "b"]  # the best average on top
    marks = [sorted(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]
    assert marks == [[(50, 0), (75, 1), (100, 2)], [(25, 1), (100, 2)]]
    assert sorted(map(tuple, axes.collections[0].get_offsets().tolist())) == [(50, 1), (100, 2)]
    assert plot.alt.endswith("b: x 100.0 %, y 100.0 %; a: x 75.0 %, y 25.0 %; c: x 50.0 %")


def texts(plot: Plot | None) -> list[str]:
    assert plot is not None
    return [text.get_text() for axes in plot.figure.axes for text in axes.texts]


def test_accuracy_by_client_has_every_client(tmp_path: Path) -> None:
    events = [
        evaluation("a", "x", 0, 3, 4), evaluation("a", "y", 0, 1, 4), evaluation("a", "x", 2, 1, 5),
        adapted(1, 0, [1, 1], [2, 8]), adapted(1, 1, [3, 0], [4, 0]),
    ]  # fmt: skip
    plot = plots.accuracy_by_client(results_of(tmp_path, events))
    assert plot is not None
    (axes,) = plot.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "bbn · pfedbbn"]
    cells = {(text.get_position(), text.get_text()) for text in axes.texts}
    assert cells == {((0, 0), "50"), ((2, 0), "20"), ((0, 1), "20"), ((1, 1), "75")}
    assert "a: from 20.0 % to 50.0 %" in plot.alt


def test_collaboration_is_the_accuracy_so_far(tmp_path: Path) -> None:
    weights = [[0.7, 0.3], [0.1, 0.9]]
    events = [adapted(1, 0, [1], [4]), adapted(2, 0, [3], [4]), adapted(3, 0, [0], [0]), adapt_round(1, weights)]
    plot = plots.collaboration(results_of(tmp_path, events))
    assert plot is not None
    rounds, *maps = plot.figure.axes
    (line,) = rounds.get_lines()
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata().tolist() == [25, 50, 50]
    opacity = maps[0].collections[0].get_facecolors()[:, 3]
    np.testing.assert_allclose((opacity / opacity.max()) ** 2, np.array(weights).ravel() / 0.9)
    assert "a client's mean weight for itself is 0.80" in plot.alt
    plot = plots.collaboration(results_of(tmp_path, [*events[:3], adapt_round(1, [[1.0, 0.0], [0.0, 1.0]])]))
    assert plot is not None
    assert len(plot.figure.axes) == 1  # weights of clients that keep to themselves are not drawn


def test_weight_histograms_sum_over_clients(tmp_path: Path) -> None:
    first, second = [0] * WEIGHT_BINS, [0] * WEIGHT_BINS
    first[0], second[0], second[19] = 3, 1, 4
    events = [
        evaluation("a", "x", 0, 1, 3, weight_histogram=first, weight_mean=0.1),
        evaluation("a", "x", 1, 1, 5, weight_histogram=second, weight_mean=0.5),
        evaluation("a", "y", 0, 1, 3), evaluation("b", "x", 0, 1, 3),
    ]  # fmt: skip
    plot = plots.weight_histograms(results_of(tmp_path, events))
    assert plot is not None
    with_samples, without = plot.figure.axes
    heights = [bar.get_height() for bar in with_samples.patches]
    assert heights == [0.5, *[0.0] * 18, 0.5]
    assert texts(plot) == ["0.35"]  # (3 · 0.1 + 5 · 0.5) / 8
    assert not without.patches


def test_rates_are_grouped_by_the_modules_a_variant_adapts(tmp_path: Path) -> None:
    values = {"norm.weight": 0.2, "norm.running_mean": -0.4, "norm.running_var": 0.6, "fc.weight": -0.1}
    sizes = dict.fromkeys(values, 1)
    results = results_of(tmp_path, [rates(values, sizes), rates(values, sizes, "stats")])
    plot = plots.rates_by_module(results)
    assert plot is not None
    upper, lower = plot.figure.axes
    assert [label.get_text() for label in upper.get_xticklabels()] == ["norm", "fc"]
    assert [bar.get_height() for bar in upper.patches] == pytest.approx([0.4, 0.1, 0.5])
    assert [bar.get_height() for bar in lower.patches] == pytest.approx([0.2, -0.4, 0.6, -0.1, -0.4, 0.6])
    assert "stats: BN running mean -0.4, BN running var +0.6" in plot.alt


def test_training_curves_have_gaps_and_every_training(tmp_path: Path) -> None:
    events = [
        training_round("ce", 2, train_loss=math.inf, validation_accuracy=None),
        training_round("ce", 1, personal_validation_accuracy=0.75),
        *(training_round(f"t{i}", 1) for i in range(5)),
        rates_round(1, "stats"),
    ]
    found = plots.curves(results_of(tmp_path, events))
    assert list(found) == ["ce", *(f"t{i}" for i in range(5)), "rates: stats"]
    ce = found["ce"]
    assert ce["round"] == [1, 2]
    assert ce["accuracy"] == pytest.approx([50, math.nan], nan_ok=True)
    assert ce["personal"] == pytest.approx([75, math.nan], nan_ok=True)
    assert ce["loss"] == pytest.approx([1, math.nan], nan_ok=True)
    assert found["rates: stats"]["loss"] == [1.5]
    plot = plots.training_curves(results_of(tmp_path, events))
    assert plot is not None
    assert len(plot.figure.axes) == 4  # two pairs of panels, with four and three trainings
    losses = plot.figure.axes[1].get_lines()
    assert [len(line.get_xdata()) for line in losses] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("body.conv1.weight", "conv weight"), ("body.layer2.0.downsample.0.weight", "conv weight"),
        ("body.layer2.0.downsample.1.weight", "BN weight"), ("body.layer2.0.downsample.1.bias", "BN bias"),
        ("body.layer2.0.downsample.1.running_mean", "BN running mean"),
        ("body.layer2.0.downsample.1.running_var", "BN running var"),
        ("body.fc1.weight", "linear weight"), ("body.fc1.bias", "bias"), ("head.weight", "linear weight"),
        ("head.bias", "bias"), ("body.groupnorm.weight", "norm weight"), ("body.groupnorm.bias", "norm bias"),
        ("body.position", "other"),
    ],
)  # fmt: skip
def test_module_types(name: str, kind: str) -> None:
    sizes = {
        "body.conv1.weight": 27, "body.layer2.0.downsample.0.weight": 64, "body.layer2.0.downsample.1.weight": 8,
        "body.layer2.0.downsample.1.bias": 8, "body.layer2.0.downsample.1.running_mean": 8,
        "body.layer2.0.downsample.1.running_var": 8, "body.fc1.weight": 80, "body.fc1.bias": 10, "head.weight": 100,
        "head.bias": 10, "body.groupnorm.weight": 8, "body.groupnorm.bias": 8, "body.position": 64,
    }  # fmt: skip
    assert module_type(name, sizes) == kind


def test_blocks_are_layers_or_their_parents() -> None:
    blocks = block_of(list(layer_sizes()))
    assert list(dict.fromkeys(blocks.values())) == [
        "conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "fc4", "norm4", "head",
    ]  # fmt: skip
    deep = [f"encoder.body.layer{i}.{j}.conv{k}.weight" for i in range(3) for j in range(3) for k in range(3)]
    blocks = block_of([*deep, "encoder.body.position", "head.bias"])
    assert blocks["encoder.body.layer2.1.conv0.weight"] == "layer2.1"
    assert blocks["encoder.body.position"] == "position"
    assert blocks["head.bias"] == "head"


def test_variants_are_named_with_their_training_where_there_are_several() -> None:
    assert list(variant_labels([("ce", "all"), ("ce", "stats"), ("ce", "all")]).values()) == ["all", "stats"]
    assert list(variant_labels([("ce", "all"), ("bs", "all")]).values()) == ["all (ce)", "all (bs)"]


# From figures to SVG


@styled
def example() -> Plot:
    figure = new_figure(2.0)
    axes = figure.subplots()
    axes.hist(np.random.default_rng(0).random(500), bins=50)
    axes.set_xlim(0.4, 20)
    axes.set_xticks([1, 2, 5, 10])
    axes.set_title("e of two  words < 1 and $x_2$")
    axes.text(0.5, 1.0, "turned", rotation=30)
    return to_svg(figure, "example", r'a "plot" \1')


def test_svg_keeps_text_and_shapes() -> None:
    svg = example().svg
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    found = ["".join(one.itertext()) for one in root.iter("text")]
    assert "e of two  words < 1 and $x_2$" in found  # a name is not a formula
    assert {"1", "2", "5", "10"} <= set(found)
    (turned,) = (one for one in root.iter("text") if one.text == "turned")
    assert "rotate(-30" in turned.get("transform", "")
    assert len([one for one in root.iter("path") if one.get("clip-path")]) >= 50
    defined = {one.get("id") for one in root.iter() if one.get("id")}
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= defined
    assert root.get("aria-label") == r'a "plot" \1'


def test_names_in_other_scripts_are_no_warning_of_a_font_that_the_page_does_not_use(tmp_path: Path) -> None:
    clients = {"event": "clients", "class_counts": None, "classes": ["a"], "sizes": [[1, 1, 1]], "names": ["東京病院"]}
    results = results_of(tmp_path, [clients, evaluation("none", "original", 0, 1, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot = plots.accuracy_by_client(results)
    assert plot is not None
    assert "東京病院" in plot.svg


def test_svg_follows_the_theme() -> None:
    plot = example()
    assert "var(--ink)" in plot.svg
    assert INK not in plot.svg
    style = ElementTree.fromstring(standalone(plot)).find("{http://www.w3.org/2000/svg}style")
    assert style is not None
    assert all(f"{name}:{color}" in (style.text or "") for theme in (LIGHT, DARK) for name, color in theme.items())


def test_coordinates_are_rounded() -> None:
    long = '<g id="a_1">\n  <path d="M 1.23456 2 \nL 3.5 10.98765" style="fill-opacity: 0.209352"/>\n</g>'
    assert compact(long) == '<g><path d="M 1.23 2\nL 3.5 10.98" style="fill-opacity: 0.209352"/></g>'


def test_drawing_leaves_matplotlib_alone_and_is_reproducible(tmp_path: Path) -> None:
    results = results_of(tmp_path, whole_run(clients=2, rounds=1))
    before = dict(matplotlib.rcParams)
    first = [plot.svg for plot in plots.plots(results)]
    assert dict(matplotlib.rcParams) == before
    assert [plot.svg for plot in plots.plots(results)] == first
    assert matrix(results) is None
