"""Reading metrics: what is read, refused, ignored and counted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedtta.server.report import read_results
from fedtta.server.report.events import EVENTS, parse_event
from tests.report.runs import (
    METHODS,
    SHIFTS,
    adapt_round,
    adapted,
    adapting_together,
    clients_event,
    evaluation,
    layer_sizes,
    learned_rates,
    rates,
    rates_round,
    results_of,
    training_round,
    whole_run,
    write_events,
)

CLIENTS = {"event": "clients", "class_counts": None, "classes": ["a", "b"], "sizes": [[1, 1, 1]]}


def test_every_event_of_a_run_is_read(tmp_path: Path) -> None:
    results = results_of(tmp_path, whole_run(clients=3, rounds=2))
    assert results.run is not None
    assert results.run.commit == "3f2c1ab"
    assert results.clients is not None
    assert len(results.clients.sizes) == 3
    assert len(results.rounds) == 4
    assert len(results.evaluations) == len(METHODS) * len(SHIFTS) * 3
    assert [entry.event for entry in results.incidents] == ["refused", "failed"]
    assert results.leak_checks[0].checked == 1234
    assert results.end is not None
    assert results.trainings() == ["cross_entropy", "balanced_softmax"]
    assert [entry.round for entry in results.by_training()["balanced_softmax"]] == [1, 2]


def test_every_event_of_adaptation_is_read(tmp_path: Path) -> None:
    events = [clients_event(), *learned_rates(rounds=2), *adapting_together(rounds=2, corruptions=("fog", "snow"))]
    results = results_of(tmp_path, events)
    assert results.clients is not None
    assert results.clients.roles == ["target"] * 10
    rounds = [(entry.variant, entry.round) for entry in results.rates_rounds]
    assert rounds == [(variant, number) for variant in ("all", "params", "stats") for number in (1, 2)]
    assert list(results.rates[0].rates) == list(layer_sizes())
    assert len(results.adapt_rounds) == 9 * 2
    assert len(results.adapted) == 9 * 2 * 10
    assert sum(results.adapted[0].total) == 1000
    assert results.trainings() == ["cross_entropy"]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("{not json", "Expecting"),
        ("[1, 2]", "JSON object"),
        ({"round": 1}, "'event'"),
        ({"event": "leak_check", "checked": 3}, "'leaked' is missing"),
        ({"event": "leak_check", "checked": 3, "leaked": -1}, "'leaked' must be an integer >= 0"),
        ({"event": "note", "text": 3}, "'text' must be a string"),
        (evaluation("none", "original", 0, 4, 3), "4 correct of 3"),
        (evaluation("none", "original", 0, 1, 3, weight_histogram=[1, 2]), "20 counts, not 2"),
        (evaluation("none", "original", 0, 1, 3, seconds=float("nan")), "'seconds' must be a finite number >= 0"),
        (training_round("ce", 1, validation_accuracy=61.0), "'validation_accuracy' must be a number from 0 to 1"),
        (training_round("ce", True), "'round' must be an integer"),
        (training_round("ce", 1, bytes_up=10**400), "'bytes_up' must be an integer"),  # json reads it, float cannot
        (training_round("ce", 1, train_loss=10**400), "'train_loss' must be a number"),
        (training_round("ce", 1, sampled=[0, 1.5]), "'sampled' must be a list"),
        (CLIENTS | {"class_counts": [[1]]}, "2 numbers"),
        (CLIENTS | {"sizes": [[1, 1]]}, "3 numbers"),
        (CLIENTS | {"roles": "target"}, "'roles' must be a list"),
        (rates_round(1, accuracy=61.0), "'accuracy' must be a number from 0 to 1"),
        (rates_round(1, variant="some"), "'variant' must be one of all, params, stats, not 'some'"),
        (rates_round(1, context_bytes=-1), "'context_bytes' must be an integer"),
        (rates({"a": float("inf")}, {"a": 1}), "'rates' must be an object of a finite number"),
        (rates({"a": 0.5}, {"a": 0.5}), "'sizes' must be an object of an integer"),
        (rates({"a": 0.5, "b": 1}, {"a": 1, "c": 2}), "the same modules; not in both: b, c"),
        (adapt_round(1, [[0.5, 0.5], [1.0]]), "'weights' must be empty or 2 rows of 2"),
        (adapt_round(1, [[1.5]]), "'weights' must be a list"),
        (adapt_round(1, [[1.0]], replied=[0, 1]), "2 rows of 2"),
        (adapted(1, 0, 3, 4), "'correct' must be a list"),
        (adapted(1, 0, [3, 0], [2, 0]), "'correct' must be from 0 to 'total'"),
        (adapted(1, 0, [1], [2, 0]), "'correct' must be from 0 to 'total'"),
    ],
)
def test_an_invalid_line_is_refused_with_file_and_number(tmp_path: Path, event: Any, words: str) -> None:
    line = event if isinstance(event, str) else json.dumps(event)
    path = write_events(tmp_path, ['{"event": "note", "text": "fine"}', "", line]) / "metrics.jsonl"
    with pytest.raises(ValueError, match=words) as caught:
        read_results(path)
    assert f"{path}, line 3: " in str(caught.value)


def test_invalid_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event": "end", "seconds": 1, "status": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1: "):
        read_results(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("events", "number"),
    [([adapted(1, 0, [1, 1], [2, 2]), adapted(2, 1, [1], [2])], 2), ([clients_event(), adapted(2, 1, [1], [2])], 10)],
)
def test_predictions_over_other_classes_are_refused(tmp_path: Path, events: list[Any], number: int) -> None:
    words = rf"metrics.jsonl: adapted \(bbn, pfedbbn, round 2, client 1\): 'total' must have {number} numbers"
    with pytest.raises(ValueError, match=words):
        results_of(tmp_path, events)


def test_null_optional_and_unknown_fields() -> None:
    round_ = training_round("ce", 1, train_loss=None, validation_accuracy=None)
    del round_["personal_validation_accuracy"]
    event: Any = parse_event(round_)
    assert (event.train_loss, event.validation_accuracy, event.personal_validation_accuracy) == (None, None, None)
    assert parse_event(training_round("ce", 1, train_loss=float("inf"))) is not None  # a training that diverged
    event = parse_event(evaluation("a", "x", 0, 1, 2, calibration_error=0.25, at=3, device="cpu"))
    assert event.extra["calibration_error"] == 0.25
    assert "device" not in event.extra
    assert parse_event({"event": "temperature", "value": 3}) is None
    assert {parse_event({"event": "resumed"}).__class__} == {EVENTS["resumed"]}


def test_separators_inside_strings_are_kept(tmp_path: Path) -> None:
    assert results_of(tmp_path, [{"event": "note", "text": "a\u2028b", "at": 1.5}]).notes == ["a\u2028b"]


def test_repeated_events_of_a_resumed_run_count_once(tmp_path: Path) -> None:
    run = {"event": "run", "time": "t", "settings": {"node-timeout": 3}, "versions": {}, "hardware": "h"}
    events = [
        run, training_round("ce", 1, train_loss=3.0), run, {"event": "resumed"},
        training_round("ce", 1, train_loss=2.0),
        evaluation("none", "original", 0, 1, 4), evaluation("none", "original", 0, 2, 4),
        rates_round(1, loss=3.0), rates_round(1, loss=2.0), rates_round(1, "stats"),
        rates({"a": 0.1}, {"a": 1}), rates({"a": 0.2}, {"a": 1}),
        adapt_round(1, [[1.0]], wall_seconds=1.0), adapt_round(1, [[1.0]], wall_seconds=9.0),
        adapt_round(1, [[1.0]], collaboration="fedavg"),
        adapted(1, 0, [1], [4]), adapted(1, 0, [2], [4]), adapted(1, 0, [3], [4], corruption="snow"),
    ]  # fmt: skip
    results = results_of(tmp_path, events)
    assert results.starts == 3
    assert [entry.train_loss for entry in results.rounds] == [2.0]
    assert [entry.correct for entry in results.evaluations] == [2]
    assert [(entry.variant, entry.loss) for entry in results.rates_rounds] == [("all", 2.0), ("stats", 1.5)]
    assert [entry.rates for entry in results.rates] == [{"a": 0.2}]
    assert [(e.collaboration, e.wall_seconds) for e in results.adapt_rounds] == [("pfedbbn", 9.0), ("fedavg", 3.0)]
    assert [(entry.corruption, entry.correct) for entry in results.adapted] == [("fog", [2]), ("snow", [3])]
    assert results.setting("node_timeout") == 3
    assert results.setting("none_of_these") is None
