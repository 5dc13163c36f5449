"""One run from start to end: nodes, trainings, statistics, rates, evaluation, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from fedtta.messages.arrays import Arrays, channels_last
from fedtta.messages.flower import held_record
from fedtta.messages.replies import Identity
from fedtta.messages.requests import Identify, Observe
from fedtta.messages.transport import Transport
from fedtta.models import TwoHead, save_arrays
from fedtta.models.libraries import is_external
from fedtta.server.adaptation import (
    Collaboration,
    adaptation_rounds,
    cells,
    check_collaborations,
    check_streams,
    rounds_of,
)
from fedtta.server.aggregation import make_strategy
from fedtta.server.checkpoints import Checkpoints, Position
from fedtta.server.environment import describe
from fedtta.server.evaluation import evaluation_round, statistics_round
from fedtta.server.events import Events, RunError
from fedtta.server.members import FederationInfo, known_members, member_names
from fedtta.server.methods import STATISTICS, Training, left_out_notes, plan, tuning_note
from fedtta.server.network import initial_model, model_spec, save_trained, with_stated_normalization
from fedtta.server.nodes import Nodes, Wanted, grouped
from fedtta.server.observation import Observation, patient
from fedtta.server.privacy import Ledger, spent_note, spoilers
from fedtta.server.rates import initial_rates, learn_rates, save_rates
from fedtta.server.resume import misfits
from fedtta.server.rounds import Federation
from fedtta.server.secure import SecureAggregation
from fedtta.server.training import train
from fedtta.settings import Settings, SettingsError, assignments, is_number
from fedtta.strategies import Broadcast
from fedtta.tta.atp import modules
from fedtta.tta.trial import check_options

#: With fewer test samples than these, a run says that a client's accuracy means little.
FEW_TESTED = 10


def run(
    transport: Transport,
    settings: Settings,
    folder: Path,
    events: Events,
    class_counts: list[list[int]] | None = None,
    checkpoints: Checkpoints | None = None,
    bundle: str | None = None,
) -> None:
    """Run everything that the settings ask for; results go to `folder` and to `events`.

    Parameters
    ----------
    class_counts : list [N][K], optional
        Training samples of each class at each client of a divided data set, for the report; only a simulation, which
        holds all data, has them. Clients never send label counts.
    checkpoints : Checkpoints, optional
        Of a run that is resumed; None: the run is new.
    bundle : str, optional
        SHA-256 of the app bundle that this code is from.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit, before any training.
    RunError
        Nodes are missing, a round brought no usable reply, a test sample had been trained on, or clients no longer have
        the private state that a resumed run needs.
    """
    checkpoints = checkpoints or Checkpoints(folder, settings)
    events.listeners.append(checkpoints)
    ledger = Ledger(settings, folder if checkpoints.resumed else None)
    events.listeners.append(ledger)
    collaborations = check_collaborations(settings, plan(settings))
    if checkpoints.resumed is None:
        events("run", **describe(settings, bundle))
    federation, info = connect(transport, with_stated_normalization(settings), events, checkpoints)
    check_streams(settings, collaborations, info)
    roles = [] if collaborations and not settings.rounds else info.labelled_roles  # without rounds roles do not matter
    trainings = plan(settings, roles)
    model = initial_model(settings, model_spec(settings, info))
    if checkpoints.resumed is None:
        for note in notes(settings, trainings, collaborations, info, roles, model):
            events("note", text=note)
        events("plan", steps=count_steps(settings, trainings, collaborations, info))
        about = {"names": info.names, "sizes": info.sizes, "roles": info.roles, "data": info.data}
        events("clients", class_counts=_counts_of(class_counts, info.names), classes=info.classes, **about)
    elif info.note and "note" not in checkpoints.resumed.world:
        events("note", text=info.note)  # of a fork, whose clients have not been asked before
    check_rows(trainings, model, settings)
    del model  # of which the rounds have their own copy
    checkpoints.begin(info)
    with observed(federation, folder) as federation:
        for position, training in enumerate(trainings):
            if training.name not in checkpoints.finished:
                checkpoints.open(training.name)
                files = Files(folder, "" if position == 0 else f"-{training.name}")
                run_training(federation, training, info, collaborations, files, checkpoints)
                checkpoints.finish(training.name)
    if spent := ledger.spent():
        events("privacy", **spent)
        events("note", text=spent_note(spent))
    events("end", seconds=checkpoints.seconds(), status="completed")


def connect(
    transport: Transport, settings: Settings, events: Events, checkpoints: Checkpoints
) -> tuple[Federation, FederationInfo]:
    """Wait for the clients and identify them; a resumed run has the members of its checkpoint.

    Raises
    ------
    NodesMissing
        Too few clients that fit are there.
    RunError
        Too few clients can go on from the checkpoint (`resume.misfits`).
    """
    resumed, nodes = checkpoints.resumed, Nodes(transport, unfit=unfit(settings))
    secure = None
    if settings.secure_aggregation:
        secure = SecureAggregation(settings, nodes, events, spoilers(checkpoints.folder) if resumed else ())
    federation = Federation(
        nodes, settings, checkpoints.run, events, checkpoints.rounds, secure, folder=checkpoints.folder
    )
    members = member_names(resumed.world) if resumed else []
    least = settings.min_clients or settings.clients
    wanted = Wanted(settings.clients, min(least, len(members) or least), settings.max_clients, members)
    found = nodes.assemble(Identify(**federation.common("")), wanted, settings.node_timeout, events)
    identities = {name: identity for name, node in found.items() if (identity := nodes.unknown[node]) is not None}
    if resumed is None:
        nodes.begin(found, identities, wanted)
        nodes.leave_others_alone(events)
    else:
        other = misfits(resumed, identities)
        fitting = {name: identity for name, identity in identities.items() if name not in other}
        lines = grouped("client", other)
        if len(fitting) < wanted.least:
            raise RunError(f"resume: {'; '.join(lines)}")
        for line in lines:
            events("note", text=f"resume: {line}; the run goes on without")
        there = {name: node for name, node in found.items() if name in fitting}
        nodes.begin(there, known_members(resumed.world, fitting), wanted)
        # a client that is left out, or was not there, comes back with its private state only
        nodes.barred = lambda one: misfits(resumed, {one.name: one}).get(one.name, "")
    return federation, nodes.info


def unfit(settings: Settings) -> Callable[[Identity], str]:
    """Return a function that says why a client cannot take part in what the settings ask for; empty if it can."""
    collaborative = bool(settings.collaborations)
    rows = [row.label for training in plan(settings) for row in training.rows if row.named and row.personal]
    personal = [] if collaborative and not settings.rounds else rows

    def why(one: Identity) -> str:
        if not one.own_data and not (is_number(one.name) and int(one.name) < settings.clients):
            return f"allowed are the names '0' to '{settings.clients - 1}' without data of its own"
        if one.labelled and one.role == "target" and personal:
            return f"role = 'target': {', '.join(personal)} need clients that train"
        if collaborative and settings.rounds and not one.own_data:
            return "no data of its own, which keep the streams apart from what is trained on"
        tests = not settings.rounds or one.role != "source"  # a source has no test images to make a stream of
        return "stream-rounds = 0: allowed is 1 or more" if collaborative and tests and not one.stream_rounds else ""

    return why


@contextmanager
def observed(federation: Federation, folder: Path) -> Iterator[Federation]:
    """Ask a run's clients for telemetry if its settings say so; answers after the run, however it ends, are dropped."""
    settings = federation.settings
    if not settings.observe_every:
        yield federation
        return
    transport, request = patient(federation.nodes.transport), Observe(**federation.common(""))
    observation = Observation(
        transport, folder, request, settings.observe_every, lambda text: federation.events("note", text=text)
    )
    try:
        yield replace(federation, observation=observation)
    finally:
        observation.close()
    observation.tell()


def _counts_of(class_counts: list[list[int]] | None, names: Sequence[str]) -> list[list[int]] | None:
    """Return the class counts of these clients of a divided data set; None if one is none of its clients."""
    if class_counts is None or not all(is_number(name) and int(name) < len(class_counts) for name in names):
        return None
    return [class_counts[int(name)] for name in names]


@dataclass(frozen=True)
class Files:
    """Where a training's results are written; the names of the second and later trainings have a suffix."""

    folder: Path
    suffix: str

    def path(self, name: str, variant: str = "all") -> Path:
        """Return the path of a file of arrays."""
        return self.folder / f"{name}{self.suffix}{'' if variant == 'all' else f'-{variant}'}.safetensors"


def run_training(
    federation: Federation,
    training: Training,
    info: FederationInfo,
    collaborations: Sequence[Collaboration],
    files: Files,
    checkpoints: Checkpoints,
) -> None:
    """Train, personalize, learn rates and evaluate; or train and run the test-time rounds.

    Rounds that `checkpoints` hold are not repeated, apart from the evaluation, which is complete or absent.
    """
    federation = replace(federation, settings=training.recipe.settings(federation.settings))
    spec = model_spec(federation.settings, info)
    strategies = [make_strategy(stage, federation.settings) for stage in training.recipe.stages]
    arrays = _in_network_layout(
        checkpoints.records.get("arrays") or _copied(initial_model(federation.settings, spec).global_state())
    )
    arrays = train(federation, strategies, training, arrays, checkpoints)
    checkpoints.keep("arrays", arrays)
    model = initial_model(federation.settings, spec)  # again: during the rounds there is no second network in memory
    save_trained(files.path("model"), model, arrays, spec)
    network = Broadcast(held_record(arrays))
    if collaborations:
        adaptation_rounds(federation, training, network, collaborations, info, checkpoints)
        return
    means = None
    if training.needs & STATISTICS:
        means = _statistics(federation, training, arrays, model, checkpoints)
        metadata = {"training": training.name, "weighting": federation.settings.statistics_weighting}
        save_arrays(files.path("statistics"), means, metadata)
    rates = {
        variant: learn_rates(federation, network, modules(model), training.name, variant, checkpoints)
        for variant in training.variants
    }
    for variant, learned in rates.items():
        save_rates(files.path("rates", variant), learned, training.name, variant)
    took_part = checkpoints.took_part(training.name)
    summarized = checkpoints.summarized(training.name, training.recipe.rounds(federation.settings) + 1)
    evaluation_round(federation, training, arrays, means, rates, info.shifts, took_part, summarized)


def _copied(state: Mapping[str, Tensor]) -> Arrays:
    return {name: np.array(channels_last(value.numpy())) for name, value in state.items()}


def _in_network_layout(arrays: Arrays) -> Arrays:
    return {name: channels_last(value) for name, value in arrays.items()}


def _statistics(
    federation: Federation, training: Training, arrays: Arrays, model: TwoHead, checkpoints: Checkpoints
) -> Arrays:
    """Return the means of the clients' statistics: those of the checkpoint, or of a statistics round."""
    if "statistics" in checkpoints.records:
        return _in_network_layout(checkpoints.records["statistics"])
    means = statistics_round(federation, training, arrays, model, checkpoints.took_part(training.name))
    position = Position(training.name, "statistics", round=training.recipe.rounds(federation.settings) + 1)
    checkpoints.save(position, {"statistics": means})
    return means


def count_steps(
    settings: Settings, trainings: Sequence[Training], collaborations: Sequence[Collaboration], info: FederationInfo
) -> int:
    """Return how many rounds of all kinds the run has, for its progress."""
    steps = 0
    for training in trainings:
        steps += training.recipe.rounds(settings)
        if collaborations:
            steps += len(cells(training, collaborations)) * rounds_of(settings, info.stream_rounds)
        else:
            steps += 1 + bool(training.needs & STATISTICS) + len(training.variants) * settings.rates_rounds
    return steps


def notes(
    settings: Settings,
    trainings: Sequence[Training],
    collaborations: Sequence[Collaboration],
    info: FederationInfo,
    roles: Sequence[str],
    model: TwoHead,
) -> list[str]:
    """Return what a reader of the results has to know before them; `model` is the network the run starts from."""
    options = assignments(settings.model_options, "model-options")
    pretrained = "pretrained" in options or options.get("weights") == "default"
    untrained = collaborations and not (settings.init or settings.rounds or pretrained)
    random = "no init: the network that is adapted is random" if untrained else ""
    few = "" if collaborations else few_tested(info)
    texts = (info.note, *left_out_notes(settings, roles), tuning_note(settings, trainings), *model.notes, random, few)
    return [text for text in texts if text]


def few_tested(info: FederationInfo) -> str:
    """Return a note on clients that test on so few samples that their accuracies say little; empty without any."""
    clients = zip(info.roles, info.data, info.sizes, strict=True)
    tested = [sizes[2] for role, data, sizes in clients if role != "source" and data.get("labelled", True)]
    few = [size for size in tested if size < FEW_TESTED]
    if not few:
        return ""
    return (
        f"test samples: {len(few)} of {len(tested)} clients have fewer than {FEW_TESTED}, the smallest test set has "
        f"{min(few)}: there, one sample moves an accuracy by more than {100 // FEW_TESTED} points"
    )


def check_rows(trainings: Sequence[Training], model: TwoHead, settings: Settings) -> None:
    """Raise SettingsError, before any training, if options of a row or given rates do not fit the network.

    Options out of range are refused, too. Of a network from outside, what `plan` asks is not all that a method needs:
    its layers may be frozen, or keep no running statistics.
    """
    outside = is_external(settings.model)
    for row in (row for training in trainings for row in training.rows if row.options or outside):
        try:
            check_options(row.method.adapter, model, settings.clients, **row.options)
        except ValueError as error:
            raise SettingsError(f"methods: {row.label}: {error}") from error
    for variant in (variant for training in trainings for variant in training.variants):
        initial_rates(settings.rates_init, modules(model), variant)
