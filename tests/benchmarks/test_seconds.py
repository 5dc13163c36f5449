"""BTFL's Table 3 beside ours: from made-up times, and measured once for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cost import measure, setting_up
from benchmarks.seconds import MODELS, ROWS, markdown, multiples


def test_seconds_and_multiples() -> None:
    costs = {name: {"processor_milliseconds": value} for name, value in zip(ROWS, (6.0, 20.0, 1.0, 2.0), strict=True)}
    assert multiples({"a": 3.0, "btfl": 2.0}) == {"a": 1.5, "btfl": 1.0}
    about = {"samples": 5, "repeats": 3, "hardware": "abacus", "versions": {"torch": "9"}, "load_average": 0.1}
    page = markdown({"costs": {"cnn": costs}, **about})
    assert "| memo | 20.00 s, 10.0 / 9.3 |" in page  # 160.99 / 17.30
    assert "| fedthe | 1.00 s, 0.5 / 4.5 |" in page
    assert "| btfl | 2.00 s, 1.0 / 1.0 |" in page


def test_only_what_was_asked_for_is_measured() -> None:
    costs = measure(setting_up("cnn", "", 2, 1), 1, ["btfl"])
    assert set(costs) == {"none", "btfl"}
    assert costs["btfl"].forward == pytest.approx(1)


def test_the_command_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.seconds.MODELS", MODELS[:1])
    assert main(["seconds", "--samples", "1", "--repeats", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "seconds.json").read_text())
    assert set(found["costs"]["cnn"]) == {"none", *ROWS}
    assert found["costs"]["cnn"]["memo"]["forward"] > 32
    assert "| btfl |" in (tmp_path / "seconds.md").read_text()
