"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes) -> Path:
    """Put `content` at `path` in one step, durably, and return the path; leave nothing behind on failure.

    The file is written under another name in the same folder (made if need be), flushed to the disk and renamed: a
    reader, or a crash, finds the old file or the new one whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is on the disk only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path
