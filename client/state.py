"""A device's private state: what it keeps between requests and never sends.

Entries are named arrays under a key, tagged with the training round after which they hold. The last two tags are kept,
and the newest up to each round that the server could resume from, so that a device that is ahead of a resumed server
can step back, and one whose newest file is damaged has an older one. Networks that are sent once are kept by their
digest.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import Arrays
from fedtta.models import load_arrays, save_arrays
from fedtta.settings import Settings

LOG = logging.getLogger("fedtta.state")
KEPT = 2  # tags kept for each key
NETWORKS_KEPT = 4  # networks kept on a device, the last ones used
FORGOTTEN = ".forgotten"  # ends the name of a run that is being removed


class PrivateState(Protocol):
    """Where private arrays live between messages."""

    def load(self, key: str, round: int) -> Arrays | None:
        """Return the newest entry of `key` tagged with `round` or earlier, or None."""

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """Store an entry of `key` tagged with `round`; entries with later tags are removed.

        For each round in `keep`, the newest entry up to it stays in addition to the last two.
        """

    def tags(self) -> dict[str, list[int]]:
        """Return the tags of all entries by key, sorted."""


class ResumableState:
    """Private state that knows which rounds the server could resume from.

    Parameters
    ----------
    state : PrivateState
        Where the entries live.
    keep : collection of int
        Given to it with every save.
    """

    def __init__(self, state: PrivateState, keep: Collection[int]) -> None:
        self.state, self.keep = state, keep

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`."""
        return self.state.load(key, round)

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """See `PrivateState.save`."""
        self.state.save(key, round, arrays, {*self.keep, *keep})

    def tags(self) -> dict[str, list[int]]:
        """See `PrivateState.tags`."""
        return self.state.tags()


class MemoryState:
    """Private state in a dictionary, for as long as its process lives."""

    def __init__(self, entries: dict[tuple[str, int], Arrays] | None = None) -> None:
        self.entries = {} if entries is None else entries

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`."""
        tags = [tag for name, tag in self.entries if name == key and tag <= round]
        return {name: value.copy() for name, value in self.entries[key, max(tags)].items()} if tags else None

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """See `PrivateState.save`."""
        self.entries[key, round] = {name: np.array(value) for name, value in arrays.items()}
        for tag in outdated(self.tags()[key], round, keep):
            del self.entries[key, tag]

    def tags(self) -> dict[str, list[int]]:
        """See `PrivateState.tags`."""
        return by_key(self.entries)


class DirectoryState:
    """Private state as safetensors files, `<root>/<run>/<name>/<key>@<round>.safetensors`.

    Parameters
    ----------
    root : str or Path
        Folder of all runs' states on this device.
    run : str
        Identifies the run; a resumed run has the identity of the run that it resumes.
    name : str
        The client's name.
    note : callable
        Called with a line of text about a file that cannot be used while an older one can.
    durable : bool
        See `write_atomically`.
    """

    def __init__(
        self, root: str | Path, run: str, name: str, note: Callable[[str], None] = LOG.warning, durable: bool = True
    ) -> None:
        self.folder = Path(root) / plain_name("run identity", run) / plain_name("client", name)
        self._owner, self._note, self._durable = {"run": run, "client": name}, note, durable

    def _files(self) -> dict[tuple[str, int], Path]:
        paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        found = ((re.fullmatch(r"([\w.-]+)@(\d+)\.safetensors", path.name), path) for path in paths)
        return {(match[1], int(match[2])): path for match, path in found if match}

    def tags(self) -> dict[str, list[int]]:
        """See `PrivateState.tags`; the files' names say it, they are not read."""
        return by_key(self._files())

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`; of entries that cannot be read, an older one is returned, and a note says so.

        Raises
        ------
        ValueError
            There are entries, and none can be read; the message names their files.
        """
        files = {tag: path for (name, tag), path in self._files().items() if name == key and tag <= round}
        refused: list[str] = []
        for tag in sorted(files, reverse=True):
            try:
                arrays = self._read(files[tag], tag)
            except (ValueError, OSError) as error:
                refused.append(str(error))
                continue
            if refused:
                self._note(f"private state refused: {'; '.join(refused)}; that of round {tag} is used")
            return arrays
        if refused:
            raise ValueError("; ".join(refused))
        return None

    def _read(self, path: Path, tag: int) -> Arrays:
        """Read an entry; ValueError for another round's, run's or client's. Older files do not state the last two."""
        arrays, metadata = load_arrays(path)
        if metadata.get("round") != str(tag):
            raise ValueError(f"{path}: tagged {metadata.get('round')} inside, {tag} in its name")
        for what, own in self._owner.items():
            if metadata.get(what, own) != own:
                raise ValueError(f"{path}: private state of {what} {metadata[what]!r}, not {own!r}")
        return arrays

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """See `PrivateState.save`; the file appears whole or not at all, and its user alone can read it.

        Raises
        ------
        OSError
            It could not be written, or an entry with a later tag could not be removed.
        """
        path = self.folder / f"{plain_name('key', key)}@{round}.safetensors"
        save_arrays(path, dict(arrays), {"round": str(round), **self._owner}, private=True, durable=self._durable)
        files = {tag: path for (name, tag), path in self._files().items() if name == key}
        for tag in outdated(list(files), round, keep):
            try:
                files[tag].unlink()
            except OSError:
                if tag > round:  # it would be taken for the newest; an old one goes with the next save
                    raise


def forget_runs(root: Path, current: str, kept: int, days: float = 0.0) -> list[str]:
    """Remove from a `DirectoryState`'s root all runs but the current one and those used last; return their names.

    Parameters
    ----------
    kept : int
        Runs that stay, with the current one; at least 1.
    days : float
        A run that was used within so many days stays in any case: short runs must not remove the state of others.
    """
    for left in root.glob(f"*{FORGOTTEN}"):  # by a process that was killed at it
        shutil.rmtree(left)
    used = {}
    for run in root.iterdir() if root.is_dir() else ():
        clients = [path for path in run.iterdir() if path.is_dir()] if run.is_dir() else []
        if clients and run.name != current:  # other folders, such as networks, have no folders of clients
            used[run] = max(path.stat().st_mtime for path in clients)
    old = sorted(used, key=lambda run: used[run])[: max(0, len(used) - kept + 1)]
    old = [run for run in old if not days or used[run] < time.time() - days * 86400]
    for run in old:  # gone at once, though its files take their time
        shutil.rmtree(run.rename(run.with_name(run.name + FORGOTTEN)))
    return [run.name for run in old]


def plain_name(what: str, name: str) -> str:
    """Return `name`, which becomes a file name; ValueError if it could lead out of its folder."""
    if not re.fullmatch(r"[\w.-]+", name) or set(name) == {"."}:
        raise ValueError(f"{what} {name!r}: allowed are letters, digits, '_', '.', '-'")
    return name


def outdated(tags: list[int], newest: int, keep: Collection[int] = ()) -> list[int]:
    """Return the tags to remove: those after `newest`; of the others all but the last `KEPT` and those of `keep`.

    For each round in `keep`, the newest tag up to it stays.
    """
    past_tags = sorted(tag for tag in tags if tag <= newest)
    back = {max(before) for round in keep if (before := [tag for tag in past_tags if tag <= round])}
    return [tag for tag in tags if tag not in past_tags[-KEPT:] and tag not in back]


def by_key(entries: Collection[tuple[str, int]]) -> dict[str, list[int]]:
    """Return key → sorted tags of (key, tag) pairs."""
    found: dict[str, list[int]] = {}
    for key, tag in sorted(entries):
        found.setdefault(key, []).append(tag)
    return found


def private_folder(settings: Settings) -> Path:
    """Return the folder of a device's state on disk: `state-dir`, or one in the machine's temporary folder.

    The latter belongs to the user alone; it is emptied by the machine only.

    Raises
    ------
    ValueError
        The temporary folder belongs to another user.
    """
    if settings.state_dir:
        return Path(settings.state_dir).expanduser()
    folder = Path(tempfile.gettempdir()) / f"fedtta-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} is another user's; set state-dir")
    return folder


class NetworkStore:
    """Named arrays by digest, `<folder>/<digest>.safetensors`.

    Parameters
    ----------
    folder : Path
        Made when needed. Clients of one machine may share it: a network has the same name for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, digest: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store a network unless it is here, and remove all but the last ones used.

        Raises
        ------
        ValueError
            The digest is no plain name, or a value is not finite.
        """
        path = self._path(digest)
        if not path.exists():
            save_arrays(path, dict(arrays), {"digest": digest})
        _use(path)
        files = sorted(self.folder.glob("*.safetensors"), key=_last_used)
        for old in files[:-NETWORKS_KEPT]:
            _remove(old)

    def load(self, digest: str) -> Arrays:
        """Return a network.

        Raises
        ------
        ValueError
            It is not here, or its file is damaged (which is then removed): the server will send it again.
        """
        path = self._path(digest)
        try:
            arrays, notes = load_arrays(path)
        except FileNotFoundError:
            raise ValueError(f"network {digest[:12]} is not here; it must be sent again") from None
        except ValueError as error:
            _remove(path)
            raise ValueError(f"{error}; it must be sent again") from error
        if notes.get("digest") != digest:
            _remove(path)
            raise ValueError(f"{path} holds network {notes.get('digest')}; it must be sent again")
        _use(path)
        return arrays

    def _path(self, digest: str) -> Path:
        return self.folder / f"{plain_name('network digest', digest)}.safetensors"


def _use(path: Path) -> None:
    """Note that a file was used; one that another client has just removed stays removed."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    """Remove a file; one that cannot be removed now is found again."""
    with contextlib.suppress(OSError):
        path.unlink()


def _last_used(path: Path) -> float:
    """Return when a file was last used; one that another client has just removed counts as old."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
