"""The device's log: one JSON object a line, bounded, and never in the way."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from fedtta.client.agent.log import EventLog
from fedtta.settings import logs


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_with_time_and_values(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "agent.log", 10**6)
    log.write("refused", reason="a\nline", figures={"x": 0.5}, path=tmp_path, count=np.float32(2))
    log.write("stop")
    first, second = lines(tmp_path / "agent.log")
    assert (first["event"], first["reason"], first["figures"]) == ("refused", "a\nline", {"x": 0.5})
    assert (first["path"], first["count"]) == (str(tmp_path), "2.0")
    assert str(first["time"]).endswith("+00:00")
    assert first["time"] <= second["time"]  # type: ignore[operator]


def test_lines_have_the_fields_of_all_logs(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "agent.log", 10**6, "site-a")
    log.write("start")
    log.version = lambda: "run/ce/3/abcd"
    with logs.about(run="r1", round=4):
        log.write("refused", version="run/ce/4/ef01", reason="not finite")
    log.write("request", kind="train", error="OSError: https://me:secret@host")
    first, second, third = lines(tmp_path / "agent.log")
    assert {key: first[key] for key in ("level", "logger", "message", "event", "device", "version")} == {
        "level": "info", "logger": "fedtta.agent", "message": "start", "event": "start", "device": "site-a",
        "version": "",
    }  # fmt: skip
    assert (second["level"], second["message"]) == ("warning", "refused: not finite")
    assert (second["run"], second["round"], second["version"]) == ("r1", 4, "run/ce/4/ef01")
    assert (third["level"], third["version"]) == ("error", "run/ce/3/abcd")
    assert (third["error"], third["message"]) == ("OSError: https://***@host", "request: OSError: https://***@host")


def test_it_is_rotated_and_two_files_remain(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "agent.log", 1000)
    for number in range(100):
        log.write("saved", number=number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.log", "agent.log.1"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [line["number"] for path in ("agent.log.1", "agent.log") for line in lines(tmp_path / path)]
    assert kept == list(range(100))[-len(kept) :]  # the newest ones, in order


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "agent.log", 10**7)
    threads = [
        threading.Thread(target=lambda name=name: [log.write("e", name=name, text="x" * 500) for _ in range(50)])
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(line["name"]) for line in lines(tmp_path / "agent.log")) == sorted("0123" * 50)


def test_what_cannot_be_written_raises_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "agent.log").mkdir()
    log = EventLog(tmp_path / "agent.log", 1)
    for _ in range(3):
        log.write("saved")
    log.write("bad", values={1: object(), (2, 3): "no key"})
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
