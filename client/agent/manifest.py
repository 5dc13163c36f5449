"""The manifest of a state directory: which models and snapshots it holds, and the state of each model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fedtta.client.served import REST, version_of
from fedtta.models import load_arrays

SCHEMA = 2
ONE_MODEL = 1  # schema of manifests that name one model
State = Literal["served", "shadow", "candidate", "kept", "refused"]
STATES = get_args(State)
#: States of a model that may be served next.
NEXT = ("shadow", "candidate")


class NewerSchema(ValueError):
    """The manifest was written by a newer version."""


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
        if wrong or not _is_counter(self.name):
            wrong = wrong or ["name"]
            raise ValueError(f"a snapshot: {wrong[0]} = {getattr(self, wrong[0])!r}")


@dataclass(frozen=True)
class Model:
    """A model in the manifest.

    Parameters
    ----------
    name : str
        Its folder's name, a counter. A refused model has no folder.
    digest : str
        See `Served.digest`.
    origin : str
        "<run>/<training>/<round>", or "file/<name>/0".
    state : "served", "shadow", "candidate", "kept" or "refused"
        A shadow runs beside the served model; a candidate waits for the operator's approval.
    time, served_at : float
        When it was offered, and when it was last put into service (0: never), in seconds since 1970.
    reason : str
        Why it was refused, or is no longer served.
    check : dict
        Figures of its check by name.
    """

    name: str
    digest: str
    origin: str
    state: State = "served"
    time: float = 0.0
    served_at: float = 0.0
    reason: str = ""
    check: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that no manifest of ours holds."""
        fits = {
            "name": _is_counter(self.name),
            **{name: isinstance(getattr(self, name), str) for name in ("digest", "origin", "reason")},
            "state": self.state in STATES,
            **{name: _is_number(getattr(self, name)) for name in ("time", "served_at")},
            "check": isinstance(self.check, Mapping) and all(map(_is_number, self.check.values())),
        }
        if wrong := [name for name, right in fits.items() if not right]:
            raise ValueError(f"a model: {wrong[0]} = {getattr(self, wrong[0])!r}")
        object.__setattr__(self, "check", dict(self.check))

    @property
    def version(self) -> str:
        """See `version_of`."""
        return version_of(self.origin, self.digest)


@dataclass(frozen=True)
class Manifest:
    """What a state directory holds.

    Parameters
    ----------
    models : tuple of Model
        In the order in which they were offered; at most one is served, at most one is to be served next.
    snapshots : tuple of Entry
        Oldest first.
    file : str
        SHA-256 of the model file that was last accepted.
    """

    models: tuple[Model, ...] = ()
    snapshots: tuple[Entry, ...] = ()
    file: str = ""

    @property
    def served(self) -> Model | None:
        """Return the served model."""
        return next((model for model in self.models if model.state == "served"), None)

    @property
    def candidate(self) -> Model | None:
        """Return the model that may be served next."""
        return next((model for model in self.models if model.state in NEXT), None)

    def without(self, name: str) -> Manifest:
        """Return the manifest without a model."""
        return replace(self, models=tuple(model for model in self.models if model.name != name))

    def with_model(self, model: Model) -> Manifest:
        """Return the manifest with a model in place of that of the same name, or as the newest one."""
        if not any(model.name == one.name for one in self.models):
            return replace(self, models=(*self.models, model))
        return replace(self, models=tuple(model if one.name == model.name else one for one in self.models))

    def pruned(self, models: int, snapshots: int) -> Manifest:
        """Return the manifest with at most so many models besides the next one, and so many snapshots of each.

        Those that were withdrawn go first, then the ones served longest ago. Of a withdrawn one the record remains, as
        of a refused one; there are as many records as models, the newest ones.
        """
        kept = [model for model in self.models if model.state == "kept"]
        kept.sort(key=lambda model: (not model.reason, model.served_at))
        room = models - (self.served is not None)
        gone = {model.name: model for model in kept[: max(0, len(kept) - room)]}
        left = [
            replace(model, state="refused") if model.name in gone else model
            for model in self.models
            if model.name not in gone or model.reason
        ]
        old = [model.name for model in left if model.state == "refused"][:-models]
        left = [model for model in left if model.name not in old]
        entries: set[Entry] = set()
        for model in left:
            if model.state != "refused":
                entries.update([entry for entry in self.snapshots if entry.model == model.digest][-snapshots:])
        return replace(self, models=tuple(left), snapshots=tuple(sorted(entries, key=lambda entry: int(entry.name))))

    def to_json(self) -> bytes:
        """Return the file's content."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, path: Path, models: Path) -> Manifest:
        """Read a manifest, also one of the schema with one model.

        Parameters
        ----------
        path : Path
        models : Path
            Folder of the models; the schema with one model does not say where that came from, its file does.

        Raises
        ------
        NewerSchema
            It was written by a newer version.
        FileNotFoundError, ValueError, TypeError, KeyError
            It is missing or cannot be read.
        """
        content = json.loads(path.read_bytes())
        schema = content["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise NewerSchema(f"{path}: schema {schema} is newer than this program's {SCHEMA}")
        if schema not in (ONE_MODEL, SCHEMA):
            raise ValueError(f"schema {schema!r}")
        snapshots = tuple(Entry(**entry) for entry in _objects(content, "snapshots"))
        if schema == SCHEMA:
            if not isinstance(content["file"], str):
                raise ValueError(f"file = {content['file']!r}: allowed is a text")
            return cls(tuple(Model(**model) for model in _objects(content, "models")), snapshots, content["file"])
        name, digest = str(content["model"]), str(content["digest"])
        if not name:
            return cls()
        return cls((Model(name, digest, origin_of(models / name)),), snapshots)


def _is_counter(name: object) -> bool:
    """Return whether a value is the name of a model or a snapshot."""
    return isinstance(name, str) and name.isascii() and name.isdigit()


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _objects(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the list of objects under a key; ValueError if that is something else."""
    found = content[key]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{key}: allowed is a list of objects")
    return found


def origin_of(folder: Path) -> str:
    """Return the origin in a model's files; empty if they cannot be read."""
    try:
        return str(json.loads(load_arrays(folder / REST)[1]["about"])["origin"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def rebuilt(models: Mapping[str, tuple[str, str]], snapshots: tuple[Entry, ...], time: Callable[[], float]) -> Manifest:
    """Return a manifest of intact files.

    Which models were served, when, and which one waited, is lost with the old manifest. A model that is served gets
    snapshots, so that of the newest one is served, and the others were, in the order of their newest ones. At most one
    model waits to be served: the newest one without snapshots may be it, and its trial and approval begin again. Older
    ones without were served before all others, in the order in which they were offered.

    Parameters
    ----------
    models : mapping
        Name → (digest, origin), oldest first.
    snapshots : tuple of Entry
        Oldest first.
    time : callable
        Returns seconds since 1970.
    """
    names = {digest: name for name, (digest, _) in models.items()}
    newest = {names[entry.model]: position for position, entry in enumerate(snapshots) if entry.model in names}
    without = [name for name in models if name not in newest]
    order = [*without[:-1], *sorted(newest, key=lambda name: newest[name])]
    now = time()
    served_at = {name: now + 1e-3 * number for number, name in enumerate(order, 1 - len(order))}
    states: dict[str, State] = {**dict.fromkeys(order, "kept"), **dict.fromkeys(order[-1:], "served")}
    found = tuple(
        Model(name, digest, origin, states.get(name, "shadow"), now, served_at.get(name, 0.0))
        for name, (digest, origin) in models.items()
    )
    return Manifest(found, tuple(entry for entry in snapshots if entry.model in names))
