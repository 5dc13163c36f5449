"""`metrics.jsonl`: any damage is noticed by line number, and restored where there is a copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.server.report import read_results
from fedtta.server.report.journal import COPY, METRICS_FILE, Copy, Journal, line_of, read_lines, restored

EVENTS: list[dict[str, Any]] = [
    {"event": "note", "text": 'a "quoted" note, "digest": "0123456789abcdef"}'},
    {"event": "end", "seconds": 1.5, "status": "failed: ä\n"},
    {"event": "end", "seconds": 2, "status": "completed"},
]


def content_of(events: list[dict[str, Any]], before: str = "") -> bytes:
    content = b""
    for event in events:
        line, before = line_of(event, before)
        content += line
    return content


def faults(content: bytes) -> list[int]:
    return [line.number for line in read_lines(content) if line.fault]


def written(folder: Path, copied: int = 2) -> tuple[Path, bytes]:
    """A run folder whose first lines are in the copy; its metrics file and what that holds."""
    journal, path = Journal(folder / METRICS_FILE), folder / METRICS_FILE
    for number, event in enumerate(EVENTS, start=1):
        journal.append(event)
        if number == copied:
            Copy(folder).update()
    return path, path.read_bytes()


def test_events_come_back_and_lines_are_json(tmp_path: Path) -> None:
    path, content = written(tmp_path)
    assert content == content_of(EVENTS)
    assert [line.event for line in read_lines(content)] == EVENTS
    assert faults(content) == []
    assert [json.loads(line).pop("event") for line in content.splitlines()] == [one["event"] for one in EVENTS]
    assert [line.end for line in read_lines(content)][-1] == len(content)
    Journal(path).append(EVENTS[0])  # another process goes on
    assert faults(path.read_bytes()) == []


@given(st.data())
def test_any_changed_byte_is_noticed_at_its_line_or_the_next(data: st.DataObject) -> None:
    content = content_of(EVENTS)
    at = data.draw(st.integers(0, len(content) - 2))  # without the last line's end, half a line is left
    other = data.draw(st.integers(1, 255))
    damaged = content[:at] + bytes([content[at] ^ other]) + content[at + 1 :]
    line = content[:at].count(b"\n") + 1
    assert faults(damaged)
    assert faults(damaged)[0] in (line, line + 1)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_line_that_is_lost_doubled_or_moved_is_noticed(gone: int) -> None:
    lines = content_of(EVENTS).splitlines(keepends=True)
    assert faults(b"".join(lines[:gone] + lines[gone + 1 :])) == [gone + 1]
    assert faults(b"".join([*lines[: gone + 1], *lines[gone:]])) == [gone + 2]
    assert faults(lines[1] + lines[0] + lines[2])
    assert faults(b"".join([*lines, json.dumps(EVENTS[0]).encode() + b"\n"])) == [4]  # no digest


def test_lines_without_digests_of_earlier_versions_are_read_and_covered_by_the_first_with_one(tmp_path: Path) -> None:
    old = "".join(json.dumps(event) + "\n" for event in EVENTS).encode()
    assert faults(old) == []
    (tmp_path / METRICS_FILE).write_bytes(old)
    Journal(tmp_path / METRICS_FILE).append(EVENTS[0])
    content = (tmp_path / METRICS_FILE).read_bytes()
    assert faults(content) == []
    assert faults(content.replace(b"1.5", b"1.6")) == [4]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"event": 1}', "[" * 100_000, '{"evemt": "end"}'])
def test_what_is_no_event_is_a_fault_and_no_key_error(line: str) -> None:
    (found,) = read_lines(f"{line}\n".encode())
    assert found.fault
    assert found.event == {}


def damaged(how: str, content: bytes) -> bytes | None:
    lines = content.splitlines(keepends=True)
    return {
        "changed": content.replace(b"1.5", b"7.5"),
        "digest": content.replace(json.loads(lines[1])["digest"].encode(), b"0" * 16),
        "a line is lost": lines[0] + lines[2],
        "two lines are lost": lines[2],
        "a line is doubled": lines[0] + lines[0] + lines[1] + lines[2],
        "zeros": bytes(len(lines[0])) + lines[1] + lines[2],
        "no line's end": lines[0][:-1] + lines[1] + lines[2],
    }[how]


@pytest.mark.parametrize(
    "how",
    ["changed", "digest", "a line is lost", "two lines are lost", "a line is doubled", "zeros", "no line's end"],
)
def test_damage_is_restored_from_the_copy_with_what_came_after_it(how: str, tmp_path: Path) -> None:
    path, content = written(tmp_path)
    changed = damaged(how, content)
    assert changed is not None
    path.write_bytes(changed)
    whole, told = restored(tmp_path)
    assert whole == content
    assert told.startswith(f"{METRICS_FILE}: line ")
    assert told.endswith(f"restored from {COPY}")
    assert path.read_bytes() == changed  # reading changes nothing
    assert read_results(path).notes[-1] == told


def test_a_file_that_is_cut_or_gone_is_restored_as_far_as_the_copy_goes(tmp_path: Path) -> None:
    path, content = written(tmp_path)
    copied = content_of(EVENTS[:2])
    path.write_bytes(content[: len(copied) - 5])
    assert restored(tmp_path) == (copied, f"{METRICS_FILE}: lines were lost; restored from {COPY}")
    path.unlink()
    assert restored(tmp_path)[0] == copied
    (tmp_path / COPY).write_bytes(copied[:-9])  # killed while it was copied
    assert restored(tmp_path)[0] == content_of(EVENTS[:1])
    (tmp_path / COPY).unlink()
    with pytest.raises(FileNotFoundError):
        restored(tmp_path)


def test_damage_that_the_copy_cannot_repair_is_told_by_line(tmp_path: Path) -> None:
    path, content = written(tmp_path)
    late = content.replace(b'"seconds": 2', b'"seconds": 3')
    path.write_bytes(late)
    assert restored(tmp_path) == (late, "")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: damaged: its digest does not fit"):
        read_results(path)
    path.write_bytes(content.replace(b"1.5", b"7.5"))
    copy = tmp_path / COPY
    copy.write_bytes(copy.read_bytes().replace(b"1.5", b"7.5"))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: damaged"):
        read_results(path)


def test_a_copy_of_another_run_or_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    path, content = written(tmp_path)
    for wrong in (b"other\n", content + b"more\n", content[:-1]):
        (tmp_path / COPY).write_bytes(wrong)
        assert Copy(tmp_path).update() == len(content)
        assert (tmp_path / COPY).read_bytes() == path.read_bytes() == content
