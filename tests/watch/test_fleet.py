"""The fleet as it is read from run folders: newest telemetry wins, damage is counted, and little is read."""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_left
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry
from fedtta.server.observation import DEVICES_FILE, FORMER, Kept
from fedtta.simulation.devices import Device
from fedtta.watch import fleet
from fedtta.watch.fleet import FleetDevice, damaged_lines, history, latency, read_fleet


def line(at: float = 1.0, node: int = 1, name: str = "a", **about: Any) -> str:
    values = {"at": at, "node": node, "run": "r", "telemetry": {"name": name}}
    return json.dumps(values | about) + "\n"


def write(results: Path, content: str | bytes, run: str = "r", name: str = DEVICES_FILE) -> Path:
    path = results / run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def seen(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def test_there_may_be_nothing(tmp_path: Path) -> None:
    assert read_fleet(tmp_path / "nowhere") == []
    (only,) = read_fleet(tmp_path, [Device("a", 5, "registered", None)])
    assert only == FleetDevice("a", 5, "registered", None, None, None)


def test_what_the_server_keeps_is_read_back(tmp_path: Path) -> None:
    telemetry = Telemetry(
        name="site-a", software={"fedtta": "1.0"}, model="v1", candidate="shadow v2", weight=0.25, weights=[0.5, 0.25],
        drift=0.1, holding=True, guard_events={"collapse": 2}, memory=7, latency=[1] * (len(LATENCY_BOUNDS) + 1),
    )  # fmt: skip
    Kept(tmp_path / "r").append(12.5, 2**64 - 1, "r", telemetry)
    assert read_fleet(tmp_path) == [FleetDevice("site-a", 2**64 - 1, "unknown", 12.5, telemetry, 12.5)]
    assert damaged_lines(tmp_path) == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 1000)), max_size=30)
)
def test_newest_wins_over_all_files(told: list[tuple[int, str, int, int]]) -> None:
    """Of nodes that no SuperLink lists: by name, whatever the run, the file and the order of the lines."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        files: dict[tuple[str, str], str] = {}
        for number, (run, name, node, at) in enumerate(told):
            key = (f"run-{run}", FORMER if number % 3 == 0 else DEVICES_FILE)
            unique = at + number / 1000
            files[key] = files.get(key, "") + line(unique, node, name)
        for (run_name, file), content in files.items():
            write(results, content, run_name, file)
        expected: dict[str, tuple[float, int]] = {}
        for number, (_, name, node, at) in enumerate(told):
            expected[name] = max(expected.get(name, (-1.0, 0)), (at + number / 1000, node))
        found = read_fleet(results)
        assert [one.name for one in found] == sorted(expected)
        assert {one.name: (one.telemetry_at, one.node_id) for one in found} == expected
        for name in expected:
            times = [at + number / 1000 for number, (_, other, _, at) in enumerate(told) if other == name]
            assert [at for at, _ in history(results, name)] == sorted(times)
            assert [at for at, _ in history(results, name, 2)] == sorted(times)[-2:]


DAMAGED = (
    "{",
    "null",
    "[]",
    line(at=-1.0),
    line(at=float("nan")),
    line(node=-1),
    line(node=2**64),
    line(name="../etc"),
    line(name="<b>"),
    line(more=1),
    line(telemetry={"name": "a", "weight": 2.0}),
    line(telemetry={"name": "a", "memory": "7"}),
    line(telemetry={"name": "a", "software": {"x\x1b": "1.0"}}),
    line(telemetry=[]),
    line(telemetry={}),
    line()[:-20],
    "[" * 100_000,
    "\x00" * 10,
)


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    content = "".join(f"{one.strip()}\n{line(name='ok')}\n" for one in DAMAGED)  # and empty lines
    write(tmp_path, content.encode() + b"\xff\xfe\n" + line(at=9.0, name="ok").encode() + line().encode()[:30])
    (only,) = read_fleet(tmp_path)
    assert (only.name, only.telemetry_at) == ("ok", 9.0)
    assert damaged_lines(tmp_path) == len(DAMAGED) + 2


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_no_bytes_make_it_fail(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), content + b"\n" + line(name="ok").encode())
        assert "ok" in [one.name for one in read_fleet(Path(folder))]


def test_only_the_end_of_a_huge_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r" / DEVICES_FILE
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(line(at=1.0, name="old").encode())
        file.truncate(1 << 40)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(at=2.0, name="new").encode())
    assert [one.name for one in read_fleet(tmp_path)] == ["new"]
    assert damaged_lines(tmp_path) == 0  # the line that is cut does not count
    monkeypatch.setattr(fleet, "FILES", 2)
    for number in range(4):
        os.utime(write(tmp_path, line(name=f"n{number}"), f"run-{number}"), (number, 2**32 + number))
    assert [one.name for one in read_fleet(tmp_path)] == ["n2", "n3"]


def test_a_device_that_is_silent_for_long_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much others have said since: it has its newest telemetry, and the alert that it is silent goes on."""
    monkeypatch.setattr(fleet, "TAIL", 3 * len(line(20.0)))
    first = "".join(line(float(at), node, name) for at, node, name in ((1, 7, "away"), (2, 7, "away"), (2, 8, "gone")))
    damaged = line(5.0, 9, "broken")[:-3] + "\n"
    write(tmp_path, first + damaged + "".join(line(float(at)) for at in range(10, 21)))
    assert [(one.name, one.telemetry_at) for one in read_fleet(tmp_path)] == [("a", 20.0), ("away", 2.0), ("gone", 2.0)]
    assert [at for at, _ in history(tmp_path, "a")] == [18.0, 19.0, 20.0]  # only the end is read as a whole
    assert damaged_lines(tmp_path) == 0


def test_files_are_read_again_only_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = fleet._read, list[Path]()
    monkeypatch.setattr(fleet, "_read", lambda path, state: reads.append(path) or read(path, state))
    path, other = write(tmp_path, line()), write(tmp_path, line(name="b"), "s")
    for _ in range(3):
        assert [one.name for one in read_fleet(tmp_path)] == ["a", "b"]
        damaged_lines(tmp_path)
        history(tmp_path, "a")
    assert sorted(reads) == [path, other]
    with path.open("a") as file:
        file.write(line(at=5.0))
    assert read_fleet(tmp_path)[0].telemetry_at == 5.0
    other.unlink()
    assert [one.name for one in read_fleet(tmp_path)] == ["a"]
    assert reads[2:] == [path]


def test_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / DEVICES_FILE)
    (tmp_path / "folder" / DEVICES_FILE).mkdir(parents=True)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / DEVICES_FILE).symlink_to(tmp_path / "nowhere")
    assert read_fleet(tmp_path) == []


def test_a_listed_device_is_known_by_its_node(tmp_path: Path) -> None:
    """Whatever names their telemetry has: one of them lies."""
    write(tmp_path, line(10.0, 1, "site-a") + line(20.0, 2, "site-a") + line(30.0, 3, "site-b") + line(40.0, 4, "gone"))
    listed = [
        Device("site-b", 1, "online", seen(15.0)), Device("node-1", 2, "offline", seen(5.0)),
        Device("node-2", 3, "online", seen(31.0)), Device("gone", 4, "unregistered", seen(50.0)),
        Device("10", 5, "registered", None), Device("9", 6, "strange", None),
    ]  # fmt: skip
    found = read_fleet(tmp_path, listed)
    assert [(one.name, one.node_id, one.status, one.last_seen, one.telemetry_at) for one in found] == [
        ("9", 6, "unknown", None, None),
        ("10", 5, "registered", None, None),
        ("node-1", 2, "offline", 20.0, 20.0),  # site 1 says that it is site-a, too
        ("node-2", 3, "online", 31.0, 30.0),  # another one was enrolled as site-b
        ("site-b", 1, "online", 15.0, 10.0),
    ]
    assert all(one.telemetry is None or one.telemetry.name == one.name for one in found)
    assert [at for at, _ in history(tmp_path, "site-b", node_id=1)] == [10.0]
    assert history(tmp_path, "site-b", node_id=1)[0][1].name == "site-b"


def test_a_device_enrolled_under_the_name_of_a_key_has_the_name_that_it_tells(tmp_path: Path) -> None:
    write(tmp_path, line(10.0, 1, "site-a") + line(11.0, 9, "elsewhere") + line(12.0, 8, "site-a"))
    found = read_fleet(tmp_path, [Device("node-0", 1, "online", None), Device("-", 2, "online", None)])
    assert [(one.name, one.node_id, one.status) for one in found] == [
        ("-", 2, "online"), ("elsewhere", 9, "unknown"), ("site-a", 1, "online"),
    ]  # fmt: skip


# -- latency


def test_quantiles_are_interpolated_as_prometheus_does() -> None:
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    assert latency(Telemetry(name="a", latency=counts), 0.5) is None
    counts[1], counts[3] = 10, 10  # (0.001, 0.0025] and (0.005, 0.01]
    one = Telemetry(name="a", latency=counts)
    assert latency(one, 0.25) == pytest.approx(0.001 + 0.0015 * 5 / 10)
    assert latency(one, 0.5) == pytest.approx(0.0025)
    assert latency(one, 0.95) == pytest.approx(0.005 + 0.005 * 9 / 10)
    counts[-1] = 1000
    assert latency(Telemetry(name="a", latency=counts), 0.95) == LATENCY_BOUNDS[-1]


@given(st.lists(st.floats(1e-6, 9.9), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_interval_of_the_sample(seconds: list[float], share: float) -> None:
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    for one in seconds:
        counts[bisect_left(LATENCY_BOUNDS, one)] += 1
    found = latency(Telemetry(name="a", latency=counts), share)
    rank = share * len(seconds)
    exact = sorted(seconds)[max(0, -int(-rank // 1) - 1)]
    position = bisect_left(LATENCY_BOUNDS, exact)
    bounds = (0.0, *LATENCY_BOUNDS)
    assert found is not None
    assert bounds[position] - 1e-9 <= found <= bounds[position + 1] + 1e-9
