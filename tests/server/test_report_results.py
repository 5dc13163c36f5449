"""Reading metrics: what is refused, ignored and counted once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.report import (
    read_results,
)
from tests.server.test_report_run import (
    evaluation,
    results_of,
    training_round,
    write_events,
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "Expecting"),
        ("[1, 2]", "JSON object"),
        ('{"round": 1}', "'event'"),
        ('{"event": "leak_check", "checked": 3}', "'leaked' is missing"),
        ('{"event": "leak_check", "checked": 3, "leaked": -1}', "'leaked' must be a whole number"),
        ('{"event": "note", "text": 3}', "'text' must be a string"),
        (json.dumps(evaluation("none", "original", 0, 4, 3)), "4 correct of 3"),
        (json.dumps(evaluation("none", "original", 0, 1, 3, weight_histogram=[1, 2])), "list of 20 counts"),
        (json.dumps(evaluation("none", "original", 0, 1, 3, seconds=float("nan"))), "'seconds' must be"),
        (json.dumps(training_round("ce", 1, validation_accuracy=61.0)), "from 0 to 1 or null"),
        (json.dumps(training_round("ce", True)), "'round' must be a whole number"),
        (
            '{"event": "clients", "class_counts": [[1]], "classes": ["a", "b"], "sizes": [[1, 1, 1]]}',
            "2 numbers",
        ),
    ],
)
def test_a_malformed_line_names_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    folder = write_events(tmp_path, ['{"event": "note", "text": "fine"}', "", line])
    with pytest.raises(ValueError, match=words) as caught:
        read_results(folder / "metrics.jsonl")
    assert f"{folder / 'metrics.jsonl'}, line 3: " in str(caught.value)


def test_bytes_that_are_no_utf8_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "end", "seconds": 1, "status": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1: "):
        read_results(tmp_path / "metrics.jsonl")


def test_unknown_events_and_fields_are_ignored_and_separators_in_strings_kept(tmp_path: Path) -> None:
    events = [{"event": "temperature", "value": 3}, {"event": "note", "text": "a\u2028b", "at": 1.5}]
    assert results_of(tmp_path, events).notes == ["a\u2028b"]


def test_what_a_resumed_run_wrote_again_counts_once(tmp_path: Path) -> None:
    run = {"event": "run", "time": "t", "settings": {"node-timeout": 3}, "versions": {}, "hardware": "h"}
    first, second = training_round("ce", 1, train_loss=3.0), training_round("ce", 1, train_loss=2.0)
    again = [evaluation("none", "original", 0, 1, 4), evaluation("none", "original", 0, 2, 4)]
    results = results_of(tmp_path, [run, first, run, second, *again])
    assert [entry.train_loss for entry in results.rounds] == [2.0]
    assert [entry.correct for entry in results.evaluations] == [2]
    assert results.starts == 2
    assert results.setting("node_timeout") == 3
    assert results.setting("none_of_these") is None
