"""Resume a run that was interrupted: choose a checkpoint, check that it fits, and roll the run folder back to it."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtta.messages.replies import Identity
from fedtta.server.checkpoints import FOLDER, TAGGED, Checkpoint, Position, checkpoint_files, read_checkpoint
from fedtta.server.events import Event, RunError
from fedtta.server.members import COMMON, member_names
from fedtta.server.report.journal import COPY, METRICS_FILE, Line, read_lines, restored
from fedtta.settings import Settings, SettingsError, keys_in
from fedtta.settings.files import cut, remove_unfinished, write_atomically

#: Settings that a resumed run may change: they decide where and how it runs, not what results.
FREE = keys_in("source", "storage", "execution", "availability", "observation")
LOST = (
    "without state-dir it is deleted with the run (in a simulation, with Flower's context): set state-dir and start a "
    "new run, or restore the client's folder"
)


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run continues from.

    Parameters
    ----------
    folder, path : Path
        The run folder and the checkpoint's file.
    checkpoint : Checkpoint
    kept : mapping
        counter → position of the usable checkpoints up to this one.
    damaged : mapping
        File → why it cannot be used; newer than this one.
    later : list of Path
        Usable ones that are given up.
    metrics : bytes
        The run's events, with what could be restored of damaged lines.
    restored : str
        What that is; empty: nothing was damaged.
    """

    folder: Path
    path: Path
    checkpoint: Checkpoint
    kept: Mapping[int, Position]
    damaged: Mapping[Path, str] = field(default_factory=dict)
    later: list[Path] = field(default_factory=list)
    metrics: bytes = b""
    restored: str = ""


def run_folder_of(resume: str) -> Path:
    """Return the run folder that the setting `resume` names, itself or by a checkpoint file in it.

    Raises
    ------
    SettingsError
        There is no such run.
    """
    path = Path(resume).expanduser()
    folder = path.parent.parent if path.is_file() and path.parent.name == FOLDER else path
    if not (folder / METRICS_FILE).is_file() and not (folder / COPY).is_file():
        raise SettingsError(f"resume = {resume!r}: allowed is the folder of a run, or a file in its {FOLDER}/")
    return folder if folder.name.strip(".") else folder.resolve()  # the run is called as its folder


def find_checkpoint(settings: Settings) -> Found:
    """Choose the checkpoint that `resume` names, or the newest usable one of its folder; no file is changed.

    Raises
    ------
    SettingsError
        There is no such run, it is complete, or other settings than `FREE` differ.
    RunError
        No checkpoint can be used; all are named with the reason.
    """
    folder = run_folder_of(settings.resume)
    metrics, repair = restored(folder)
    lines = read_lines(metrics)
    if any(line.event.get("event") == "end" and line.event.get("status") == "completed" for line in lines):
        raise SettingsError(f"resume = {settings.resume!r}: this run is complete; there is nothing to resume")
    files = checkpoint_files(folder)
    named = Path(settings.resume).expanduser()
    wanted = [counter for counter, path in files.items() if named.is_dir() or path.name == named.name]
    good: dict[int, Checkpoint] = {}
    bad: dict[Path, str] = {}
    for counter, path in files.items():
        try:
            good[counter] = _fitting(path, metrics, lines)
        except (OSError, ValueError) as error:
            bad[path] = str(error)
    usable = [counter for counter in wanted if counter in good]
    if not usable:
        reasons = "; ".join(bad[files[counter]] for counter in wanted) or "there is none; start a new run"
        raise RunError(f"resume = {settings.resume!r}: no checkpoint can be used: {reasons}")
    chosen = usable[-1]
    _require_same(good[chosen].settings, settings)
    return Found(
        folder,
        files[chosen],
        good[chosen],
        {counter: one.position for counter, one in good.items() if counter <= chosen},
        {path: reason for path, reason in bad.items() if path > files[chosen]},
        [files[counter] for counter in good if counter > chosen],
        metrics,
        repair,
    )


def roll_back(found: Found) -> str:
    """Roll the run folder back to the checkpoint, and return the name of the file with the events that came later.

    No data are lost: those events are kept in `metrics-<n>.cut.jsonl` ("" where there are none), later checkpoints as
    `<counter>.cut`, damaged ones as `<counter>.damaged`, the next time `<counter>-<n>.cut` and `<counter>-<n>.damaged`,
    and a damaged metrics file as `metrics-<n>.damaged.jsonl`. Half a file that a killed server left is removed. If it
    is interrupted, it can be repeated.
    """
    for folder in (found.folder, found.path.parent):
        remove_unfinished(folder, "*.safetensors")
    metrics, copy = found.folder / METRICS_FILE, found.folder / COPY
    if found.restored:
        if metrics.exists():
            write_atomically(unused_path(found.folder, "damaged"), metrics.read_bytes())
        write_atomically(metrics, found.metrics)
    tail, name = found.metrics[found.checkpoint.offset :], ""
    if tail:
        name = write_atomically(unused_path(found.folder, "cut"), tail).name
    for path in found.damaged:
        _put_aside(path, ".damaged")
    for path in found.later:
        _put_aside(path, ".cut")
    for file in (copy, metrics):  # the copy is never ahead
        if file.exists():
            cut(file, found.checkpoint.offset)
    return name


def _put_aside(path: Path, suffix: str) -> None:
    """Give a checkpoint another suffix; one of an earlier time, when counters were the same, stays."""
    names = itertools.chain([path.stem], (f"{path.stem}-{n}" for n in itertools.count(1)))
    path.rename(next(free for name in names if not os.path.lexists(free := path.with_name(name + suffix))))


def unused_path(folder: Path, what: str) -> Path:
    """Return the first of `metrics-<n>.<what>.jsonl` that is not there."""
    return next(path for n in itertools.count(1) if not (path := folder / f"metrics-{n}.{what}.jsonl").exists())


def earlier_events(folder: Path, offset: int | None = None) -> list[Event]:
    """Return the events of a run folder, or those in the first `offset` bytes of its metrics file.

    Raises
    ------
    ValueError
        A line is damaged, and there is no copy of it; the message names file and line.
    """
    lines = read_lines(restored(folder)[0][:offset])
    for line in lines:
        if line.fault:
            raise ValueError(f"{folder / METRICS_FILE}, line {line.number}: {line.fault}")
    return [line.event for line in lines]


def misfits(checkpoint: Checkpoint, identities: Mapping[str, Identity]) -> dict[str, str]:
    """Return why clients cannot go on from a checkpoint, by name: other data now, or private state that is lost.

    Parameters
    ----------
    identities : mapping
        Name → identity of the checkpoint's members that are there.
    """
    found = {name: _other_data(checkpoint.world, identity) for name, identity in identities.items()}
    position, members = checkpoint.position, member_names(checkpoint.world)
    key = position.part if position.stage == "cell" else position.training
    newest = position.round if position.stage in TAGGED else None
    # after "begun" and "finished" the next training starts from the beginning
    replied = {} if position.stage in ("begun", "finished") else checkpoint.replied.get(key, {})
    for partition, last in sorted(replied.items()):
        if (identity := identities.get(members[partition])) is None or found[identity.name]:
            continue
        saved = identity.saved.get(key, [])
        if max((tag for tag in saved if newest is None or tag <= newest), default=-1) < last:
            found[identity.name] = f"the private state of {key} at {position} is lost; {LOST}"
    return {name: reason for name, reason in found.items() if reason}


def _other_data(world: Mapping[str, Any], identity: Identity) -> str:
    """Return how a client's data are not those of the run; a device's own data may have got more."""
    names = (*COMMON, *(["shifts"] if identity.labelled else []), *([] if identity.own_data else ["stream_rounds"]))
    before = {name: world[name] for name in names if name in world}
    partition = member_names(world).index(identity.name)
    before["role"] = (world.get("roles") or ["both"] * (partition + 1))[partition]
    if not identity.own_data:
        before["sizes"] = world["sizes"][partition]
    now = {name: getattr(identity, name) for name in before}
    other = (f"{name} = {now[name]!r}, in the run it is {before[name]!r}" for name in now if now[name] != before[name])
    return next(other, "")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process.

    Raises
    ------
    RunError
        Another process is writing it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunError(f"{folder}: another process is writing this run") from None
    try:
        yield
    finally:
        os.close(handle)


def _fitting(path: Path, metrics: bytes, lines: Sequence[Line]) -> Checkpoint:
    """Read a checkpoint; ValueError when it is damaged or its events are not all in the metrics file."""
    checkpoint, begin = read_checkpoint(path), 0
    for line in lines:
        if line.fault and begin < checkpoint.offset:
            raise ValueError(f"{path}: {METRICS_FILE}, line {line.number}, which came before it: {line.fault}")
        begin = line.end
    if checkpoint.offset > len(metrics) or not metrics[: checkpoint.offset].endswith(b"\n"):
        raise ValueError(
            f"{path}: {METRICS_FILE} has {len(metrics)} bytes, the checkpoint was written after {checkpoint.offset}"
        )
    return checkpoint


def _require_same(before: Mapping[str, Any], settings: Settings) -> None:
    """Raise SettingsError when settings that make the result differ; both values are named."""
    now, before = settings.flat(), {**Settings().flat(), **before}  # a run of an earlier version lacks later settings
    names = [name for name in before if name not in FREE]
    differences = [
        f"{name} = {now.get(name)!r}, in the run it is {before.get(name)!r}"
        for name in names
        if now.get(name) != before.get(name) or type(now.get(name)) is not type(before.get(name))
    ]
    if differences:
        file = run_folder_of(settings.resume) / "settings.toml"
        raise SettingsError(f"resume = {settings.resume!r}: {'; '.join(differences)}; the run's are in {file}")
