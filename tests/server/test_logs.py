"""A run's events as lines of the log."""

from __future__ import annotations

import logging

import pytest

from fedtta.server.events import Event, Events
from fedtta.server.logs import EventLines


def test_each_event_is_a_line_of_its_level_with_the_devices_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fedtta.run")
    with EventLines() as lines:
        earlier: Event = {"event": "clients", "at": 1.0, "sizes": [], "names": ["site-a"], "classes": []}
        lines(earlier)  # of a run that is resumed
        events = Events(lines)
        events("joined", partition=1, name="site-b", sizes=[1, 1, 1], node_id=5)
        events("phase", name="train", total=2)
        for kind in ("late", "failed", "refused", "limited"):
            events(kind, phase="train", round=3, partition=1, node_id=5, reason="disk\x1b[31m full")
        events("round", training="ce", round=3, replied=[0], train_loss=None, wall_seconds=1.5)
        events("note", text="careful")
        events("end", seconds=2.0, status="completed")
        events("end", seconds=2.0, status="failed: OSError: disk")
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    reason = "disk\ufffd[31m full"
    assert found == [
        ("INFO", "joined"), ("DEBUG", "phase"), ("WARNING", f"late: {reason}"), ("WARNING", f"failed: {reason}"),
        ("WARNING", f"refused: {reason}"), ("WARNING", f"limited: {reason}"), ("INFO", "round"),
        ("INFO", "note: careful"), ("INFO", "end: completed"), ("ERROR", "end: failed: OSError: disk"),
    ]  # fmt: skip
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert fields[2] == {
        "event": "late", "phase": "train", "round": 3, "partition": 1, "node_id": 5, "reason": reason,
        "device": "site-b",
    }  # fmt: skip
    assert fields[6] == {"event": "round", "training": "ce", "round": 3, "wall_seconds": 1.5}
