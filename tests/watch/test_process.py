"""`fedtta run --watch`: the page of a run is a process of its own, which ends with the run."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedtta.server.report.live import LIVE_FILE, Live
from fedtta.settings import Settings
from fedtta.simulation import __main__ as program
from fedtta.simulation import engine
from tests.report.runs import write_events


def test_the_page_is_there_while_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {}

    def simulate(settings: Settings, folder: Path) -> Path:
        (line,) = capsys.readouterr().out.splitlines()
        found["address"] = line.removeprefix("Live page: ")
        found["before"] = httpx.get(found["address"]).text
        write_events(folder, [{"event": "note", "text": "so far"}])
        (folder / LIVE_FILE).write_bytes(Live(time.time(), 0.0, "train ce", 1.0, 3, 2).to_json())
        have = re.findall('data-have="([^"]*)"', found["before"])[0]
        found["update"] = httpx.get(found["address"], params={"have": have}).json()
        (folder / LIVE_FILE).unlink()
        return write_events(folder, [{"event": "end", "seconds": 1.0, "status": "completed"}])

    monkeypatch.setattr(engine, "simulate", simulate)
    words = ["--results", str(tmp_path), "--run-name", "a b", "--watch", "127.0.0.1:0"]
    begin = time.monotonic()
    assert program.main(words) == 0
    assert time.monotonic() - begin < 60  # an open page is waited for, but not for long
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/runs/a%20b", found["address"])
    assert "has not begun" in found["before"]
    assert "2 of 3 clients answered" in found["update"]["changed"]["now"]["html"]
    assert "so far" in found["update"]["changed"]["checks"]["html"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(found["address"])


def test_a_page_that_cannot_be_served_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "simulate", lambda *_: pytest.fail("the run began"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert program.main(["--results", str(tmp_path), "--watch"]) == 2
    assert list(tmp_path.iterdir()) == []
