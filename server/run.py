"""One run from start to end: who is there, trainings, statistics, evaluation, files."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from models import TwoHead, build, load_model, save_arrays, save_model
from server.environment import describe
from server.errors import RunError
from server.events import Events
from server.final import evaluation_round, statistics_round
from server.methods import Training, plan
from server.nodes import identify, wait_for_nodes
from server.rounds import Federation, to_numpy, to_record, train
from settings import Settings, SettingsError, assignments
from strategies import STRATEGIES, StatisticsFedAvg
from tta.registry import ADAPTERS

#: What all nodes must agree on, from `query.identify`.
COMMON = ("num-partitions", "classes", "channels", "mean", "std", "shifts", "note")


@dataclass(frozen=True)
class World:
    """What the server learned of the clients' data: sizes and kinds, no label counts."""

    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    shifts: list[str]
    note: str
    sizes: list[list[int]]

    @classmethod
    def agree(cls, identities: Mapping[int, Mapping[str, Any]]) -> World:
        """Join what the nodes say; RunError when they do not agree."""
        first = identities[min(identities)]
        for partition, identity in sorted(identities.items()):
            for key in COMMON:
                if identity[key] != first[key]:
                    raise RunError(f"client {partition}: {key} = {identity[key]!r}, others have {first[key]!r}")
        return cls(
            list(first["classes"]),
            int(first["channels"]),
            list(first["mean"]),
            list(first["std"]),
            list(first["shifts"]),
            str(first["note"]),
            [list(identities[partition]["sizes"]) for partition in sorted(identities)],
        )


def run(
    grid: Grid, settings: Settings, folder: Path, events: Events, class_counts: list[list[int]] | None = None
) -> None:
    """Run everything that the settings ask for; results go to `folder` and to `events`.

    Parameters
    ----------
    class_counts : list [N][K], optional
        Training samples of each class at each client, for the report; only a simulation, which holds all data, knows
        them. Clients never send label counts.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit, before any training.
    RunError
        Nodes are missing, a round brought no usable reply, or a test sample had been trained on.
    """
    start = time.perf_counter()
    trainings = plan(settings)
    events("run", **describe(settings))
    identity = uuid.uuid4().hex[:12]
    expected = wait_for_nodes(grid, settings.clients, settings.node_timeout)
    opening = Federation(grid, {}, settings, identity, events)
    nodes, identities = identify(grid, expected, opening.config("", ""), settings.node_timeout, events)
    world = World.agree(identities)
    for note in filter(None, (world.note, tuning_note(settings, trainings))):
        events("note", text=note)
    events("clients", class_counts=class_counts, classes=world.classes, sizes=world.sizes)
    spec = model_spec(settings, world)
    federation = Federation(grid, nodes, settings, identity, events)
    for position, training in enumerate(trainings):
        suffix = "" if position == 0 else f"-{training.objective}"
        _one_training(federation, training, spec, world.shifts, folder, suffix)
    events("end", seconds=time.perf_counter() - start, status="completed")


def _one_training(
    federation: Federation,
    training: Training,
    spec: dict[str, Any],
    shifts: Sequence[str],
    folder: Path,
    suffix: str,
) -> None:
    """Train, personalise, evaluate and save one training."""
    model = initial_model(federation.settings, spec)
    strategy = make_strategy(training.strategy, federation.settings)
    arrays = to_record({name: value.numpy() for name, value in model.global_state().items()})
    arrays = train(federation, strategy, training.objective, arrays, training.objective)
    save_trained(folder / f"model{suffix}.safetensors", model, arrays, spec)
    means = statistics_round(federation, strategy, training, arrays, model.feature_dim)
    metadata = {"training": training.objective, "weighting": federation.settings.statistics_weighting}
    save_arrays(folder / f"statistics{suffix}.safetensors", to_numpy(means), metadata)
    evaluation_round(federation, training, arrays, means, shifts)


def tuning_note(settings: Settings, trainings: Sequence[Training]) -> str:
    """Say which rows are measured on fewer samples than the others; empty when none is."""
    rows = [row for training in trainings for row in training.rows]
    tuning = [row.label for row in rows if "gradients" in ADAPTERS[row.method.adapter].needs]
    if not (settings.tune_samples and tuning):
        return ""
    return f"{', '.join(tuning)}: measured on the first {settings.tune_samples} samples of each stream and client"


def model_spec(settings: Settings, world: World) -> dict[str, Any]:
    """Return the arguments that build the run's network, as `models.build` takes them."""
    return {
        "name": settings.model,
        "num_classes": len(world.classes),
        "in_channels": world.channels,
        "image_size": settings.image_size,
        "mean": world.mean,
        "std": world.std,
        **assignments(settings.model_options, "model-options"),
    }


def initial_model(settings: Settings, spec: dict[str, Any]) -> TwoHead:
    """Build the network that training starts from: random from the seed, or the file `init`.

    Raises
    ------
    SettingsError
        An option does not fit, or the file's network is another one.
    """
    try:
        model = build(**{"seed": settings.seed, **spec})
        if settings.init:
            other, _ = load_model(settings.init)
            model.load_global_state(other.global_state())
    except (ValueError, OSError) as error:
        name = f"init = {settings.init!r}" if settings.init else f"model = {settings.model!r}"
        raise SettingsError(f"{name}: {error}") from error
    return model


def make_strategy(name: str, settings: Settings) -> Strategy:
    """Make a strategy that takes every node it is shown; the round loop does the sampling."""
    everyone: dict[str, Any] = {
        "fraction_train": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    if issubclass(STRATEGIES[name], StatisticsFedAvg):
        everyone["weighting"] = settings.statistics_weighting
    return STRATEGIES[name](**everyone)


def save_trained(path: Path, model: TwoHead, arrays: ArrayRecord, spec: dict[str, Any]) -> None:
    """Write the global model; the personal heads stay on the devices."""
    model.load_global_state(arrays.to_torch_state_dict())
    save_model(path, model, spec)
