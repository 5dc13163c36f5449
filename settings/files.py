"""Durable files: written whole or not at all, appended to line by line, in folders that outlive a power cut.

A function that returns has its content on the disk. One that raises OSError has changed nothing that a reader sees,
with one exception: if flushing the folder fails after the rename, `write_atomically` leaves the new content in place.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


def write_atomically(
    path: str | os.PathLike[str], *content: bytes | memoryview, private: bool = False, durable: bool = True
) -> Path:
    """Write the parts of `content` to `path` atomically and durably, and return the path.

    The content is written to a temporary file in the same folder (made if missing), flushed to the disk and renamed:
    a reader sees the complete old file or the complete new one, also after a crash.

    Parameters
    ----------
    private : bool
        Let this user alone read the file.
    durable : bool
        Flush it to the disk. Without that it is still atomic for all processes, but may not outlive a power cut.

    Raises
    ------
    OSError
        It could not be written; nothing is left behind.
    """
    path = Path(path)
    if durable:
        make_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        handle = os.open(temporary, WRITE | os.O_EXCL, 0o600 if private else 0o666)
        try:
            with _named(path):
                for part in content:
                    _write(handle, part)
                if durable:
                    os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)  # the rename is durable only then
    return path


def remove_unfinished(folder: Path, name: str) -> None:
    """Remove what killed processes left when they wrote files of a folder atomically; `name` is a pattern of theirs."""
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 8}.tmp"):
        path.unlink(missing_ok=True)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it that are missing, durably: each is flushed with the folder that names it.

    Parameters
    ----------
    mode : int
        Permissions of the folder itself.
    """
    missing = []
    above = path
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(mode if folder == path else 0o777, exist_ok=True)
        try:
            sync_folder(folder.parent)
        except OSError:
            with contextlib.suppress(OSError):  # or the next attempt finds it there and does not flush
                folder.rmdir()
            raise


def cut(path: Path, size: int) -> None:
    """Cut a file to at most `size` bytes, durably."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size > size:
            os.ftruncate(handle, size)
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with _named(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


class Lines:
    """A file that lines are appended to.

    A line that cannot be written whole is cut off again, at once or, where the disk does not allow that, before the
    next line. Half a line that a killed process left is ended first.

    Parameters
    ----------
    path : Path
    sync : bool
        Flush every line to the disk, and a new file's name.
    """

    def __init__(self, path: Path, sync: bool = True) -> None:
        self.path, self._sync = path, sync
        self._good: int | None = None  # the size to cut back to

    def append(self, lines: bytes) -> None:
        """Append whole lines.

        Raises
        ------
        OSError
            They could not be written; the file has none of them, or will have none.
        """
        new = not self.path.exists()
        if new:
            make_folder(self.path.parent)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._cut(handle)
            size = self._good = os.fstat(handle).st_size
            half = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            try:
                with _named(self.path):
                    _write(handle, b"\n" + lines if half else lines)
                    if self._sync:
                        os.fsync(handle)
                if self._sync and new:
                    sync_folder(self.path.parent)
                self._good = None
            except BaseException:
                with contextlib.suppress(OSError):
                    self._cut(handle)
                raise
        finally:
            os.close(handle)

    def _cut(self, handle: int) -> None:
        """Cut off what the last failure has left."""
        if self._good is not None:
            if os.fstat(handle).st_size > self._good:
                os.ftruncate(handle, self._good)
            self._good = None


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of a file's handle, such as that of a full disk, name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:  # the system's, of a handle
            error.filename = str(path)
        raise


def _write(handle: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]
