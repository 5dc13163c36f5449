"""A device's own data in a run: scanned when the run begins, and the same samples and splits until it ends.

What the run uses is kept in the device's private state, so that a process that starts later has the same data, whatever
files have come since.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.client.resources import preprocessing_of
from fedtta.client.state import PrivateState, private_folder
from fedtta.data import Federation, Images, Role, Split, client_number
from fedtta.data.sources import OwnData, own_data
from fedtta.settings import Settings, SettingsError, from_config
from fedtta.settings.files import make_folder

#: Key of the entry of the private state that says which samples a run uses.
PINNED = "own-data"
PARTS = ("train", "validation", "test")
#: What `fedtta.data.DATASETS` calls a user's own images: flips are allowed, mean and standard deviation are 0.5.
OWN_IMAGES = "folder"
_LOCKS: dict[Path, threading.Lock] = {}  # by index file


@dataclass(frozen=True)
class Own:
    """A device's own data in one run.

    Parameters
    ----------
    data : OwnData
        The scan: counts and notes.
    federation : Federation
        The samples in use, as a federation of this device alone.
    notes : tuple of str
        For the run's report.
    """

    data: OwnData
    federation: Federation
    notes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of `fedtta.messages.replies.Identity` that describe a device's own data."""
        return {
            "own_data": True,
            "labelled": self.data.labelled,
            "samples": self.data.samples,
            "skipped": len(self.data.skipped),
            "classes_present": self.data.classes_present,
            "notes": list(self.notes),
        }


@lru_cache(maxsize=8)
def settings_alone(settings: Settings) -> Settings:
    """Return a run's settings for a device with data of its own: those that divide a data set have their defaults.

    Raises
    ------
    SettingsError
        The run has no class names, or redraws splits in every round.
    """
    if not settings.classes:
        raise SettingsError("classes = '': data of a device's own need the run's class names, e.g. 'covid,normal'")
    if settings.split == "published":
        raise SettingsError("split = 'published': allowed with a divided data set only, not with a device's own data")
    return from_config({**settings.flat(), **Settings().select("division"), "dataset": OWN_IMAGES})


@lru_cache(maxsize=8)
def ignored(settings: Settings) -> str:
    """Return a note on settings of a divided data set that are given and play no part; empty if there is none."""
    plain = Settings().select("division")
    words = [f"{key} = {value}" for key, value in settings.select("division").items() if value != plain[key]]
    return f"data of its own: {', '.join(words)} of the run plays no part" if words else ""


def index_path(folder: Path, name: str) -> Path:
    """Return the file in a device's state folder that remembers the scans of its data, in a run and outside."""
    return folder / "data" / f"{name}.json"


@contextlib.contextmanager
def scanning(index: Path) -> Iterator[Path]:
    """Make the folder of an index file; scans with the same file run one after the other, as each adds to it."""
    make_folder(index.parent, 0o700)
    with _LOCKS.setdefault(index, threading.Lock()):
        yield index


def scan(
    source: str,
    name: str,
    role: str | None,
    class_map: Mapping[str, str],
    settings: Settings,
    index: Path | None = None,
) -> OwnData:
    """Scan a device's own data as they are now.

    Parameters
    ----------
    index : Path, optional
        The index file; default: `index_path` in the private folder.

    Raises
    ------
    SettingsError
        As `settings_alone`.
    ValueError
        As `fedtta.data.sources.own_data`.
    """
    with scanning(index or index_path(private_folder(settings), name)) as file:
        return own_data(
            source,
            classes=tuple(one.strip() for one in settings.classes.split(",")),
            class_map=class_map,
            preprocessing=preprocessing_of(settings),
            max_skipped=settings.max_skipped,
            max_megapixels=settings.max_megapixels,
            cache_mb=settings.image_cache_mb,
            role=role_of(role),
            index_file=file,
        )


def own_of_run(
    source: str,
    name: str,
    role: str | None,
    class_map: Mapping[str, str],
    settings: Settings,
    run: str,
    state: PrivateState,
    index: Path | None = None,
) -> Own:
    """Return a device's own data in a run; they are scanned once for each run and process.

    Raises
    ------
    SettingsError, ValueError
        As `scan`; or samples that the run uses are gone.
    """
    key = (source, name, role, tuple(sorted(class_map.items())), tuple(settings.flat().items()))
    kept = _of_run(run)
    if key not in kept:
        kept[key] = _pinned(scan(source, name, role, class_map, settings, index), name, settings, state)
    return kept[key]


@lru_cache(maxsize=1)
def _of_run(run: str) -> dict[tuple[object, ...], Own]:
    """Return what this process has scanned for a run; another run scans again."""
    return {}


def _pinned(data: OwnData, name: str, settings: Settings, state: PrivateState) -> Own:
    """Return the samples that the run began with, which are those of the scan if it begins now."""
    entry = state.load(PINNED, 0)
    if entry is None:
        splits = [""] * data.used
        for part in PARTS:
            for i in getattr(data.split, part):
                splits[i] = part
        rows = list(zip(data.names, data.identities, splits, strict=True))
        state.save(PINNED, 0, {"json": np.frombuffer(json.dumps(rows).encode(), np.uint8)})
    else:
        rows = [tuple(row) for row in json.loads(entry["json"].tobytes())]
    where = {(one, identity): i for i, (one, identity) in enumerate(zip(data.names, data.identities, strict=True))}
    if gone := [one for one, identity, _ in rows if (one, identity) not in where]:
        raise ValueError(
            f"{len(gone)} of {len(rows)} samples that the run began with are gone or have changed; a run needs its "
            "data until it ends"
        )
    chosen = np.array([where[one, identity] for one, identity, _ in rows], np.int64)
    split = Split(*(np.flatnonzero([part == row[2] for row in rows]) for part in PARTS))
    images = data.images if len(chosen) == data.used else _chosen(data.images, chosen)
    content = np.unique([identity for _, identity, _ in rows], return_inverse=True)[1].astype(np.int64)
    federation = Federation.of_device(images, split, data.role, client_number(name), settings.seed, content)
    return Own(data, federation, data.notes)


class _Chosen:
    """Some images of array-like pixels, still read when they are indexed; see `fedtta.data.images.Pixels`."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, images: Images, chosen: np.ndarray) -> None:
        self._pixels, self._chosen = images.pixels, chosen
        self.shape = (len(chosen), *images.shape)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any, /) -> np.ndarray:
        return self._pixels[self._chosen[index]]


def _chosen(images: Images, chosen: np.ndarray) -> Images:
    return replace(images, pixels=_Chosen(images, chosen), labels=images.labels[chosen])


def role_of(role: str | None) -> Role | None:
    """Return a role that is given, None for none; SettingsError if there is no such role."""
    roles: tuple[Role, ...] = ("both", "source", "target")
    for allowed in roles:
        if role == allowed:
            return allowed
    if role:
        raise SettingsError(f"role = {role!r}: allowed are both, source, target")
    return None
