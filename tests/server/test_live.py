"""What a run is doing: states of its clients from its events, the file that says so, and what is refused in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.server import live as module
from fedtta.server.events import STEPS, Event
from fedtta.server.live import LiveState, RunState
from fedtta.server.report.live import LARGEST, LIVE_FILE, Live, read_live


def after(*events: Event, at: float = 100.0) -> Live:
    """Return the state after events, one a second."""
    state = RunState(at)
    for number, event in enumerate(events):
        state({"at": at + number, **event})
    return state.live(at + len(events))


def states(live: Live) -> str:
    return " ".join(live.clients[partition].state for partition in sorted(live.clients))


CLIENTS: Event = {"event": "clients", "sizes": [[9, 1, 1]] * 5}


def phase(*asked: int, name: str = "train ce", total: int | None = None) -> Event:
    return {"event": "phase", "name": name, "round": 3, "total": len(asked) if total is None else total, "asked": asked}


def of(event: str, partition: int) -> Event:
    return {"event": event, "partition": partition}


# -- states


def test_states_of_a_round() -> None:
    events = [CLIENTS, phase(0, 1, 2, 3), of("answered", 1), of("answered", 0), of("answered", 3)]
    events += [of("late", 2), of("refused", 0), of("limited", 3), of("left", 4)]
    live = after(*events)
    assert (live.phase, live.round, live.since, live.answered, live.total) == ("train ce", 3, 101.0, 3, 4)
    assert states(live) == "refused answered late limited gone"
    assert live.clients[2].since == 105.0
    following = after(*events, phase(0, 2, 4), of("answered", 2))
    assert states(following) == "asked idle answered idle asked"
    assert states(after(*events, phase(0))) == "asked idle idle idle gone"
    assert states(after(*events, of("rejoined", 4), phase(0))) == "asked idle idle idle idle"
    assert states(after(*events, of("joined", 5))).split()[5] == "idle"


def test_nodes_that_are_not_known_yet_are_counted_only() -> None:
    live = after(phase(name="identify", total=3), *[of("answered", 2**62)] * 5)
    assert (live.answered, live.total, live.clients) == (3, 3, {})


def test_the_time_left_is_that_of_the_last_steps() -> None:
    steps = [{"event": "plan", "steps": 30, "at": 0}, *({"event": "round", "at": 10.0 * n} for n in range(1, 16))]
    slower = {"event": "statistics", "at": 170.0}
    assert after({"event": "plan", "steps": 30}).end is None
    live = after(*steps)
    assert (live.steps, live.planned, live.end) == (15, 30, 150.0 + 15 * 10)
    assert after(*steps, slower).end == 170.0 + 14 * 11  # ten steps from 60 to 170
    resumed = after(*steps[:1], {"event": "resumed", "at": 1000.0}, {"event": "round", "at": 1004.0})
    assert resumed.end == 1004.0 + 29 * 4  # the pause does not count


KINDS = ("phase", "answered", "failed", "late", "refused", "limited", "left", "rejoined", "joined", "note", *STEPS)
EVENTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 6), st.sets(st.integers(0, 6)), st.integers(0, 9))


@given(st.integers(0, 5), st.lists(EVENTS, max_size=40))
def test_every_client_is_in_one_state_and_no_more_answer_than_are_asked(
    clients: int, drawn: list[tuple[str, int, set[int], int]]
) -> None:
    events: list[Event] = [{"event": "clients", "sizes": [[1, 1, 1]] * clients}, {"event": "plan", "steps": 7}]
    known, asked, away, told = set(range(clients)), set(), set(), dict[int, str]()
    for kind, partition, some, total in drawn:
        events.append({**phase(*some, total=total), "event": kind, "partition": partition})
        known |= {partition} if kind in ("left", "rejoined", "joined") else set()
        away = away | {partition} if kind == "left" else away
        away = away - {partition} if kind in ("rejoined", "joined") else away
        if kind == "phase":
            asked, told = some, {}
        elif kind not in ("note", *STEPS):
            told[partition] = kind
    live = after(*events)
    assert set(live.clients) == known
    assert live.answered <= live.total
    assert live.steps == sum(kind in STEPS for kind, *_ in drawn)
    begun = any(kind == "phase" for kind, *_ in drawn)
    for partition in known - set(told):  # nothing was heard of it in this phase
        expected = "asked" if partition in asked else "gone" if partition in away else "idle"
        assert live.clients[partition].state == expected
    for partition in known & set(told):
        words = {"rejoined": "idle", "joined": "idle", "left": "gone"}
        allowed = {words.get(told[partition], told[partition])}
        if told[partition] == "answered":  # of one that was not waited for, which changes nothing
            allowed = {"answered", *KINDS[2:6], "idle", "gone"}
        assert live.clients[partition].state in allowed
        assert live.clients[partition].state != "asked" or begun
    assert Live.from_json(live.to_json()) == live


# -- the file


def wait_for(folder: Path, fits: Callable[[Live], bool]) -> Live:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        live = read_live(folder)
        if live is not None and fits(live):
            return live
        time.sleep(0.005)
    raise AssertionError(f"{folder}: not seen")


def test_the_file_follows_the_run_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    (tmp_path / LIVE_FILE).write_text("of a run that was killed")
    with LiveState(tmp_path) as listener:
        for event in (CLIENTS, phase(0, 1), of("answered", 1)):
            listener({"at": 5.0, **event})
        seen = wait_for(tmp_path, lambda live: live.answered == 1)
        assert states(seen) == "asked answered idle idle idle"
        first = seen.written
        monkeypatch.setattr(module, "HEARTBEAT", 0.02)
        listener({"event": "note", "at": 6.0})
        wait_for(tmp_path, lambda live: live.written > first)  # also while nothing happens
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LiveState(tmp_path / "nowhere") as listener:
        listener({**CLIENTS, "at": 1.0})
        for _ in range(3):
            listener.write()
    told = [record for record in caplog.records if LIVE_FILE in record.getMessage()]
    assert len(told) == 1


GOOD: dict[str, Any] = json.loads(after(CLIENTS, phase(0, 1)).to_json())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff\xfe", b"null", b"[" * 100_000,
        json.dumps({**GOOD, "answered": 3}).encode(),
        json.dumps({**GOOD, "total": -1}).encode(),
        json.dumps({**GOOD, "written": float("nan")}).encode(),
        json.dumps({**GOOD, "written": 1e300}).encode(),
        json.dumps({**GOOD, "phase": "x" * 501}).encode(),
        json.dumps({**GOOD, "clients": {"0": {"state": "<b>", "since": 1}}}).encode(),
        json.dumps({**GOOD, "clients": {"-1": {"state": "idle", "since": 1}}}).encode(),
        b" " * (LARGEST + 1),
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(content: bytes, tmp_path: Path) -> None:
    assert read_live(tmp_path) is None
    (tmp_path / LIVE_FILE).write_bytes(json.dumps({**GOOD, "later": 1}).encode())
    assert read_live(tmp_path) == Live.from_json(json.dumps(GOOD).encode())
    (tmp_path / LIVE_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=LIVE_FILE):
        read_live(tmp_path)
