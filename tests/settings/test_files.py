"""Durable files: whole or not at all, flushed with the folders that name them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedtta.settings.files import Lines, cut, make_folder, write_atomically
from tests.hostile.disk import Disk, from_on, once


def test_each_new_folder_is_flushed_with_the_one_above(tmp_path: Path) -> None:
    with Disk(tmp_path).failing(lambda number: False) as disk:
        write_atomically(tmp_path / "a" / "b" / "f", b"x")
    assert disk.seen[:4] == [("mkdir", "a"), ("fsync", "."), ("mkdir", "a/b"), ("fsync", "a")]
    assert disk.seen[-2:] == [("replace", disk.seen[-2][1]), ("fsync", "a/b")]


def test_what_need_not_outlive_a_power_cut_is_not_flushed(tmp_path: Path) -> None:
    with Disk(tmp_path).failing(lambda number: False) as disk:
        write_atomically(tmp_path / "a" / "f", b"x", durable=False)
    assert [name for name, _ in disk.seen] == ["mkdir", "open", "write", "replace"]
    assert (tmp_path / "a" / "f").read_bytes() == b"x"


def test_a_folder_that_was_not_flushed_is_made_again(tmp_path: Path) -> None:
    with Disk(tmp_path).failing(once(1)), pytest.raises(OSError, match="Input/output"):
        make_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    make_folder(tmp_path / "a" / "b", 0o700)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file" / "b")


@pytest.mark.parametrize("number", range(4))  # open, write, flush, rename
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, number: int) -> None:
    path = write_atomically(tmp_path / "f", b"old", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Disk(tmp_path).failing(once(number)), pytest.raises(OSError, match=r"Errno.*\bf\b"):
        write_atomically(path, b"new")
    if number < 3:  # there is no flush
        with Disk(tmp_path).failing(once(number)), pytest.raises(OSError, match="Errno"):
            write_atomically(path, b"new", durable=False)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_system_that_takes_little_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more than 2 GiB at once, or of what still fits on a disk: the error comes with the next write."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, bytes(content)[:3]))
    write_atomically(tmp_path / "f", b"0123456789", memoryview(b"abcd"))
    assert (tmp_path / "f").read_bytes() == b"0123456789abcd"
    Lines(tmp_path / "f").append(b"efghi\n")
    assert (tmp_path / "f").read_bytes() == b"0123456789abcd\nefghi\n"


@pytest.mark.parametrize("number", range(2))  # write, flush
def test_a_line_that_fails_is_taken_back(tmp_path: Path, number: int) -> None:
    lines, path = Lines(tmp_path / "f"), tmp_path / "f"
    lines.append(b"one\n")
    with Disk(tmp_path).failing(once(number)), pytest.raises(OSError, match=r"Errno.*/f'"):
        lines.append(b"two two\n")
    assert path.read_bytes() == b"one\n"
    with Disk(tmp_path).failing(from_on(number)), pytest.raises(OSError, match="Errno"):
        lines.append(b"two two\n")
    assert path.read_bytes() != b"one\n"  # not even that could be undone
    lines.append(b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_half_a_line_of_a_killed_process_is_ended(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"one\nha")
    Lines(tmp_path / "f").append(b"two\n")
    assert (tmp_path / "f").read_bytes() == b"one\nha\ntwo\n"


def test_a_file_is_cut_and_never_made_longer(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "f", b"12345")
    cut(path, 9)
    assert path.read_bytes() == b"12345"
    cut(path, 2)
    assert path.read_bytes() == b"12"
