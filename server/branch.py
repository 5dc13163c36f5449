"""Other tests of a training that is done: a run folder that stands where another run's training ended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import write_atomically
from server.checkpoints import FOLDER, Checkpoint, checkpoint_files, read_checkpoint, write_checkpoint
from server.events import Event
from server.methods import Training, plan
from server.report import METRICS_FILE
from server.resume import FREE, earlier_events
from server.run import count_steps, notes
from server.world import World
from settings import Settings, SettingsError, to_toml

#: Settings that play no part before the last training round.
TESTS = (
    "methods", "shifts", "severity", "tune-samples", "adapt-batch-size", "eval-batch-size", "finetune-epochs",
    "statistics-weighting", "leave-one-out", "rates-rounds", "rates-clients", "rates-epochs", "rates-batch-size",
    "rates-learning-rate", "rates-init",
)  # fmt: skip
#: What clients say of themselves that follows from `TESTS`.
_TESTED = ("shifts", "note")


def branch(source: Path, target: Path, settings: Settings) -> Settings:
    """Make a run folder that goes on from the end of another run's training, and return the settings that do so.

    What follows, from the statistics round on, is then what a run of `settings` alone would have done. The clients
    need the private state that they had: `state-dir` holds that of `source`, or a copy.

    Parameters
    ----------
    source : Path
        A run whose checkpoint after its last training round is kept; its other trainings, if any, play no part. It may
        have more `rounds` than `settings`, if the checkpoint after so many is kept: a shorter training is the longer
        one's beginning, where it has one phase.
    target : Path
        The new run folder; what is in its place is written over.
    settings : Settings
        Those of `source`, but for `TESTS` and for places and pace; their methods share the one training.

    Raises
    ------
    SettingsError
        Other settings differ, or methods need another training or several.
    ValueError
        `source` has no such checkpoint, or it is damaged.
    """
    trainings = plan(settings)
    if len(trainings) != 1 or settings.collaborations:
        raise SettingsError(f"methods = {settings.methods!r}: allowed are rows of one training, tested once")
    found = _trained(source, trainings[0], settings)
    _require_same_training(found.settings, settings, trainings[0], source)
    events = _events(earlier_events(source, found.offset), settings, trainings, World(**found.world))
    content = "".join(json.dumps(event) + "\n" for event in events).encode()
    write_atomically(target / "settings.toml", to_toml(settings).encode())
    world = {key: value for key, value in found.world.items() if key not in _TESTED}
    stand = dataclasses.replace(found, settings=settings.flat(), world=world, offset=len(content), finished=())
    write_checkpoint(target / FOLDER / "000001.safetensors", stand)
    write_atomically(target / METRICS_FILE, content)  # last: a folder without it is no run
    return settings.replace(resume=str(target))


def _trained(source: Path, training: Training, settings: Settings) -> Checkpoint:
    """Return the checkpoint of a run folder after the last round of a training."""
    last = training.recipe.rounds(settings)
    for path in checkpoint_files(source).values():
        found = read_checkpoint(path)
        if (found.place.training, found.place.stage, found.place.round) == (training.name, "training", last):
            return found
    raise ValueError(f"{source}: no checkpoint after round {last} of {training.name}")


def _require_same_training(before: Mapping[str, Any], settings: Settings, training: Training, source: Path) -> None:
    now, free = settings.flat(), {*FREE, *TESTS}
    if len(training.recipe.phases) == 1 and settings.rounds <= before["rounds"]:
        free.add("rounds")
    other = [key for key in now if key not in free and before.get(key) != now[key]]
    if other:
        differences = "; ".join(f"{key} = {now[key]!r}, there it is {before.get(key)!r}" for key in other)
        raise SettingsError(f"{source} was trained with other settings: {differences}")


def _events(earlier: list[Event], settings: Settings, trainings: list[Training], world: World) -> list[Event]:
    """Return a training's events as a run of `settings` would have written them."""
    said = [{"event": "note", "text": text} for text in notes(settings, trainings, [], world, world.roles)]
    steps = count_steps(settings, trainings, [], world)
    events: list[Event] = []
    for event in earlier:
        if event["event"] == "run":
            events += [{**event, "settings": settings.flat()}, *said]
        elif event["event"] == "plan":
            events.append({**event, "steps": steps})
        elif event["event"] != "note":
            events.append(event)
    return events
