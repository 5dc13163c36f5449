"""Times and sizes in words, the share of local training, and the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from server.report.__main__ import main
from server.report.plots_run import local_training_seconds, workers_of
from server.report.wording import duration, instant, size
from tests.server.test_report_run import (
    METHODS,
    SHIFTS,
    results_of,
    training_round,
    whole_run,
    write_events,
)


def test_local_training_share(tmp_path: Path) -> None:
    results = results_of(tmp_path, [training_round("ce", 1, train_seconds=[2.0, 1.0, 3.0], wall_seconds=3.5)])
    entry = results.rounds[0]
    assert local_training_seconds(entry, 2) == 3.0  # (2 + 1 + 3) / 2 workers
    assert local_training_seconds(entry, 8) == 2.0  # three clients keep no more than three workers busy
    assert local_training_seconds(entry, 1) == 3.5  # never more than the round took
    assert local_training_seconds(entry, None) == 3.0  # deployment: the slowest device
    assert workers_of(results) is None
    assert workers_of(results_of(tmp_path, whole_run(clients=2, rounds=1))) == 2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.21, "4.2 s"), (59.97, "1 min 0 s"), (123.4, "2 min 3 s"), (3599.8, "1 h 0 min"), (3900, "1 h 5 min")],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (999, "999 B"), (2_300_000, "2.3 MB"), (5e13, "50 TB")])
def test_size(count: float, words: str) -> None:
    assert size(count) == words


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("2026-11-21T10:00:30Z", "2026-11-21 10:00 UTC"),
        ("2026-11-21T10:00:00+02:00", "2026-11-21 08:00 UTC"),
        ("2026-11-21T10:00:00", "2026-11-21 10:00"),
        ("yesterday", "yesterday"),
    ],
)
def test_instant(written: str, words: str) -> None:
    assert instant(written) == words


def test_command_line_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_events(tmp_path / "run", whole_run(clients=2, rounds=1))
    assert main([str(folder)]) == 0
    assert "fedthe_plus" in capsys.readouterr().out
    assert (folder / "report.html").stat().st_size > 10_000
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(METHODS)
    assert list(rows[0]) == ["method", "training", *SHIFTS, "average", "average_sd"]


def test_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main([str(write_events(tmp_path, ["nonsense"]))]) == 2
    assert "line 1" in capsys.readouterr().err
