"""`rounds`: what is computed from the events of a simulation, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.rounds import RoundTime, round_times
from server.events import RunError
from settings import Settings


def event(number: int, wall: float, seconds: list[float], replied: int = 3) -> dict[str, Any]:
    who = {"sampled": [0, 1, 2], "replied": list(range(replied))}
    return {"event": "round", "round": number, "wall_seconds": wall, "train_seconds": seconds, **who}


EVENTS = [event(1, 99.0, [1.0, 1.0, 1.0]), event(2, 3.0, [1.0, 2.0, 1.0]), event(3, 2.0, [1.0, 0.5, 0.5])]


def test_round_times_by_hand() -> None:
    # (1 + 2 + 1) / 2 workers = 2 s, 3 / 2 = 1.5; (1 + 0.5 + 0.5) / 2 = 1 s, 2 / 1 = 2. The first round is left out.
    assert round_times(EVENTS, workers=2) == [RoundTime(2, 3.0, 2.0, 1.5), RoundTime(3, 2.0, 1.0, 2.0)]


def test_a_client_that_failed_spoils_the_round() -> None:
    with pytest.raises(RunError, match="round 2: only 2 of 3 replied"):
        round_times([EVENTS[0], event(2, 1.0, [1.0, 1.0], replied=2)], workers=2)


def test_from_words_to_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []

    def simulate(settings: Settings, folder: Path, listeners: list[Any]) -> None:
        seen.append(settings)
        assert not folder.exists()
        for one in [{"event": "run"}, *EVENTS, {"event": "end"}]:
            listeners[0](one)

    monkeypatch.setattr("simulation.simulate", simulate)
    words = ["rounds", "--clients", "3", "--rounds", "3", "--workers", "2", "--out", str(tmp_path)]
    assert main([*words, "--set", "local-epochs=2"]) == 0
    assert (seen[0].clients, seen[0].local_epochs, seen[0].dataset, seen[0].model) == (3, 2, "cifar10", "cnn")
    assert "median ratio 1.750, target ≤ 1.25 ✗" in capsys.readouterr().out
    content = json.loads((tmp_path / "rounds.json").read_text())
    assert content["ratio_median"] == 1.75
    assert content["settings"]["workers"] == 2
    assert [row["ratio"] for row in content["rounds"]] == [1.5, 2.0]


def test_one_round_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds", "--rounds", "1"]) == 2
    assert "allowed is 2 or more" in capsys.readouterr().err
