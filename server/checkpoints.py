"""Checkpoints: the position of a run after a round, in one checksummed file each, of which the last few are kept.

All randomness comes from (seed, purpose, round, partition), so settings and round are its whole state.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedtta.messages.arrays import Arrays
from fedtta.models import load_arrays, save_arrays
from fedtta.server.events import Event
from fedtta.server.members import FederationInfo
from fedtta.server.report.journal import Copy
from fedtta.settings import Settings

SCHEMA = 1
FOLDER = "checkpoints"
#: Records of the round loop that is running; the next loop starts without them.
STRATEGY = "strategy"
#: Stages in which clients tag their private state with the round.
TAGGED = ("training", "statistics", "cell")

#: record → name → array.
Records = dict[str, Arrays]
Stage = Literal["begun", "training", "statistics", "rates", "cell", "finished"]


@dataclass(frozen=True)
class Position:
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
        The last round of the stage. In the stages `TAGGED` clients tag their private state with it.
    """

    training: str = ""
    stage: Stage = "begun"
    part: str = ""
    round: int = 0

    def __str__(self) -> str:
        """Return the position in words."""
        words = {"begun": "the start", "finished": f"all of {self.training}", "statistics": "the statistics"}
        what = words.get(self.stage, f"round {self.round}" + (f" of {self.stage} {self.part}" if self.part else ""))
        return what if self.stage in ("begun", "finished") else f"{what} of {self.training}"


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to continue.

    Parameters
    ----------
    position : Position
    run : str
        Identity of the run, which clients' private state belongs to.
    settings : mapping
        All of them, flat.
    world : mapping
        Fields of the run's `FederationInfo`.
    finished : tuple of str
        Trainings that are complete, with their evaluation.
    replied : mapping
        Training or cell → partition → the last round in which it replied; "<training>/rounds": of its rounds alone.
    seconds : float
        Running time so far, without pauses.
    offset : int
        Bytes of metrics.jsonl so far.
    records : mapping
        Of the current training: "arrays", "statistics", "rates.<variant>", "strategy.*".
    notes : mapping
        JSON values that belong to the position.
    """

    position: Position
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
    """Write a checkpoint atomically. Values that are not finite are kept: the run decides what they mean."""
    content = {part.name: getattr(checkpoint, part.name) for part in fields(checkpoint)}
    content["place"], content["schema"] = asdict(content.pop("position")), SCHEMA
    content["records"] = {key: list(named) for key, named in checkpoint.records.items()}
    arrays = {f"{key}/{name}": value for key, named in checkpoint.records.items() for name, value in named.items()}
    save_arrays(path, arrays, {"checkpoint": json.dumps(content, allow_nan=False)}, finite=False)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of `write_checkpoint`.

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
    content = json.loads(notes["checkpoint"])  # complete, or its checksum would not fit
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise ValueError(f"{path}: a checkpoint of schema {schema!r}; this version reads {SCHEMA}")
    replied = {
        key: {int(partition): last for partition, last in rounds.items()}
        for key, rounds in content.pop("replied").items()
    }
    # names in the order in which they were written, which some strategies rely on
    records = {key: {name: arrays[f"{key}/{name}"] for name in names} for key, names in content.pop("records").items()}
    position, finished = Position(**content.pop("place")), tuple(content.pop("finished"))
    return Checkpoint(position=position, finished=finished, replied=replied, records=records, **content)


def checkpoint_files(folder: Path) -> dict[int, Path]:
    """Return counter → file of a run folder's checkpoints, oldest first; they are not read."""
    paths = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    found = ((re.fullmatch(r"(\d{6,})\.safetensors", path.name), path) for path in paths)
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def memory_key(method: str, collaboration: str) -> str:
    """Return the key of a cell's private state on the clients; a plain file name."""
    return re.sub(r"[^\w.-]", "_", f"{method}@{collaboration}")


def _rounds_key(training: str) -> str:
    """Return the key in `Checkpoint.replied` of a training's rounds alone, without its statistics round."""
    return f"{training}/rounds"


class Checkpoints:
    """Writes a run's checkpoints and tracks which rounds of a resumed run are complete.

    It is also a listener on the run's events, to be called after the file that events are written to.

    Parameters
    ----------
    folder : Path
        The run folder.
    settings : Settings
    resumed : Checkpoint, optional
        Where the run continues.
    kept : mapping, optional
        counter → position of usable checkpoints that are in the folder already.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        resumed: Checkpoint | None = None,
        kept: Mapping[int, Position] | None = None,
    ) -> None:
        self.folder, self.settings, self.resumed = folder, settings, resumed
        self.run = uuid.uuid4().hex[:12] if resumed is None else resumed.run
        self.finished = () if resumed is None else resumed.finished
        self.replied = {} if resumed is None else {key: dict(last) for key, last in resumed.replied.items()}
        self.info: dict[str, Any] = {}
        self.position = Position()
        self.records: Records = {}
        self.notes: Mapping[str, Any] = {}
        self._kept = dict(kept or {})
        self._copy = Copy(folder)
        self._counter = max(checkpoint_files(folder), default=0)
        self._start = time.perf_counter() - (0.0 if resumed is None else resumed.seconds)

    def __call__(self, event: Event) -> None:
        """Note which clients have replied, and so have private state, in which round, and who has joined."""
        kind = event["event"]
        if kind == "joined":
            for name, values in (("names", "name"), ("sizes", "sizes"), ("roles", "role"), ("data", "data")):
                self.info[name].append(event[values])
        if kind == "round":
            self.replied.setdefault(_rounds_key(event["training"]), {}).update(
                dict.fromkeys(event["replied"], event["round"])
            )
        if kind in ("round", "statistics"):
            key = str(event["training"])
        elif kind == "adapt_round":
            key = memory_key(event["method"], event["collaboration"])
        else:
            return
        self.replied.setdefault(key, {}).update(dict.fromkeys(event["replied"], event["round"]))

    def took_part(self, training: str) -> set[int]:
        """Return the partitions that replied in a round of a training, and so have what it keeps on the clients."""
        found = self.replied.get(_rounds_key(training))
        return set(self.replied.get(training, {}) if found is None else found)  # earlier versions did not tell apart

    def summarized(self, training: str, round: int) -> set[int]:
        """Return the partitions that replied in a training's statistics round, which has this number."""
        return {partition for partition, last in self.replied.get(training, {}).items() if last == round}

    def seconds(self) -> float:
        """Return the run's time so far, without pauses."""
        return time.perf_counter() - self._start

    def begin(self, info: FederationInfo) -> None:
        """Note what the clients' data are like; a new run can be resumed from here on."""
        self.info = asdict(info)
        if self.resumed is None:
            self.save(Position(), {})

    def open(self, training: str) -> None:
        """Start or continue a training: `position`, `records` and `notes` become those of the checkpoint, if any."""
        self.position, self.records, self.notes = Position(training, "training"), {}, {}
        if self.resumed is not None and self.resumed.position.training == training:
            self.position, self.notes = self.resumed.position, self.resumed.notes
            self.records = dict(self.resumed.records)

    def finish(self, training: str) -> None:
        """Note that a training is complete, with its evaluation."""
        self.finished = (*self.finished, training)
        self.records = {}
        self.save(Position(training, "finished"), {})

    def done(self, stage: Stage, part: str = "") -> int:
        """Return how many rounds of a stage were complete when the run was resumed; 0 if it is in another stage."""
        return self.position.round if (self.position.stage, self.position.part) == (stage, part) else 0

    def trained(self, last: int) -> int:
        """Return how many of `last` training rounds were complete when the run was resumed."""
        return self.position.round if self.position.stage == "training" else last

    def keep(self, record: str, arrays: Arrays) -> None:
        """Put a record of the current training into all its later checkpoints."""
        self.records[record] = dict(arrays)

    def due(self, round: int, last: int) -> bool:
        """Return whether a checkpoint is written after this round, `last` included."""
        every = self.settings.checkpoint_every
        return every > 0 and (round % every == 0 or round == last)

    def save(self, position: Position, records: Records, notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint with these records and those of earlier stages, unless checkpoints are turned off.

        Raises
        ------
        OSError
            It could not be written; earlier ones are as before.
        """
        earlier = {key: value for key, value in self.records.items() if not key.startswith(STRATEGY)}
        self.position, self.records, self.notes = position, {**earlier, **records}, notes or {}
        if not self.settings.checkpoint_every:
            return
        offset = self._copy.update()
        self._counter += 1
        write_checkpoint(
            self.folder / FOLDER / f"{self._counter:06d}.safetensors",
            Checkpoint(
                position,
                self.run,
                self.settings.flat(),
                self.info,
                self.finished,
                self.replied,
                self.seconds(),
                offset,
                self.records,
                self.notes,
            ),
        )
        self._kept[self._counter] = position
        self._kept = dict(list(self._kept.items())[-self.settings.checkpoints_kept :])
        for counter, path in checkpoint_files(self.folder).items():
            if counter not in self._kept:
                with contextlib.suppress(OSError):  # the next save tries again
                    path.unlink()

    def rounds(self, key: str) -> list[int]:
        """Return the rounds that the server could resume from, in a training, or in a cell by its `memory_key`."""
        tagged = [one for one in self._kept.values() if one.stage in TAGGED]
        return sorted({one.round for one in tagged if (one.part or one.training) == key})
