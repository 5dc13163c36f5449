"""The page: self-contained, complete, escaped, and honest about what is missing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from server.report import (
    WEIGHT_BINS,
)
from server.report.plots import weights_of
from tests.server.test_report_run import (
    METHODS,
    SHIFTS,
    evaluation,
    page_of,
    results_of,
    training_round,
    whole_run,
)

UNEVEN = [
    evaluation("a", "x", 0, 3, 4),
    evaluation("a", "x", 1, 1, 2),
    evaluation("a", "y", 0, 1, 4),
    evaluation("a", "y", 1, 1, 4),
    evaluation("b", "x", 0, 1, 1),
    evaluation("b", "x", 1, 0, 0),
]


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("report"), whole_run())


class Elements(HTMLParser):
    """Collect ids, links and open elements of a page."""

    VOID = frozenset(["meta", "br", "wbr", "path", "use", "image", "rect"])

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_self_contained_and_well_formed(whole_page: str) -> None:
    elements = Elements()
    elements.feed(whole_page)
    assert elements.open == []
    assert not elements.tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert all(reference.startswith(("#", "data:")) for reference in elements.references)
    assert all(ref[1:] in elements.ids for ref in elements.references if ref.startswith("#"))
    assert len(elements.ids) == len(set(elements.ids))
    assert "http:" not in whole_page
    assert "https:" not in whole_page
    assert "@import" not in whole_page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", whole_page))


def test_page_has_every_method_shift_and_plot(whole_page: str) -> None:
    for name in (*METHODS, *SHIFTS):
        assert f">{name}<" in whole_page
    assert whole_page.count("<svg ") == whole_page.count('role="img" aria-label="') == 5
    for words in (
        "3f2c1ab",
        "2 cores, 8 GiB",
        "2 min 3 s",
        "torch\N{NO-BREAK SPACE}2.7.0",
        "none of 1,234 test samples",
    ):
        assert words in whole_page
    for words in (
        "cross_entropy: after round 8",
        "balanced_softmax: after round 8",
        "not finite",
        "weight_decay",
    ):
        assert words in whole_page
    assert "CIFAR-10.1 is not present" in whole_page
    assert "divided by 2 workers" in whole_page


def test_best_of_each_column_is_bold(tmp_path: Path) -> None:
    events = [evaluation("a", "x", 0, 3, 4), evaluation("b", "x", 0, 1, 4), evaluation("c", "x", 0, 3, 4)]
    body = page_of(tmp_path, events).split("<tbody>")[1].split("</tbody>")[0]
    bold = [row.count("<strong>") for row in body.split("</tr>")[:-1]]
    assert bold == [2, 0, 2]  # the column and the average; equal values are both the best


def test_all_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&$x_2$"
    events = [
        {"event": "run", "time": evil, "settings": {evil: evil}, "versions": {evil: evil}, "commit": evil,
         "hardware": evil},
        {"event": "clients", "class_counts": [[1, 2]], "classes": [evil, "b"], "sizes": [[1, 1, 1]]},
        training_round(evil, 1, train_loss=None),
        {"event": "failed", "training": evil, "round": 1, "partition": 0, "node_id": evil, "reason": evil},
        {"event": "note", "text": evil},
        evaluation(evil, evil, 0, 1, 2, training=evil, weight_histogram=[1] * WEIGHT_BINS, weight_mean=0.5),
        evaluation(evil, evil, 1, 1, 2, training="other"),
        {"event": "end", "seconds": 1.0, "status": evil},
    ]  # fmt: skip
    page = page_of(tmp_path, events, name="a&b")
    elements = Elements()
    elements.feed(page)
    assert elements.open == []
    assert "script" not in elements.tags
    assert "a&amp;b" in page
    assert "$x_2$" in page  # nor is it read as a formula in plots


PUBLISHED = {"event": "run", "time": "t", "settings": {"split": "published"}, "versions": {}, "hardware": "h"}


@pytest.mark.parametrize(
    ("events", "words", "pictures"),
    [
        ([], ["no evaluation", "no round was trained", "has not ended", "not recorded its settings"], 0),
        (
            [evaluation("none", "x", 0, 1, 2)],
            ["model as it was initialised", "no method of this run mixes"],
            1,
        ),
        ([training_round("ce", 1)], ["no evaluation with test samples", "slowest client of the round"], 2),
        (
            [{"event": "clients", "class_counts": None, "classes": [], "sizes": [[8, 1, 1], [4, 1, 1]]}],
            ["class counts stay on the devices", "2 clients with 6 to 10 samples", "No leak check"],
            0,
        ),
        ([evaluation("none", "x", 0, 0, 0)], ["no evaluation with test samples"], 0),
        ([{"event": "leak_check", "checked": 5, "leaked": 2}], ["Leak check failed: 2 of 5"], 0),
        ([PUBLISHED, {"event": "leak_check", "checked": 5, "leaked": 2}], ["on purpose, split = published: 2 of 5"], 0),
        ([{"event": "end", "seconds": 9.0, "status": "failed"}], ["ended with status “failed”"], 0),
        (UNEVEN, ["b on x: 1 client", "b on y: no samples"], 1),
        ([training_round("ce", 1, train_loss=float("inf"))], ["Training loss not finite: ce, round 1"], 2),
    ],
)
def test_partial_runs_say_what_is_missing(tmp_path: Path, events: list[Any], words: list[str], pictures: int) -> None:
    page = page_of(tmp_path, events)
    for expected in words:
        assert expected in page
    assert page.count("<svg ") == pictures


def test_start_from_a_file_is_named(tmp_path: Path) -> None:
    run = {
        "event": "run",
        "time": "t",
        "settings": {"init": "m.safetensors"},
        "versions": {},
        "hardware": "h",
    }
    assert "the model read from m.safetensors" in page_of(tmp_path, [run, evaluation("none", "x", 0, 1, 2)])


def test_many_clients_and_classes_and_methods(tmp_path: Path) -> None:
    counts = [[(i * j) % 7 for j in range(100)] for i in range(100)]
    clients = {
        "event": "clients",
        "class_counts": counts,
        "classes": list(range(100)),
        "sizes": [[9, 1, 1]] * 100,
    }
    methods = [evaluation(f"method{i}", "x", 0, i, 20) for i in range(16)]
    page = page_of(tmp_path, [clients, *methods])
    assert page.count("<svg ") == 2
    assert len(page) < 2_000_000


def test_page_leaves_matplotlib_settings_alone_and_is_reproducible(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    first = page_of(tmp_path, whole_run(clients=3, rounds=2))
    assert dict(matplotlib.rcParams) == before
    assert page_of(tmp_path, whole_run(clients=3, rounds=2)) == first


def test_best_method_and_its_equals_are_named(tmp_path: Path) -> None:
    events = [evaluation(name, "x", 0, correct, 4) for name, correct in (("a", 2), ("b", 3), ("c", 3), ("d", 1))]
    page = page_of(tmp_path, events)
    assert "<strong>b</strong> and <strong>c</strong> with <strong>75.0 %</strong> over 1 distribution" in page
    assert "next is a with 50.0 %" in page


def test_mean_weight_counts_each_sample_the_same(tmp_path: Path) -> None:
    low, high = [0] * WEIGHT_BINS, [0] * WEIGHT_BINS
    low[0], high[19] = 3, 1  # the second client gives no mean: the middle of its bin, 0.975, stands for it
    events = [
        evaluation("a", "x", 0, 1, 3, weight_histogram=low, weight_mean=0.01),
        evaluation("a", "x", 1, 1, 1, weight_histogram=high),
    ]
    weights = weights_of(results_of(tmp_path, events))["cross_entropy", "a", "x"]
    assert weights.counts.tolist() == [3] + [0] * 18 + [1]
    assert weights.mean == pytest.approx((3 * 0.01 + 0.975) / 4)


def test_weighted_table_and_time_of_a_prediction(tmp_path: Path) -> None:
    events = [evaluation("a", "x", 0, 3, 4, seconds=0.5), evaluation("a", "x", 1, 0, 1, seconds=0.25)]
    folded = page_of(tmp_path, events).split("<details>")[1].split("</details>")[0]
    assert "<strong>60.0</strong>" in folded  # 3 of 5 samples
    assert "<td>150.00</td>" in folded  # 0.75 s for 5 samples


def test_long_lists_of_incidents_are_cut_and_counted(tmp_path: Path) -> None:
    late = {"event": "late", "training": "ce", "round": 1, "partition": 1, "node_id": None, "reason": "deadline"}
    page = page_of(tmp_path, [late] * 53)
    assert page.count("<td>late</td>") == 50
    assert "53 late" in page
    assert "3 more" in page
