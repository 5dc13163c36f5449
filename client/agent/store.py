"""The agent's state directory: a model, the last snapshots, and a manifest that names them.

`lock`; `manifest.json`; `models/<n>/`, see `fedtta.client.serving`; `snapshots/<counter>.safetensors`, states of an
adapter. Files are written first, then the manifest, then files that it no longer names are removed: a process killed at
any point leaves the old state or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fedtta.client.serving import Served
from fedtta.messages.arrays import Arrays
from fedtta.models import load_arrays, save_arrays, write_atomically

SCHEMA = 1
FORMAT = "fedtta-adapter-state"


class StateInUse(RuntimeError):
    """Another agent uses the state directory."""


@dataclass(frozen=True)
class Entry:
    """A snapshot in the manifest.

    Parameters
    ----------
    name : str
        The file's name without its ending, a counter.
    samples : int
        Samples that the adapter had seen.
    model : str
        Digest of its model.
    sha256 : str
        Of the file.
    """

    name: str
    samples: int
    model: str
    sha256: str

    def __post_init__(self) -> None:
        """Refuse values that no manifest of ours holds."""
        wrong = [f.name for f in fields(self) if type(getattr(self, f.name)).__name__ != f.type]
        if wrong or not self.name.isdigit():
            raise ValueError(f"a snapshot's {wrong or ['name']} cannot be read")


class Lock:
    """A lock on a folder, held until `release` or the end of the process.

    Raises
    ------
    StateInUse
        Another process holds it; the message names folder and process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise StateInUse(f"{folder} is in use by the agent with process id {owner}") from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Release the folder."""
        self._file.close()


class Store:
    """The files of a state directory, and its lock.

    Parameters
    ----------
    folder : Path
        Made when needed, for this user alone.
    kept : int
        Snapshots to keep, at least 1.
    note : callable
        Called with a line of text about events such as refused files.

    Raises
    ------
    StateInUse
        See `Lock`.
    ValueError
        The manifest was written by a newer version of the agent.
    """

    def __init__(self, folder: Path, kept: int, note: Callable[[str], None]) -> None:
        self.folder, self.kept, self._note = folder, kept, note
        self._lock = Lock(folder)
        try:
            self._model, self._digest, self._entries = self._open()
            if self._model:  # without a model the manifest names nothing, and the files may still be of use
                self._sweep()
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def names(self) -> list[str]:
        """Return the snapshots' names, oldest first."""
        return [entry.name for entry in self._entries]

    def load_model(self, device: torch.device) -> Served | None:
        """Return the model; None if there is none or (noted) it cannot be read."""
        if not self._model:
            return None
        try:
            served = Served.load(self._models / self._model, device)
            if served.digest() != self._digest:
                raise ValueError(f"{self._models / self._model}: not the model that the manifest names")
        except (ValueError, OSError, KeyError, TypeError) as error:
            self._note(f"model refused: {error}")
            return None
        return served

    def save_model(self, served: Served) -> None:
        """Store a model, and remove the old one with its snapshots; nothing changes on OSError."""
        numbers = [int(path.name) for path in self._folders()]
        name = str(max([int(self._model or 0), *numbers]) + 1)
        try:
            served.save(self._models / name)
            self._commit(name, served.digest(), [])
        except OSError:
            shutil.rmtree(self._models / name, ignore_errors=True)
            raise

    def save(self, arrays: Arrays, samples: int, model: str) -> Entry:
        """Store an adapter's state as the newest snapshot; nothing changes on OSError.

        Parameters
        ----------
        samples : int
            Samples that the adapter has seen.
        model : str
            Digest of its model, which must be the stored one.
        """
        if model != self._digest:
            raise ValueError(f"{self.folder} holds another model than that of the state")
        name = f"{max([0, *map(int, self.names)]) + 1:06d}"
        path = self._path(name)
        metadata = {"format": FORMAT, "version": str(SCHEMA), "model": model, "samples": str(samples)}
        try:
            save_arrays(path, arrays, metadata)
            entry = Entry(name, samples, model, _sha256(path))
            self._commit(self._model, self._digest, [*self._entries, entry][-self.kept :])
        except OSError:
            with contextlib.suppress(OSError):  # the disk may be gone, and the manifest does not name the file
                path.unlink(missing_ok=True)
            raise
        return entry

    def load(self, model: str, name: str = "") -> tuple[Entry, Arrays] | None:
        """Return a snapshot of a model.

        Parameters
        ----------
        model : str
            Digest.
        name : str
            Empty: the newest readable one (unreadable ones are noted), None if there is none.

        Raises
        ------
        ValueError
            There is no snapshot of that name, it cannot be read, or it is a state of another model.
        """
        if name and name not in self.names:
            raise ValueError(f"no snapshot {name!r}; there are: {', '.join(self.names) or 'none'}")
        for entry in reversed(self._entries):
            if name in ("", entry.name):
                try:
                    return entry, self._read(entry, model)
                except (ValueError, OSError) as error:
                    if name:
                        raise ValueError(f"snapshot refused: {error}") from error
                    self._note(f"snapshot refused: {error}")
        return None

    def forget_after(self, name: str) -> None:
        """Remove the snapshots that are newer than `name`."""
        self._commit(self._model, self._digest, self._entries[: self.names.index(name) + 1])

    @property
    def _models(self) -> Path:
        return self.folder / "models"

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def _path(self, name: str) -> Path:
        return self.folder / "snapshots" / f"{name}.safetensors"

    def _folders(self) -> list[Path]:
        """Return the models' folders, oldest first."""
        found = [path for path in _listed(self._models) if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name))

    def _read(self, entry: Entry, model: str) -> Arrays:
        path = self._path(entry.name)
        arrays, metadata = load_arrays(path)
        if _sha256(path) != entry.sha256:
            raise ValueError(f"{path}: not the file that the manifest names")
        if model not in (entry.model, "") or metadata.get("model") != entry.model:
            raise ValueError(f"{path}: state of another model")
        return arrays

    def _open(self) -> tuple[str, str, list[Entry]]:
        """Read the manifest, or rebuild it from the files."""
        try:
            content = json.loads(self._manifest.read_bytes())
            schema = content["schema"]
            if isinstance(schema, int) and schema > SCHEMA:
                raise NewerSchema(f"{self._manifest}: schema {schema} is newer than this program's {SCHEMA}")
            if schema != SCHEMA:
                raise ValueError(f"schema {schema!r}")
            entries = [Entry(**entry) for entry in content["snapshots"]]
            return str(content["model"]), str(content["digest"]), entries
        except NewerSchema:
            raise
        except FileNotFoundError:
            if not self._folders():
                return "", "", []
            self._note(f"{self._manifest} is missing; rebuilt from the intact files")
        except (ValueError, TypeError, KeyError) as error:
            self._note(f"{self._manifest} cannot be read ({error}); rebuilt from the intact files")
        return self._rebuild()

    def _rebuild(self) -> tuple[str, str, list[Entry]]:
        """Write and return a manifest of all intact files."""
        for folder in reversed(self._folders()):
            try:
                digest = Served.load(folder, torch.device("cpu")).digest()
            except (ValueError, OSError, KeyError, TypeError) as error:
                self._note(f"model refused: {error}")
                continue
            self._commit(folder.name, digest, self._found(digest))
            return self._model, self._digest, self._entries
        return "", "", []

    def _found(self, model: str) -> list[Entry]:
        """Return the newest intact snapshots of a model."""
        entries = []
        for path in _listed(self.folder / "snapshots"):
            if path.suffix != ".safetensors" or not path.stem.isdigit():
                continue
            try:
                _, metadata = load_arrays(path)
                entry = Entry(path.stem, int(metadata["samples"]), metadata["model"], _sha256(path))
            except (ValueError, OSError, KeyError) as error:
                self._note(f"snapshot refused: {error}")
                continue
            entries.extend([entry] if entry.model == model else [])
        return entries[-self.kept :]

    def _commit(self, model: str, digest: str, entries: list[Entry]) -> None:
        """Write the manifest, then remove files that it does not name."""
        listed: list[dict[str, Any]] = [asdict(entry) for entry in entries]
        content = {"schema": SCHEMA, "model": model, "digest": digest, "snapshots": listed}
        write_atomically(self._manifest, json.dumps(content, indent=1).encode())
        self._model, self._digest, self._entries = model, digest, entries
        self._sweep()

    def _sweep(self) -> None:
        """Remove models and snapshots that the manifest does not name, and half-written files of a killed process."""
        named = {self._path(entry.name) for entry in self._entries} | {self._models / (self._model or "none")}
        unfinished = [path for path in _listed(self.folder) if path.name.startswith(".manifest.json.")]
        inside = [path for path in _listed(self._models / self._model) if path.suffix == ".tmp"] if self._model else []
        for path in [*_listed(self._models), *_listed(self.folder / "snapshots"), *unfinished, *inside]:
            if path not in named:
                with contextlib.suppress(OSError):  # the next sweep tries again
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


class NewerSchema(ValueError):
    """The manifest was written by a newer version."""


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted; none if the folder does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
