"""Fork a run: a new run folder that continues after the training of another run, with another evaluation."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtta.server.checkpoints import FOLDER, Checkpoint, Position, checkpoint_files, read_checkpoint, write_checkpoint
from fedtta.server.events import Event
from fedtta.server.members import FederationInfo
from fedtta.server.methods import Training, plan
from fedtta.server.network import initial_model, model_spec
from fedtta.server.privacy import RELEASES, journals
from fedtta.server.report.journal import COPY, METRICS_FILE, line_of, read_lines, restored
from fedtta.server.resume import FREE, earlier_events, unused_path
from fedtta.server.run import count_steps, notes
from fedtta.server.trackers import FOLDER as TRACKERS
from fedtta.settings import Settings, SettingsError, keys_in, to_toml
from fedtta.settings.files import write_atomically

#: Settings that have no effect before the last training round is complete.
LATER = keys_in("evaluation", "rates")
#: Events about clients and the run, whatever the training; all others that name a training are its results.
OF_ANY = ("joined", "left", "rejoined", "left_alone", "resumed")
#: Fields of `FederationInfo` that follow from them: the clients report them when the fork is resumed.
LATER_INFO: dict[str, Any] = {"shifts": [], "note": ""}


def fork(source: Path, target: Path, settings: Settings) -> Settings:
    """Make a run folder that continues after the training of another run, and return the settings that resume it.

    From the statistics round on, the results equal those of a separate run of `settings`. The clients need the private
    state of `source`: `state-dir` names it, or a copy. With differential privacy the ε of the new run counts all that
    was released in `source` by now.

    Parameters
    ----------
    source : Path
        A run whose checkpoint after its last training round is kept; its other trainings, if any, are ignored. It may
        have more `rounds` than `settings`, if the checkpoint after that many is kept: a shorter training is the
        beginning of a longer one, if it has a single stage.
    target : Path
        The new run folder; an existing one is overwritten.
    settings : Settings
        Those of `source`, apart from `LATER` and `resume.FREE`; their methods share one training.

    Raises
    ------
    SettingsError
        Other settings differ, or methods need another training or several trainings.
    ValueError
        `source` has no such checkpoint, or it is damaged; damaged ones are named.
    """
    trainings = plan(settings)
    if len(trainings) != 1 or settings.collaborations:
        raise SettingsError(f"methods = {settings.methods!r}: allowed are rows of one training, without collaborations")
    found = _trained(source, trainings[0], settings)
    _require_same_training(found.settings, settings, trainings[0], source)
    name = trainings[0].name
    before = earlier_events(source, found.offset)
    earlier = [one for one in before if one["event"] in OF_ANY or one.get("training", name) == name]
    info = FederationInfo(**{**found.world, **LATER_INFO})
    events = _events(earlier, settings, trainings, info)
    content, digest = b"", ""
    for event in events:
        line, digest = line_of(event, digest)
        content += line
    _clear(target)
    write_atomically(target / "settings.toml", to_toml(settings).encode())
    world = {key: value for key, value in found.world.items() if key not in LATER_INFO}
    start = dataclasses.replace(found, settings=settings.flat(), world=world, offset=len(content), finished=())
    write_checkpoint(target / FOLDER / "000001.safetensors", start)
    if settings.differential_privacy:
        _keep_releases(source, target, earlier)
    write_atomically(target / METRICS_FILE, content)  # last: a folder without it is no run
    return settings.replace(resume=str(target))


def _clear(target: Path) -> None:
    """Remove from a folder that is overwritten what a run would go on with; of what it released nothing is forgotten.

    Trackers would take the new run for the old one, and leave out numbers of rounds that they have.
    """
    for path in (*checkpoint_files(target).values(), target / COPY):
        path.unlink(missing_ok=True)
    for folder in (target / TRACKERS, target / "tensorboard"):
        if folder.is_dir():
            shutil.rmtree(folder)


def _trained(source: Path, training: Training, settings: Settings) -> Checkpoint:
    """Return the checkpoint of a run folder after the last round of a training."""
    last = training.recipe.rounds(settings)
    reasons = [f"{source}: no checkpoint after round {last} of {training.name}"]
    for path in checkpoint_files(source).values():
        try:
            found = read_checkpoint(path)
        except (OSError, ValueError) as error:
            reasons.append(str(error))
            continue
        if found.position == Position(training.name, "training", round=last):
            return found
    raise ValueError("; ".join(reasons))


def _require_same_training(before: Mapping[str, Any], settings: Settings, training: Training, source: Path) -> None:
    now, free, before = settings.flat(), {*FREE, *LATER}, {**Settings().flat(), **before}
    if len(training.recipe.stages) == 1 and settings.rounds <= before["rounds"]:
        free.add("rounds")
    other = [key for key in now if key not in free and before.get(key) != now[key]]
    if other:
        differences = "; ".join(f"{key} = {now[key]!r}, there it is {before.get(key)!r}" for key in other)
        raise SettingsError(f"{source} was trained with other settings: {differences}")


def _events(earlier: list[Event], settings: Settings, trainings: list[Training], info: FederationInfo) -> list[Event]:
    """Return the events of a training as a run of `settings` would have written them."""
    model = initial_model(settings, model_spec(settings, info))
    texts = notes(settings, trainings, [], info, info.labelled_roles, model)
    noted = [{"event": "note", "text": text} for text in texts]
    steps = count_steps(settings, trainings, [], info)
    events: list[Event] = []
    for event in earlier:
        if event["event"] == "run":
            events += [{**event, "settings": settings.flat()}, *noted]
        elif event["event"] == "plan":
            events.append({**event, "steps": steps})
        elif event["event"] != "note":
            events.append(event)
    return events


def _keep_releases(source: Path, target: Path, earlier: Sequence[Event]) -> None:
    """Keep what clients released in a run beside its `earlier` events where the `Ledger` of a fork counts it.

    That is what came later, and what was cut off or damaged: as in `source`, a file for each of its files. What a run
    that is overwritten released is kept, too.
    """
    seen, digest = list(earlier), ""
    overwritten = [path for path in journals(target) if path.name == METRICS_FILE]
    for content in (restored(source)[0], *(path.read_bytes() for path in [*journals(source), *overwritten])):
        events = (line.event for line in read_lines(content, None) if not line.fault)
        found = [one for one in events if one["event"] in ("attempt", *RELEASES) and one not in seen]
        seen += found
        lines = b""
        for event in found:  # digests go on from file to file, as those of one journal
            line, digest = line_of(event, digest)
            lines += line
        if lines:
            write_atomically(unused_path(target, "cut"), lines)
