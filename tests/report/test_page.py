"""The page: self-contained, complete, escaped, and sensible for any run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.server.report import METRICS, WEIGHT_BINS, Metric, accuracy
from fedtta.server.report.markup import breakable, duration, instant, size
from fedtta.server.report.page import build_page, local_training_seconds, workers_of
from tests.report.runs import (
    CLASSES,
    METHODS,
    SHIFTS,
    Elements,
    adapt_round,
    adapted,
    adapting_together,
    clients_event,
    evaluation,
    layer_sizes,
    learned_rates,
    page_of,
    rates,
    rates_round,
    results_of,
    training_round,
    whole_run,
)
from tests.report.test_scores import BY_HAND, FULL, SHORT

ADAPTING = [
    clients_event(),
    *learned_rates(rounds=3),
    *adapting_together(15, ("fog", "snow", "frost"), ("tent", "bbn")),
]
#: What the page must name.
NAMES = {
    "methods": (
        *METHODS, *SHIFTS, "cross_entropy, balanced_softmax after round 8", "3f2c1ab", "2 cores, 8 GiB", "2 min 3 s",
        "none of 1,234", "CIFAR-10.1", "weight_decay", "RuntimeError: the client stopped",
    ),
    "adapting": (
        "tent", "bbn", "fog", "snow", "frost", *CLASSES, *layer_sizes(), "tent · fedavg: all weights are equal",
        "30,000 samples in 15 rounds",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=[whole_run(), ADAPTING], ids=["methods", "adapting"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("report"), request.param)


def test_page_is_self_contained(page: str) -> None:
    elements = Elements(page)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(elements.tags)
    assert all(reference.startswith(("#", "data:")) for reference in elements.references)
    assert all(reference[1:] in elements.ids for reference in elements.references if reference.startswith("#"))
    assert not re.search(r"https?:|@import", page)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert page.count("<svg ") == page.count('role="img" aria-label="') == 4


def test_page_is_complete(page: str, request: pytest.FixtureRequest) -> None:
    words = Elements(page).text
    kind = request.node.callspec.id
    assert [name for name in NAMES[kind] if name not in words] == []
    assert ("<h2>Accuracy</h2>" in page) == (kind == "methods")  # a run in rounds has its accuracies elsewhere


def rows_of(page: str, table: int = 0) -> list[list[str]]:
    """Return the texts of the cells of a table of the page."""
    body = page.split("<tbody>")[1 + table].split("</tbody>")[0]
    return [re.sub(r"<[^>]+>", "", row.replace("</td>", "|").replace("</th>", "|")).split("|")[:-1]
            for row in body.split("</tr>")[:-1]]  # fmt: skip


def test_tables_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = Metric("calibration_error", "Calibration error", "clients", best="lowest")
    monkeypatch.setattr(accuracy, "METRICS", (*METRICS, extra))
    events = [{**event, "calibration_error": 0.25} for event in BY_HAND]
    page = page_of(tmp_path, events)
    assert rows_of(page) == [["a", "56.2 ±6.2", "62.5 ±12.5", "50.0 ±25.0"], ["b", "–", "100.0 ±0.0", "–"]]
    assert rows_of(page, 1)[0] == ["a", "64.6", "66.7", "62.5"]  # each sample has the same weight
    assert rows_of(page, 2)[0] == ["a", "114.58", "166.67", "62.50"]  # 0.5 s of each client, in ms for each sample
    assert rows_of(page, 3)[0] == ["a", "0.25 ±0.00", "0.25 ±0.00", "0.25 ±0.00"]
    assert rows_of(page, 4)[0] == ["a · x", "75.0", "50.0", "–"]  # each client
    assert "b on x: 1 client; b on y: no samples" in Elements(page).text


def test_a_mean_over_samples_says_that_a_large_client_counts_less(tmp_path: Path) -> None:
    """Of 10, 10 and 80 samples the last count as 30: 0.4 of the samples are right, not 0.2."""
    clients = [evaluation("a", "x", 0, 10, 10), evaluation("a", "x", 1, 10, 10), evaluation("a", "x", 2, 0, 80)]
    run = {"event": "run", "time": "t", "settings": {"max-share": 3.0}, "versions": {}, "hardware": "h"}
    words = "at most 3 times the median client's samples (max-share)"
    page = page_of(tmp_path / "limited", [run, *clients])
    assert rows_of(page, 1)[0] == ["a", "40.0", "40.0"]
    assert words in Elements(page).text
    page = page_of(tmp_path / "plain", clients)
    assert rows_of(page, 1)[0] == ["a", "20.0", "20.0"]
    assert words not in Elements(page).text


def test_estimates_without_labels_stand_beside_accuracies(tmp_path: Path) -> None:
    """Means over clients: 0.5 and 0.9 beside 0.4 and 0.8 are 10 points off each, 0.3 and 1.0 are 10 and 20."""
    first = {"doc": [0.5, 0.4, 0.6], "heads": [0.3, 0.3, 0.5]}
    second = {"doc": [0.9, 0.8, 1.0], "heads": [1.0, 0.9, 1.0]}
    lines = [
        evaluation("none", "original", 0, 4, 10, estimates=first),
        evaluation("none", "original", 1, 8, 10, estimates=second),
        evaluation("none", "original", 2, 0, 0, estimates={}),
        evaluation("none", "mixture", 0, 4, 10),
    ]
    page = page_of(tmp_path, lines)
    assert '<td>60.0</td><td>70.0 <span class="sd">60.0 to 80.0; 10.0</span></td>' in page
    assert '<td>65.0 <span class="sd">60.0 to 75.0; 15.0</span></td>' in page
    assert "without labels" not in page_of(tmp_path, lines[3:])


def test_best_values_are_bold_and_named(tmp_path: Path) -> None:
    events = [evaluation(name, "x", 0, correct, 4) for name, correct in (("a", 2), ("b", 3), ("c", 3), ("d", 1))]
    page = page_of(tmp_path, events)
    body = page.split("<tbody>")[1].split("</tbody>")[0]
    assert [row.count("<strong>") for row in body.split("</tr>")[:-1]] == [0, 2, 2, 0]
    assert "b and c with 75.0 % over 1 distribution; next is a with 50.0 %" in Elements(page).text


def test_an_incomplete_cell_says_so_and_is_not_the_best(tmp_path: Path) -> None:
    page = page_of(tmp_path, [*FULL, *SHORT, adapt_round(1, []), adapt_round(1, [[1.0]], method="tent")])
    words = Elements(page).text
    assert rows_of(page)[:2] == [["bbn", "50.0"], ["tent", "66.7 after 1 of 2 rounds"]]
    assert "Highest global accuracy: bbn with pfedbbn, 50.0 % over 12 samples" in words
    assert "Weights not recorded because there are too many clients: bbn · pfedbbn" in words
    # one cell has more rounds, the other more samples: none is complete
    events = [adapted(1, 0, [1], [2]), adapted(2, 0, [1], [2]), adapted(1, 0, [2], [9], method="tent")]
    assert "Highest" not in page_of(tmp_path, events)


def test_settings_that_differ_come_first(tmp_path: Path) -> None:
    settings = {"seed": 1, "clients": 7, "weight-decay": 5e-4, "dataset": "digits", "flux": "on"}
    run = {"event": "run", "time": "t", "settings": settings, "versions": {}, "hardware": "h"}
    page = page_of(tmp_path, [run])
    changed, usual = page.split("<h2>Settings</h2>")[1].split("<details>")
    assert re.findall(r"<dt>(.*?)</dt>", changed) == ["clients", "flux"]
    assert re.findall(r"<dt>(.*?)</dt>", usual) == ["seed", "weight-decay", "dataset"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], ["No evaluation", "No round was trained", "has not ended", "not recorded its settings"]),
        ([evaluation("none", "x", 0, 1, 2)], ["the model is as initialized"]),
        ([evaluation("none", "x", 0, 0, 0)], ["No evaluation"]),
        ([training_round("ce", 1, train_loss=float("inf"))], ["not finite: ce, round 1", "No evaluation"]),
        ([{"event": "clients", "class_counts": None, "classes": [], "sizes": [[8, 1, 1], [4, 1, 1]]}],
         ["Class counts stay on the devices", "2 clients with 6 to 10 samples", "No leak check"]),
        ([{"event": "leak_check", "checked": 5, "leaked": 2}], ["Leak check failed: 2 of 5"]),
        ([{"event": "run", "time": "t", "settings": {"split": "published"}, "versions": {}, "hardware": "h"},
          {"event": "leak_check", "checked": 5, "leaked": 2}], ["on purpose, split = published: 2 of 5"]),
        ([{"event": "run", "time": "t", "settings": {"init": "m.st"}, "versions": {}, "hardware": "h"},
          evaluation("none", "x", 0, 1, 2)], ["the model is read from m.st"]),
        ([{"event": "end", "seconds": 9.0, "status": "failed"}], ["ended with status “failed”"]),
        ([{"event": "late", "training": "ce", "round": 1, "reason": "deadline"}] * 53, ["53 late", "3 more"]),
        ([adapt_round(1, [[1.0]])], ["No client has had a test sample"]),
        ([adapted(1, 0, [1], [1]), adapted(2, 0, [0], [0])], []),  # one class, and a round without samples
        ([rates_round(1, loss=float("inf")), rates({}, {})], []),
        ([adapted(1, client, [client], [client + 1]) for client in range(30)], []),
        ([adapted(1, 0, [0] * 100, [1] * 100), adapt_round(1, np.full((60, 60), 1 / 120).tolist())], []),
        ([adapted(1, 0, [1, 0], [1, 2], method=f"m{n % 2}", collaboration=f"c{n // 2}") for n in range(10)], []),
        ([evaluation(f"method{i}", "x", client, i, 20) for i in range(16) for client in range(100)], ["The first 20"]),
        ([{"event": "clients", "class_counts": [[i % 7 for i in range(100)]] * 100, "classes": list(range(100)),
           "sizes": [[9, 1, 1]] * 100}], ["The first 50 clients"]),
    ],
)  # fmt: skip
def test_every_state_of_a_run_has_a_page(tmp_path: Path, events: list[Any], words: list[str]) -> None:
    page = page_of(tmp_path, events)
    text = Elements(page).text
    for expected in words:
        assert expected in text
    assert len(page) < 2_000_000


def test_every_prefix_of_a_run_has_a_page(tmp_path: Path) -> None:
    events = whole_run(clients=2, rounds=1)
    for number in range(0, len(events), 16):
        Elements(build_page(results_of(tmp_path, events[:number]), "run"))


def test_the_code_of_a_deployed_run_is_its_bundle(tmp_path: Path) -> None:
    run = {**whole_run(clients=2, rounds=1)[0], "commit": None, "bundle": "8fe1"}
    page = build_page(results_of(tmp_path, [run]), "run")
    assert "<dt>App bundle</dt><dd>8fe1</dd>" in page
    assert "<dt>Commit</dt>" not in page


def test_all_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&$x_2$"
    label = {"method": evil, "collaboration": evil}
    events = [
        {"event": "run", "time": evil, "settings": {evil: evil}, "versions": {evil: evil}, "commit": evil,
         "bundle": evil, "hardware": evil},
        {"event": "clients", "class_counts": [[1, 2]], "classes": [evil, "b"], "sizes": [[1, 1, 1]], "roles": [evil]},
        training_round(evil, 1, train_loss=None), training_round(evil, 2, train_loss=float("inf")),
        {"event": "failed", "training": evil, "round": 1, "partition": 0, "node_id": evil, "reason": evil},
        {"event": "leak_check", "training": evil, "checked": 5, "leaked": 2},
        {"event": "note", "text": evil},
        evaluation(evil, evil, 0, 1, 2, training=evil, weight_histogram=[1] * WEIGHT_BINS, weight_mean=0.5),
        evaluation(evil, evil, 1, 1, 2, training="other"),
        rates_round(1, training=evil), rates_round(1, training="other"),
        rates({f"{evil}.weight": 0.5}, {f"{evil}.weight": 1}, training=evil),
        adapted(1, 0, [1, 0], [1, 1], corruption=evil, **label),
        adapted(1, 1, [1, 0], [1, 0], corruption=evil, **label),
        adapt_round(1, [[0.7, 0.3], [0.1, 0.9]], **label),
        adapted(1, 1, [1, 0], [1, 0], method="b", collaboration=evil, corruption=evil),
        adapt_round(1, [[0.5, 0.5], [0.5, 0.5]], method="b", collaboration=evil),
        {"event": "end", "seconds": 1.0, "status": evil},
    ]  # fmt: skip
    elements = Elements(page_of(tmp_path, events, name="a&b"))
    assert "script" not in elements.tags
    assert "a&b" in elements.text
    assert elements.tags.count("svg") == 6


def test_local_training_share(tmp_path: Path) -> None:
    results = results_of(tmp_path, [training_round("ce", 1, train_seconds=[2.0, 1.0, 3.0], wall_seconds=3.5)])
    (entry,) = results.rounds
    assert local_training_seconds(entry, 2) == 3.0  # (2 + 1 + 3) / 2 workers
    assert local_training_seconds(entry, 8) == 2.0  # three clients occupy at most three workers
    assert local_training_seconds(entry, 1) == 3.5  # never more than the round took
    assert local_training_seconds(entry, None) == 3.0  # deployment: the slowest device
    assert workers_of(results) is None
    assert workers_of(results_of(tmp_path, whole_run(clients=2, rounds=1))) == 2


def test_time_and_traffic_of_a_round(tmp_path: Path) -> None:
    events = [
        adapted(1, 0, [1], [2]), adapted(2, 0, [1], [2]),
        adapt_round(1, [[1.0]], bytes_down=4_000_000), adapt_round(2, [[1.0]], wall_seconds=2.0),
        rates_round(1, bytes_down=5_000_000), rates_round(2),
    ]  # fmt: skip
    rows = {row[0]: row[1:] for row in rows_of(page_of(tmp_path, events).split("<h2>Time and traffic</h2>")[1])}
    assert rows["rates: all"] == ["2", "2.00", "5 MB", "368 B", "368 B", "–"]
    assert rows["bbn · pfedbbn"] == ["2", "2.50", "4 MB", "400 kB", "400 kB", "250.00"]  # 1 s for 4 samples


def test_what_compressed_updates_saved_and_cost(tmp_path: Path) -> None:
    about = {"bytes_up_float32": 4000, "trained_accuracy": 0.5, "decoded_accuracy": 0.4925}
    events = [training_round("ce", 1, **about), training_round("ce", 2, **{**about, "decoded_accuracy": 0.4975})]
    events.append(training_round("changed", 1, bytes_up_float32=2000, trained_accuracy=None, decoded_accuracy=None))
    page = page_of(tmp_path, events).split("<h2>Time and traffic</h2>")[1]
    rows = {row[0]: row[1:] for row in rows_of(page)}
    assert rows["ce"][4:8] == ["1 kB", "4 kB", "50.00", "49.50"]
    assert rows["changed"][4:8] == ["1 kB", "2 kB", "–", "–"]
    assert "as the server decoded them" in page
    plain = page_of(tmp_path, [training_round("ce", 1)]).split("<h2>Time and traffic</h2>")[1]
    assert "in float32" not in plain


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (duration(4.21), "4.2 s"), (duration(59.97), "1 min 0 s"), (duration(123.4), "2 min 3 s"),
        (duration(3599.8), "1 h 0 min"), (duration(3900), "1 h 5 min"),
        (size(0), "0 B"), (size(999), "999 B"), (size(2_300_000), "2.3 MB"), (size(5e13), "50 TB"),
        (size(2**53), "9.01 PB"),
        (instant("2026-11-21T10:00:30Z"), "2026-11-21 10:00 UTC"), (instant("yesterday"), "yesterday"),
        (instant("2026-11-21T10:00:00+02:00"), "2026-11-21 08:00 UTC"),
        (instant("2026-11-21T10:00:00"), "2026-11-21 10:00"),
    ],
)  # fmt: skip
def test_format_of_times_and_sizes(shown: str, words: str) -> None:
    assert shown == words


def test_names_may_break_at_punctuation_and_before_brackets() -> None:
    assert breakable("a_b;c,d[e](f<g") == "a_<wbr>b;<wbr>c,<wbr>d<wbr>[e]<wbr>(f&lt;g"


@pytest.mark.parametrize("told", ["clients", "settings"])
def test_devices_with_data_of_their_own_are_no_named_data_set(told: str, tmp_path: Path) -> None:
    run, clients, *_ = whole_run(2)
    lead = re.search(r'<p class="lead">(.*?)</p>', page_of(tmp_path, [run, clients]))
    assert lead
    assert lead[1].startswith("digits · cnn · 2 clients")
    if told == "clients":  # in a deployment: of a run that names classes, too
        events = [run, {**clients, "data": [{"own_data": True}, {}]}]
    else:
        events = [{**run, "settings": {**run["settings"], "classes": "a,b"}}]
    lead = re.search(r'<p class="lead">(.*?)</p>', page_of(tmp_path, events, "own"))
    assert lead
    assert lead[1].startswith("devices' own data · cnn")
    assert "digits" not in lead[1]


def test_the_table_of_clients_has_one_column_for_each(tmp_path: Path) -> None:
    """Client 1 has no test samples of this distribution."""
    section = accuracy.client_section(
        results_of(tmp_path, [evaluation("a", "x", 0, 3, 4), evaluation("a", "x", 2, 1, 5)])
    )
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", section)
    assert [head for head in heads if head.isdigit()] == ["0", "1", "2"]
