"""A device's private state: what it keeps between messages and never sends.

Entries are named arrays under a key, tagged with the training round after which they hold. The last two tags are kept,
so that a device one round ahead of a resumed server can step back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from models import load_arrays, save_arrays

Arrays = dict[str, NDArray[Any]]
KEPT = 2  # tags kept for each key


class PrivateState(Protocol):
    """Where private arrays live between messages."""

    def load(self, key: str, round: int) -> Arrays | None:
        """Return the newest entry of `key` tagged with `round` or earlier, or None."""

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store an entry of `key` tagged with `round`; entries with later tags are forgotten."""


class MemoryState:
    """Private state in a dictionary: for tests, and the base of Flower's context backend."""

    def __init__(self, entries: dict[tuple[str, int], Arrays] | None = None) -> None:
        self.entries = {} if entries is None else entries

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`."""
        tags = [tag for name, tag in self.entries if name == key and tag <= round]
        return {name: value.copy() for name, value in self.entries[key, max(tags)].items()} if tags else None

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See `PrivateState.save`."""
        self.entries[key, round] = {name: np.array(value) for name, value in arrays.items()}
        for tag in outdated([tag for name, tag in self.entries if name == key], round):
            del self.entries[key, tag]


class DirectoryState:
    """Private state as safetensors files, `<root>/<run>/<partition>/<key>@<round>.safetensors`.

    Parameters
    ----------
    root : str or Path
        Folder of all runs' states on this device.
    run : str
        Identifies the run; a resumed run has the identity of the run that it resumes.
    partition : int
        The client's partition.
    """

    def __init__(self, root: str | Path, run: str, partition: int) -> None:
        self.folder = Path(root) / plain_name("run identity", run) / str(partition)

    def _files(self, key: str) -> dict[int, Path]:
        pattern = re.compile(re.escape(key) + r"@(\d+)\.safetensors")
        paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        found = ((pattern.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in found if match}

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`; ValueError names a file that cannot be read."""
        files = {tag: path for tag, path in self._files(key).items() if tag <= round}
        if not files:
            return None
        tag = max(files)
        arrays, metadata = load_arrays(files[tag])
        if metadata.get("round") != str(tag):
            raise ValueError(f"{files[tag]}: tagged {metadata.get('round')} inside, {tag} in its name")
        return arrays

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """See `PrivateState.save`; the file appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{plain_name('key', key)}@{round}.safetensors"
        save_arrays(path, dict(arrays), {"round": str(round)})
        files = self._files(key)
        for tag in outdated(list(files), round):
            files[tag].unlink()


def plain_name(what: str, name: str) -> str:
    """Return `name`, which becomes a file name; ValueError if it could lead out of its folder."""
    if not re.fullmatch(r"[\w.-]+", name) or set(name) == {"."}:
        raise ValueError(f"{what} {name!r}: allowed are letters, digits, '_', '.', '-'")
    return name


def outdated(tags: list[int], newest: int) -> list[int]:
    """Return the tags to forget: those after `newest`, and all but the last `KEPT` up to it."""
    kept = sorted(tag for tag in tags if tag <= newest)[-KEPT:]
    return [tag for tag in tags if tag not in kept]
