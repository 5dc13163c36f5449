"""Checkpoints: where a run stands after a round, in one checksummed file each, of which the last few are kept.

All randomness comes from (seed, purpose, round, partition), so the settings and the round are its whole state.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from models import load_arrays, save_arrays
from server.events import Event
from server.report import METRICS_FILE
from server.world import World
from settings import Settings

SCHEMA = 1
FOLDER = "checkpoints"
#: Records of the round loop that is going on; the next loop starts without them.
STRATEGY = "strategy"

#: record → name → array.
Records = dict[str, dict[str, NDArray[Any]]]
Stage = Literal["begun", "training", "statistics", "rates", "cell", "finished"]


@dataclass(frozen=True)
class Place:
    """How far a run has come.

    Parameters
    ----------
    training : str
        Its name; empty before the first.
    stage : str
        What was done last.
    part : str
        The variant of rates, or the cell of test-time rounds.
    round : int
        The last round of the stage. In the stages "training", "statistics" and "cell" clients tag their private state
        with it.
    """

    training: str = ""
    stage: Stage = "begun"
    part: str = ""
    round: int = 0

    def __str__(self) -> str:
        """Return words for people."""
        words = {"begun": "the start", "finished": f"all of {self.training}", "statistics": "the statistics"}
        what = words.get(self.stage, f"round {self.round}" + (f" of {self.stage} {self.part}" if self.part else ""))
        return what if self.stage in ("begun", "finished") else f"{what} of {self.training}"


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on.

    Parameters
    ----------
    place : Place
    run : str
        Identity of the run, which clients' private state belongs to.
    settings : mapping
        All of them, flat.
    world : mapping
        What the clients said of their data.
    finished : tuple of str
        Trainings that are done, with their evaluation.
    replied : mapping
        Training or cell → partition → the last round with a reply of it.
    seconds : float
        How long the run took so far, without pauses.
    offset : int
        Bytes of metrics.jsonl so far.
    records : mapping
        Of the training that is going on: "arrays", "statistics", "rates.<variant>", "strategy.*".
    notes : mapping
        JSON values that belong to the place.
    """

    place: Place
    run: str
    settings: Mapping[str, Any]
    world: Mapping[str, Any] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    replied: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    offset: int = 0
    records: Records = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, whole or not at all. Values that are not finite are kept: the run decides what they mean."""
    told = {part.name: getattr(checkpoint, part.name) for part in fields(checkpoint)}
    told["place"], told["schema"] = asdict(checkpoint.place), SCHEMA
    told["records"] = {key: list(named) for key, named in checkpoint.records.items()}
    arrays = {f"{key}/{name}": value for key, named in checkpoint.records.items() for name, value in named.items()}
    save_arrays(path, arrays, {"checkpoint": json.dumps(told, allow_nan=False)}, finite=False)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what `write_checkpoint` wrote.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is damaged, no checkpoint, or of another schema; the message names it.
    """
    arrays, notes = load_arrays(path, finite=False)
    if "checkpoint" not in notes:
        raise ValueError(f"{path}: no checkpoint")
    told = json.loads(notes["checkpoint"])  # whole, or its checksum would not fit
    if (schema := told.pop("schema", None)) != SCHEMA:
        raise ValueError(f"{path}: a checkpoint of schema {schema!r}; this version reads {SCHEMA}")
    replied = {key: {int(who): last for who, last in rounds.items()} for key, rounds in told.pop("replied").items()}
    # names in the order in which they were written, which some strategies count on
    records = {key: {name: arrays[f"{key}/{name}"] for name in names} for key, names in told.pop("records").items()}
    place, finished = Place(**told.pop("place")), tuple(told.pop("finished"))
    return Checkpoint(place=place, finished=finished, replied=replied, records=records, **told)


def checkpoint_files(folder: Path) -> dict[int, Path]:
    """Return counter → file of a run folder's checkpoints, oldest first; they are not read."""
    paths = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    found = ((re.fullmatch(r"(\d{6,})\.safetensors", path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def memory_key(method: str, collaboration: str) -> str:
    """Return what a cell's memory is called on the clients; a plain file name."""
    return re.sub(r"[^\w.-]", "_", f"{method}@{collaboration}")


class Checkpoints:
    """Writes a run's checkpoints and says where it goes on; also a listener on the run's events.

    It has to hear an event after the file that events are written to.

    Parameters
    ----------
    folder : Path
        The run folder.
    settings : Settings
    resumed : Checkpoint, optional
        What the run goes on from.
    kept : mapping, optional
        counter → place of good checkpoints that are in the folder already.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        resumed: Checkpoint | None = None,
        kept: Mapping[int, Place] | None = None,
    ) -> None:
        self.folder, self.settings, self.resumed = folder, settings, resumed
        self.run = uuid.uuid4().hex[:12] if resumed is None else resumed.run
        self.finished = () if resumed is None else resumed.finished
        self.replied = {} if resumed is None else {key: dict(last) for key, last in resumed.replied.items()}
        self.world: dict[str, Any] = {}
        self.place = Place()
        self.records: Records = {}
        self.notes: Mapping[str, Any] = {}
        self._kept = dict(kept or {})
        self._counter = max(checkpoint_files(folder), default=0)
        self._start = time.perf_counter() - (0.0 if resumed is None else resumed.seconds)

    def __call__(self, event: Event) -> None:
        """Note who has replied, and so has private state, in which round."""
        kind = event["event"]
        if kind in ("round", "statistics"):
            key = str(event["training"])
        elif kind == "adapt_round":
            key = memory_key(event["method"], event["collaboration"])
        else:
            return
        self.replied.setdefault(key, {}).update(dict.fromkeys(event["replied"], event["round"]))

    def seconds(self) -> float:
        """Return how long the run took so far, without pauses."""
        return time.perf_counter() - self._start

    def begin(self, world: World) -> None:
        """Note what the clients are; a new run can be resumed from here on."""
        self.world = asdict(world)
        if self.resumed is None:
            self.save(Place(), {})

    def open(self, training: str) -> None:
        """Start a training, or go on with it: `place`, `records` and `notes` are then those of the checkpoint."""
        self.place, self.records, self.notes = Place(training, "training"), {}, {}
        if self.resumed is not None and self.resumed.place.training == training:
            self.place, self.records, self.notes = self.resumed.place, dict(self.resumed.records), self.resumed.notes

    def finish(self, training: str) -> None:
        """Note that a training is done, with its evaluation."""
        self.finished = (*self.finished, training)
        self.records = {}
        self.save(Place(training, "finished"), {})

    def done(self, stage: Stage, part: str = "") -> int:
        """Return how many rounds of a stage the run had behind it when it was resumed; 0 if it is not in that stage."""
        return self.place.round if (self.place.stage, self.place.part) == (stage, part) else 0

    def trained(self, last: int) -> int:
        """Return how many of `last` training rounds the run had behind it when it was resumed."""
        return self.place.round if self.place.stage == "training" else last

    def keep(self, record: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put a record of the training that is going on into all its later checkpoints."""
        self.records[record] = dict(arrays)

    def due(self, round: int, last: int) -> bool:
        """Tell whether a checkpoint is written after this round, the `last` one included."""
        every = self.settings.checkpoint_every
        return every > 0 and (round % every == 0 or round == last)

    def save(self, place: Place, records: Records, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint with these records beside those of earlier stages, unless none are wanted."""
        earlier = {key: value for key, value in self.records.items() if not key.startswith(STRATEGY)}
        self.place, self.records, self.notes = place, {**earlier, **records}, notes or {}
        if not self.settings.checkpoint_every:
            return
        metrics = self.folder / METRICS_FILE
        self._counter += 1
        write_checkpoint(
            self.folder / FOLDER / f"{self._counter:06d}.safetensors",
            Checkpoint(
                place,
                self.run,
                self.settings.flat(),
                self.world,
                self.finished,
                self.replied,
                self.seconds(),
                metrics.stat().st_size if metrics.exists() else 0,
                self.records,
                self.notes,
            ),
        )
        self._kept[self._counter] = place
        self._kept = dict(list(self._kept.items())[-self.settings.checkpoints_kept :])
        for counter, path in checkpoint_files(self.folder).items():
            if counter not in self._kept:
                path.unlink()

    def rounds(self, key: str) -> list[int]:
        """Return the rounds that the server could go back to in a training, or in a cell by its `memory_key`."""
        tagged = [place for place in self._kept.values() if place.stage in ("training", "statistics", "cell")]
        return sorted({place.round for place in tagged if (place.part or place.training) == key})
