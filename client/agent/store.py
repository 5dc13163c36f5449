"""The agent's state directory: models by version, the last snapshots of each, and a manifest that names them.

`lock`; `manifest.json`; `models/<n>/`, see `fedtta.client.serving`; `snapshots/<counter>.safetensors`, states of an
adapter. Files are written first, then the manifest, then files that it no longer names are removed: a process killed at
any point, and a write that fails, leave the old state or the new one. At least two models and two snapshots of each are
kept, so that a damaged file leaves something to serve.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedtta.client.agent.manifest import SCHEMA, Entry, Manifest, Model, NewerSchema, State, rebuilt
from fedtta.client.agent.status import of_any_adapter
from fedtta.client.served import ServedModel
from fedtta.messages.arrays import Arrays
from fedtta.models import load_arrays, save_arrays
from fedtta.settings import SettingsError
from fedtta.settings.files import make_folder, write_atomically

__all__ = ["SCHEMA", "Lock", "NewerSchema", "StateInUse", "Store"]

LEAST = 2  # models, and snapshots of each, that are kept
UNREADABLE = "its files cannot be read"  # why a model is no longer served
FORMAT, VERSION = "fedtta-adapter-state", "1"
#: Raised by files that cannot be read.
DAMAGED = (ValueError, OSError, KeyError, TypeError)
#: Reads a model from its folder; raises one of `DAMAGED`.
Load = Callable[[Path], ServedModel]


class StateInUse(RuntimeError):
    """Another agent uses the state directory."""


class Lock:
    """A lock on a folder, held until `release` or the end of the process.

    Raises
    ------
    SettingsError
        It cannot be written.
    StateInUse
        Another process holds it; the message names folder and process.
    """

    def __init__(self, folder: Path) -> None:
        try:
            make_folder(folder, 0o700)
            self._file = (folder / "lock").open("a+")
        except OSError as error:
            raise SettingsError(
                f"state-dir = {str(folder)!r}: allowed is a folder that this user can write: {error}"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise StateInUse(f"{folder} is in use by the agent with process id {owner}") from None
        with contextlib.suppress(OSError):  # a full disk; what is written there only helps a reader
            self._file.truncate(0)
            os.write(self._file.fileno(), f"{os.getpid()}\n".encode())

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
        Snapshots to keep of each model, not fewer than `LEAST`.
    note : callable
        Called with a line of text about events such as refused files.
    models : int
        Models to keep, the served one included, not fewer than `LEAST`.
    load : callable, optional
        Reads a model from its folder; default: with torch, on the CPU.

    Raises
    ------
    SettingsError, StateInUse
        See `Lock`.
    NewerSchema
        The manifest was written by a newer version of the agent.
    """

    def __init__(
        self, folder: Path, kept: int, note: Callable[[str], None], models: int = 3, load: Load | None = None
    ) -> None:
        self.folder, self._note, self._limits = folder, note, (max(models, LEAST), max(kept, LEAST))
        self._load = load or _load_on_cpu
        self._lock = Lock(folder)
        try:
            self._manifest = self._open()
            if self._manifest.models:  # otherwise the manifest names nothing, and the files may still be of use
                self._sweep()
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def models(self) -> tuple[Model, ...]:
        """Return the models in the order in which they were offered."""
        return self._manifest.models

    @property
    def served(self) -> Model | None:
        """Return the served model."""
        return self._manifest.served

    @property
    def candidate(self) -> Model | None:
        """Return the model that may be served next."""
        return self._manifest.candidate

    @property
    def file(self) -> str:
        """Return the SHA-256 of the model file that was last accepted."""
        return self._manifest.file

    @property
    def names(self) -> list[str]:
        """Return the names of the served model's snapshots, oldest first."""
        return self.snapshots(self.served.digest) if self.served else []

    def snapshots(self, model: str) -> list[str]:
        """Return the names of a model's snapshots, oldest first; `model` is its digest."""
        return [entry.name for entry in self._manifest.snapshots if entry.model == model]

    def load_model(self, model: Model | None = None) -> ServedModel | None:
        """Return a model, by default the served one; None if there is none or (noted) it cannot be read."""
        model = model or self.served
        if model is None:
            return None
        try:
            served = self._load(self._models / model.name)
            if served.digest() != model.digest:
                raise ValueError(f"{self._models / model.name}: not the model that the manifest names")
        except DAMAGED as error:
            self._note(f"model refused: {error}")
            return None
        return served

    def add(self, served: ServedModel, state: State, check: Mapping[str, float] | None = None, file: str = "") -> Model:
        """Store a model in place of a former candidate, which stays if it was ever served; nothing changes on OSError.

        Parameters
        ----------
        state : "served", "shadow" or "candidate"
            "served" puts it into service, as `promote` does.
        check : mapping
            Figures of its check.
        file : str
            SHA-256 of the file that it comes from, if any.
        """
        digest, former = served.digest(), self._manifest.candidate
        model = Model(self._next_name(), digest, served.origin, "candidate", time.time(), check=check or {})
        manifest = self._manifest
        for one in manifest.models:
            if one.digest == digest:  # the same model, offered before; its snapshots remain
                manifest = manifest.without(one.name)
                model = replace(model, served_at=max(model.served_at, one.served_at))
            elif one == former:
                kept = manifest.with_model(replace(one, state="kept"))
                manifest = kept if one.served_at else manifest.without(one.name)
        manifest = replace(manifest.with_model(replace(model, state=state)), file=file or manifest.file)
        self._put(served, model.name, _served(manifest, model.name) if state == "served" else manifest)
        return next(one for one in self.models if one.name == model.name)

    def refit(self, served: ServedModel) -> None:
        """Store another version of a model, such as for another adapter, as the served one, and remove the former.

        That is the served model, or an older one that is in service since the served one cannot be read, which a full
        disk has kept from being written (`promote`). Nothing changes on OSError.
        """
        if self.served is None:
            self.add(served, "served")
            return
        digest = served.digest()
        old = max(
            (model for model in self.models if model.state in ("served", "kept")),
            key=lambda model: (model.digest == digest, model.origin == served.origin, model.state == "served"),
        )
        check = old.check if old.digest == digest else of_any_adapter(old.check)
        model = replace(old, name=self._next_name(), digest=digest, check=check)
        manifest = self._manifest.without(old.name).with_model(model)
        self._put(served, model.name, manifest if old == self.served else _served(manifest, model.name, UNREADABLE))

    def refuse(self, digest: str, origin: str, reason: str, check: Mapping[str, float] | None = None) -> Model:
        """Record a refused model, and remove its files if it was a candidate; nothing changes on OSError."""
        manifest, name = self._manifest, self._next_name()
        for one in manifest.models:
            if one.digest == digest and one.state not in ("served", "kept"):
                manifest, name = manifest.without(one.name), one.name if one.state == "refused" else name
                check = check or one.check
        model = Model(name, digest, origin, "refused", time.time(), reason=reason, check=check or {})
        self._commit(manifest.with_model(model))
        return model

    def mark(self, name: str, state: State, check: Mapping[str, float]) -> None:
        """Set state and figures of a model; nothing changes on OSError."""
        self._commit(self._manifest.with_model(replace(self._named(name), state=state, check=check)))

    def promote(self, name: str, reason: str = "", check: Mapping[str, float] | None = None) -> None:
        """Put a model into service; nothing changes on OSError.

        Parameters
        ----------
        reason : str
            Why the former one is no longer served; empty: it has been replaced.
        check : mapping, optional
            The model's new figures.
        """
        model = self._named(name)
        known = self._manifest.with_model(replace(model, check=model.check if check is None else check))
        self._commit(_served(known, name, reason))

    def save(self, arrays: Arrays, samples: int, model: str) -> Entry:
        """Store an adapter's state as the newest snapshot; nothing changes on OSError.

        Parameters
        ----------
        samples : int
            Samples that the adapter has seen.
        model : str
            Digest of its model, which must be the served one.
        """
        if self.served is None or model != self.served.digest:
            raise ValueError(f"{self.folder} holds another model than that of the state")
        counters = [int(path.stem) for path in self._snapshots()]
        name = f"{max([0, *counters, *(int(entry.name) for entry in self._manifest.snapshots)]) + 1:06d}"
        path = self._path(name)
        metadata = {"format": FORMAT, "version": VERSION, "model": model, "samples": str(samples)}
        try:
            save_arrays(path, arrays, metadata)
            entry = Entry(name, samples, model, _sha256(path))
            self._commit(replace(self._manifest, snapshots=(*self._manifest.snapshots, entry)))
        except OSError:
            self._sweep()
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
            There is no snapshot of that name, or it cannot be read.
        """
        names = self.snapshots(model)
        if name and name not in names:
            raise ValueError(f"no snapshot {name!r}; there are: {', '.join(names) or 'none'}")
        for entry in reversed(self._manifest.snapshots):
            if entry.model == model and name in ("", entry.name):
                try:
                    return entry, self._read(entry)
                except (ValueError, OSError) as error:
                    if name:
                        raise ValueError(f"snapshot refused: {error}") from error
                    self._note(f"snapshot refused: {error}")
        return None

    def forget_after(self, entry: Entry) -> None:
        """Remove a model's snapshots that are newer than `entry`."""
        names = self.snapshots(entry.model)
        gone = set(names[names.index(entry.name) + 1 :])
        self._commit(
            replace(self._manifest, snapshots=tuple(one for one in self._manifest.snapshots if one.name not in gone))
        )

    @property
    def _models(self) -> Path:
        return self.folder / "models"

    @property
    def _manifest_file(self) -> Path:
        return self.folder / "manifest.json"

    def _path(self, name: str) -> Path:
        return self.folder / "snapshots" / f"{name}.safetensors"

    def _named(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)

    def _next_name(self) -> str:
        names = [int(path.name) for path in self._folders()] + [int(model.name) for model in self.models]
        return str(max([0, *names]) + 1)

    def _folders(self) -> list[Path]:
        """Return the models' folders, oldest first."""
        found = [path for path in _listed(self._models) if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name))

    def _snapshots(self) -> list[Path]:
        """Return the snapshots' files, oldest first."""
        found = [path for path in _listed(self.folder / "snapshots") if re.fullmatch(r"\d+\.safetensors", path.name)]
        return sorted(found, key=lambda path: int(path.stem))

    def _read(self, entry: Entry) -> Arrays:
        path = self._path(entry.name)
        arrays, metadata = load_arrays(path)
        if _sha256(path) != entry.sha256:
            raise ValueError(f"{path}: not the file that the manifest names")
        if metadata.get("model") != entry.model:
            raise ValueError(f"{path}: state of another model")
        return arrays

    def _open(self) -> Manifest:
        """Read the manifest, or rebuild it from the files."""
        try:
            return Manifest.from_json(self._manifest_file, self._models)
        except NewerSchema:
            raise
        except FileNotFoundError:
            if not self._folders():
                return Manifest()
            self._note(f"{self._manifest_file} is missing; rebuilt from the intact files")
        except (ValueError, TypeError, KeyError) as error:
            self._note(f"{self._manifest_file} cannot be read ({error}); rebuilt from the intact files")
        return self._rebuild()

    def _rebuild(self) -> Manifest:
        """Return a manifest of all intact files, and write it; where that fails, the next change does."""
        models = {}
        for folder in self._folders():
            try:
                served = self._load(folder)
            except DAMAGED as error:
                self._note(f"model refused: {error}")
                continue
            models[folder.name] = served.digest(), served.origin
        self._manifest = rebuilt(models, self._found(), time.time)
        if models:
            try:
                self._commit(self._manifest)
            except OSError as error:
                self._note(f"{self._manifest_file} cannot be written: {error}")
        return self._manifest

    def _found(self) -> tuple[Entry, ...]:
        """Return the intact snapshots, oldest first."""
        entries = []
        for path in self._snapshots():
            try:
                _, metadata = load_arrays(path)
                entries.append(Entry(path.stem, int(metadata["samples"]), metadata["model"], _sha256(path)))
            except (ValueError, OSError, KeyError) as error:
                self._note(f"snapshot refused: {error}")
        return tuple(entries)

    def _put(self, served: ServedModel, name: str, manifest: Manifest) -> None:
        """Write a model's files, then a manifest that names it; nothing changes on OSError."""
        try:
            served.save(self._models / name)
            self._commit(manifest)
        except OSError:
            self._sweep()
            raise
        served.moved(self._models / name)

    def _commit(self, manifest: Manifest) -> None:
        """Write the manifest, then remove files that it does not name; on OSError the former one is in force."""
        manifest = manifest.pruned(*self._limits)
        try:
            write_atomically(self._manifest_file, manifest.to_json())
        except OSError:
            with contextlib.suppress(OSError):  # the new one may be there already, but not flushed
                write_atomically(self._manifest_file, self._manifest.to_json())
            raise
        self._manifest = manifest
        self._sweep()

    def _sweep(self) -> None:
        """Remove models and snapshots that no manifest names, and half-written files of a killed process.

        The manifest on the disk may differ from that in force after a write that failed; if it cannot be read, nothing
        is removed.
        """
        try:
            there = Manifest.from_json(self._manifest_file, self._models)
        except FileNotFoundError:
            there = Manifest()
        except (OSError, ValueError, TypeError, KeyError):
            return
        models = [model for model in (*self.models, *there.models) if model.state != "refused"]
        folders = [self._models / model.name for model in models]
        snapshots = (*self._manifest.snapshots, *there.snapshots)
        named = {self._path(entry.name) for entry in snapshots} | set(folders)
        unfinished = [path for path in _listed(self.folder) if path.name.startswith(".manifest.json.")]
        inside = [path for folder in folders for path in _listed(folder) if path.suffix == ".tmp"]
        for path in [*_listed(self._models), *_listed(self.folder / "snapshots"), *unfinished, *inside]:
            if path not in named:
                with contextlib.suppress(OSError):  # the next sweep tries again
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _load_on_cpu(folder: Path) -> ServedModel:
    """Return a model whose network runs in torch."""
    import torch

    from fedtta.client.serving import Served

    return Served.load(folder, torch.device("cpu"))


def _served(manifest: Manifest, name: str, reason: str = "") -> Manifest:
    """Return the manifest with another model in service, later than any before it, whatever the clock says."""
    now = max(time.time(), *(math.nextafter(model.served_at, math.inf) for model in manifest.models))
    for model in manifest.models:
        if model.name == name:
            manifest = manifest.with_model(replace(model, state="served", served_at=now, reason=""))
        elif model.state == "served":
            manifest = manifest.with_model(replace(model, state="kept", reason=reason))
    return manifest


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted; none if the folder does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
