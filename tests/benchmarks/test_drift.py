"""`drift`: the streams, the alarms that count, MMD against a loop, and the page."""

from __future__ import annotations

import itertools
import json
import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedtta.benchmarks.provenance import write_json
from fedtta.benchmarks.tables import drift
from fedtta.benchmarks.tables.drift import (
    SEVERITIES,
    Mmd,
    distances,
    drift_page,
    first_in,
    measure,
    mmd,
    streams_of,
    summary,
)
from fedtta.client.resources import federation_of, network_spec
from fedtta.data import Federation
from fedtta.models import TwoHead, build
from fedtta.settings import Settings, SettingsError

WHERE = {"hardware": "2 cores", "commit": "abc", "time": "today"}


def digits() -> tuple[TwoHead, Federation]:
    settings = Settings(dataset="digits", clients=2, image_size=18, channels=1, model="shallow-cnn", model_options="")
    federation = federation_of(settings)
    return build(**network_spec(federation.images, settings)).eval(), federation


def test_mmd_is_that_of_a_loop() -> None:
    rows = np.random.default_rng(1).normal(size=(9, 2))
    kernel = np.exp(-distances(rows, rows) / 3)
    reference, stream = [0, 2, 4, 6], [1, 3, 5, 7, 8]

    def k(i: int, j: int) -> float:
        return math.exp(-sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) / 3)

    expected = []
    for stop in range(3, 6):
        window = stream[stop - 3 : stop]
        pairs = [[k(i, j) for i, j in itertools.permutations(part, 2)] for part in (reference, window)]
        cross = [k(i, j) for i in reference for j in window]
        expected.append(np.mean(pairs[0]) + np.mean(pairs[1]) - 2 * np.mean(cross))
    assert mmd(kernel, np.array(reference), np.array(stream), 3) == pytest.approx(expected, abs=1e-12)


def test_mmd_finds_a_change_and_has_false_alarms_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "STREAMS", 300)
    found = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        detector = Mmd(draw.normal(size=(80, 3)), 10, 0.005, seed)
        found.append(bool(detector.update(draw.normal(size=(100, 3)))))
        (position,) = detector.update(draw.normal(size=(40, 3)) + 3)
        assert position < 20
    assert 1 <= sum(found) <= 15  # 20 (1 - 0.995^91) = 7 on average
    with pytest.raises(ValueError, match="at least 29"):
        Mmd(np.zeros((28, 2)), 10, 0.005, 0)


def test_the_first_alarm_in_a_part_finds_the_switch_before_it() -> None:
    found = {0: [([], 40), ([7, 30], 40)], 3: [([4, 12, 15, 35], 10), ([20], 10)]}
    row = summary(found, orders=1, first_only=False)
    assert (row["false_alarms"], row["samples"], row["streams_with_false_alarms"]) == (2, 80, 1)
    assert row["false_alarms_of_clients"] == [0, 2]
    assert [(one["found"], one["median_delay"]) for one in row["switches"]] == [(1, 3), (1, 1), (1, 6)]
    assert row["found_of_clients"] == [0.667, 0.333]
    assert row["other_alarms_per_1000"] == 25  # those at 4 and 15, in 80 samples
    first = summary({0: [([], 40)], 3: [([12], 10)]}, orders=1, first_only=True)
    assert [one["found"] for one in first["switches"]] == [1]
    assert (first_in([9, 20], 10, 10), first_in([9, 19], 10, 10), first_in([10], 10, 10)) == (None, 10, 1)


def test_streams_switch_and_have_no_image_twice() -> None:
    model, federation = digits()
    third = len(federation.splits[0].test) // 3
    unchanged, *changed = streams_of(model, federation, 0, 1)
    assert unchanged[0] == 0
    assert [severity for severity, _ in changed] == list(SEVERITIES)
    own = unchanged[1][0]["features"]
    for _, parts in changed:
        assert [len(part["features"]) for part in parts] == [third] * 4
        assert np.array_equal(parts[0]["features"], own[:third])
        assert np.array_equal(parts[3]["features"], own[2 * third : 3 * third])
        rows = np.concatenate([part["outputs"] for part in parts])
        assert len(np.unique(rows, axis=0)) == len(rows)
    assert not np.allclose(changed[0][1][1]["features"], changed[4][1][1]["features"])


def test_the_measured_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "STREAMS", 50)
    rows = measure(*digits(), orders=1, false_alarms=0.01, console=Console(file=StringIO()))
    content = {**WHERE, "false_alarms": 0.01, "orders": 1, "clients": 2, "measured": rows}
    path = write_json(tmp_path / drift.FILE, content)
    page = drift_page(drift.read_drift(path))
    assert len(rows) == 8
    assert all(page.count(f"| {row['values']} | {row['test']} |") >= 2 for row in rows)
    assert "2 clients, 1 streams of each" in page
    assert json.loads(path.read_text())["measured"] == rows


def test_kept_results_that_cannot_be_read(tmp_path: Path) -> None:
    for text in ("{", "3"):
        (tmp_path / drift.FILE).write_text(text)
        with pytest.raises(SettingsError, match=r"drift\.json cannot be read"):
            drift.read_drift(tmp_path / drift.FILE)
