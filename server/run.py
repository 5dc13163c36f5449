"""One run from start to end: who is there, trainings, statistics, evaluation, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from models import TwoHead, build, load_model, save_arrays, save_model
from server.checkpoints import Checkpoints, Place
from server.collaboration import Collaboration, adaptation_rounds, cells, check_collaborations, rounds_of
from server.environment import describe
from server.events import Events
from server.final import evaluation_round, statistics_round
from server.methods import STATISTICS, Training, choose, plan
from server.nodes import identify, wait_for_nodes
from server.protection import joining_rule
from server.rates import initial_rates, learn_rates, save_rates
from server.resume import require_fit
from server.rounds import Federation, to_numpy, to_record, train
from server.trainings import Phase
from server.world import World
from settings import Settings, SettingsError, assignments
from strategies import AGGREGATIONS, Broadcast, PartialFedAvg
from tta.registry import ADAPTERS


def run(
    grid: Grid,
    settings: Settings,
    folder: Path,
    events: Events,
    class_counts: list[list[int]] | None = None,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Run everything that the settings ask for; results go to `folder` and to `events`.

    Parameters
    ----------
    class_counts : list [N][K], optional
        Training samples of each class at each client, for the report; only a simulation, which holds all data, knows
        them. Clients never send label counts.
    checkpoints : Checkpoints, optional
        Where the run goes on; None: it is a new one.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit, before any training.
    RunError
        Nodes are missing, a round brought no usable reply, a test sample had been trained on, or clients no longer have
        what a resumed run needs of them.
    """
    checkpoints = checkpoints or Checkpoints(folder, settings)
    events.listeners.append(checkpoints)
    trainings = plan(settings)
    collaborations = check_collaborations(settings, trainings)
    if checkpoints.resumed is None:
        events("run", **describe(settings))
    expected = wait_for_nodes(grid, settings.clients, settings.node_timeout)
    opening = Federation(grid, {}, settings, checkpoints.run, events)
    nodes, identities = identify(grid, expected, opening.config(), settings.node_timeout, events)
    world = World.agree(identities)
    roles = [] if collaborations else world.roles  # collaborations neither train nor keep clients' test splits
    trainings = plan(settings, roles)
    if checkpoints.resumed is None:
        for note in notes(settings, trainings, collaborations, world, roles):
            events("note", text=note)
        events("plan", steps=count_steps(settings, trainings, collaborations, world))
        events("clients", class_counts=class_counts, classes=world.classes, sizes=world.sizes, roles=world.roles)
    else:
        require_fit(checkpoints.resumed, world, identities)
    spec = model_spec(settings, world)
    modules = list(initial_model(settings, spec).global_state())
    for variant in (variant for training in trainings for variant in training.variants):
        initial_rates(settings.rates_init, modules, variant)  # refused before training, not after
    by_partition = dict(zip(sorted(nodes), world.roles, strict=True))
    federation = Federation(
        grid, nodes, settings, checkpoints.run, events, by_partition, checkpoints.rounds, identities
    )
    checkpoints.begin(world)
    for position, training in enumerate(trainings):
        suffix = "" if position == 0 else f"-{training.name}"
        if training.name not in checkpoints.finished:
            checkpoints.open(training.name)
            _one_training(federation, training, world, collaborations, folder, suffix, checkpoints)
            checkpoints.finish(training.name)
    events("end", seconds=checkpoints.seconds(), status="completed")


def _one_training(
    federation: Federation,
    training: Training,
    world: World,
    collaborations: Sequence[Collaboration],
    folder: Path,
    suffix: str,
    checkpoints: Checkpoints,
) -> None:
    """Train, personalise, learn rates, evaluate and save one training; or train and run its test-time rounds.

    What `checkpoints` have of it is not done again, but for the evaluation, which is whole or not there.
    """
    federation = replace(federation, settings=training.recipe.settings(federation.settings))
    spec = model_spec(federation.settings, world)
    model = initial_model(federation.settings, spec)
    strategies = [make_strategy(phase, federation.settings) for phase in training.recipe.phases]
    initial = {name: value.numpy().copy() for name, value in model.global_state().items()}
    arrays = to_record(checkpoints.records.get("arrays", initial))
    arrays = train(federation, strategies, training, arrays, checkpoints)
    checkpoints.keep("arrays", to_numpy(arrays))
    save_trained(folder / f"model{suffix}.safetensors", model, arrays, spec)
    if collaborations:
        adaptation_rounds(federation, training, arrays, collaborations, world, checkpoints)
        return
    means = None
    if training.needs & STATISTICS:
        means = _statistics(federation, training, arrays, model, checkpoints)
        metadata = {"training": training.name, "weighting": federation.settings.statistics_weighting}
        save_arrays(folder / f"statistics{suffix}.safetensors", to_numpy(means), metadata)
    everyone = Broadcast(arrays)
    rates = {
        variant: learn_rates(federation, everyone, training.name, variant, checkpoints) for variant in training.variants
    }
    for variant, learned in rates.items():
        name = f"rates{suffix}" + ("" if variant == "all" else f"-{variant}")
        save_rates(folder / f"{name}.safetensors", learned, training.name, variant)
    evaluation_round(federation, training, arrays, means, rates, world.shifts)


def _statistics(
    federation: Federation, training: Training, arrays: ArrayRecord, model: TwoHead, checkpoints: Checkpoints
) -> ArrayRecord:
    """Return the means of the clients' statistics: those of the checkpoint, or of a statistics round."""
    if "statistics" in checkpoints.records:
        return to_record(checkpoints.records["statistics"])
    means = statistics_round(federation, training, arrays, model)
    place = Place(training.name, "statistics", round=training.recipe.rounds(federation.settings) + 1)
    checkpoints.save(place, {"statistics": to_numpy(means)})
    return means


def count_steps(
    settings: Settings, trainings: Sequence[Training], collaborations: Sequence[Collaboration], world: World
) -> int:
    """Return how many rounds of all kinds the run has, for its progress."""
    steps = 0
    for training in trainings:
        steps += training.recipe.rounds(settings)
        if collaborations:
            steps += len(cells(training, collaborations)) * rounds_of(settings, world.stream_rounds)
        else:
            steps += 1 + bool(training.needs & STATISTICS) + len(training.variants) * settings.rates_rounds
    return steps


def notes(
    settings: Settings,
    trainings: Sequence[Training],
    collaborations: Sequence[Collaboration],
    world: World,
    roles: Sequence[str],
) -> list[str]:
    """Return what a reader of the results has to know before them."""
    random = "no init: the network that is adapted is random" if collaborations and not settings.init else ""
    texts = (world.note, *left_out_notes(settings, roles), tuning_note(settings, trainings), random)
    return [text for text in texts if text]


def left_out_notes(settings: Settings, roles: Sequence[str]) -> list[str]:
    """Say which methods `all` does not stand for in this run, and what they would need: one text for each reason."""
    _, left_out = choose(settings, roles)
    return [
        f"methods = all leaves out {', '.join(labels)}: {'each' if len(labels) > 1 else 'it'} {reason}"
        for reason, labels in left_out.items()
    ]


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


def make_strategy(phase: Phase, settings: Settings) -> Strategy:
    """Make a phase's strategy, which takes every node it is shown; the round loop does the sampling.

    Raises
    ------
    SettingsError
        The aggregation has too few clients, or the phase joins a part of the network and the aggregation cannot.
    """
    everyone: dict[str, Any] = {
        "fraction_train": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
    aggregation = AGGREGATIONS[settings.aggregation]
    joining_rule(settings)  # refuses too few clients
    if not phase.partial:
        return aggregation.from_settings(settings, **everyone)
    if not aggregation.aggregates_partial:
        raise SettingsError(
            f"aggregation = {settings.aggregation!r}: allowed where all arrays are joined; {phase.rule} keeps some"
        )
    return PartialFedAvg(phase.shared, phase.kept, **everyone)


def save_trained(path: Path, model: TwoHead, arrays: ArrayRecord, spec: dict[str, Any]) -> None:
    """Write the global model; the personal heads stay on the devices."""
    model.load_global_state({name: torch.tensor(array.numpy()) for name, array in arrays.items()})
    save_model(path, model, spec)
