"""A disk that fails: every operation that changes a file under a folder is counted, and one of them fails, or all."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

#: "FEDTTA_HOSTILE=full": every operation fails once; by default one of those alike.
FULL = os.environ.get("FEDTTA_HOSTILE") == "full"
Operation = tuple[str, str]  # its name, and the file's path in the folder


class Disk:
    """The operations on the files of one folder while `failing` is entered.

    Parameters
    ----------
    folder : Path

    Attributes
    ----------
    seen : list of (str, str)
        Name and file of the operations so far, also of those that failed.
    failed : list of (str, str)
        Those that failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.seen: list[Operation] = []
        self.failed: list[Operation] = []
        self._fails: Callable[[int], bool] = lambda number: False

    @contextmanager
    def failing(self, fails: Callable[[int], bool]) -> Iterator[Disk]:
        """Let operations fail by their number, from 0; a write that fails has written half."""
        self.seen, self.failed, self._fails = [], [], fails
        with ExitStack() as stack:
            for name in ("mkdir", "rmdir", "unlink", "remove", "utime", "truncate"):
                stack.enter_context(patch.object(os, name, self._by_path(name, getattr(os, name))))
            for name in ("replace", "rename"):
                stack.enter_context(patch.object(os, name, self._by_path(name, getattr(os, name))))
            for name in ("fsync", "ftruncate"):
                stack.enter_context(patch.object(os, name, self._by_handle(name, getattr(os, name))))
            stack.enter_context(patch.object(os, "write", self._write(os.write)))
            stack.enter_context(patch.object(os, "open", self._open(os.open)))
            stack.enter_context(patch.object(io, "open", self._file(io.open)))
            yield self

    def _inside(self, path: Any, folder: int | None = None) -> str | None:
        """Return a path relative to the folder, None for one that is not in it."""
        # as text: paths as objects took a sixth of the time of all tests with a disk; no link is followed
        whole = os.path.abspath(os.path.join(_opened(folder) if folder else "", os.fsdecode(path)))  # noqa: PTH100, PTH118
        top = str(self.folder)
        if whole == top:
            return "."
        return whole[len(top) + 1 :] if whole.startswith(top + os.sep) else None

    def _happens(self, name: str, file: str | None) -> bool:
        """Count an operation; return whether it fails."""
        if file is None:
            return False
        number = len(self.seen)
        self.seen.append((name, file))
        if self._fails(number):
            self.failed.append((name, file))
            return True
        return False

    def _error(self, name: str, file: Any) -> OSError:
        number = errno.ENOSPC if name in ("open", "write", "mkdir") else errno.EIO
        named = () if isinstance(file, int) else (str(file),)  # the system knows no name of a handle
        return OSError(number, os.strerror(number), *named)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *rest: Any, **more: Any) -> Any:
            there = os.path.lexists(path) if more.get("dir_fd") is None else True
            counts = there != (name == "mkdir")  # what would fail anyway is no operation
            if counts and self._happens(name, self._inside(path, more.get("dir_fd"))):
                raise self._error(name, path)
            return real(path, *rest, **more)

        return called

    def _by_handle(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(handle: int, *rest: Any) -> Any:
            if self._happens(name, self._inside(_opened(handle))):
                raise self._error(name, handle)
            return real(handle, *rest)

        return called

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def called(handle: int, content: Any) -> int:
            if self._happens("write", self._inside(_opened(handle))):
                real(handle, bytes(content)[: len(content) // 2])
                raise self._error("write", handle)
            return real(handle, content)

        return called

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def called(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            makes = flags & os.O_CREAT and not os.path.lexists(path)  # a full disk opens what is there
            if makes and self._happens("open", self._inside(path, more.get("dir_fd"))):
                raise self._error("open", path)
            return real(path, flags, *rest, **more)

        return called

    def _file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            makes = isinstance(path, str | os.PathLike) and set(mode) & set("wax") and not os.path.lexists(path)
            if makes and self._happens("open", self._inside(path)):
                raise self._error("open", path)
            return real(path, mode, *rest, **more)

        return called


def _opened(handle: int) -> Path:
    """Return the path of an open file."""
    return Path(f"/proc/self/fd/{handle}").readlink()


def once(number: int) -> Callable[[int], bool]:
    """Let one operation fail."""
    return lambda now: now == number


def from_on(number: int) -> Callable[[int], bool]:
    """Let an operation and all later ones fail: a full disk."""
    return lambda now: now >= number


def numbers(seen: Sequence[Operation]) -> list[int]:
    """Return the numbers of the operations that are to fail: all, or of those alike, by what came before, one."""
    if FULL:
        return list(range(len(seen)))
    found: dict[tuple[str, str, str], int] = {}
    for number, ((before, _), (name, file)) in enumerate(pairwise([("", ""), *seen])):
        found.setdefault((before, name, re.sub(r"[0-9a-f]{8}|[0-9]+", "0", file)), number)
    return sorted(found.values())
