"""The table of methods: a federated training and an adapter, by name, and what each needs.

A row of a run is a name from the table with options, e.g. `fedthe[beta=1;training=cross_entropy]` or
`tent[base=personalised]`; `all` stands for every method that fits the network and the clients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from models.registry import MODELS
from server.trainings import BATCHNORM, TRAININGS, Recipe
from settings import Settings, SettingsError, assignments
from tta.registry import ADAPTERS, parse_options
from tta.statistics import OWN_NEEDS, STATISTICS_NEEDS

Base = Literal["global", "personalised"]
#: In place of methods by name: all of them.
ALL = "all"


@dataclass(frozen=True)
class Method:
    """One row of the methods table; everything by name.

    Parameters
    ----------
    training : str
        A key of `server.trainings.TRAININGS`: local objective and strategy.
    adapter : str
        A key of `tta.registry.ADAPTERS`.
    summary : str
        One line for people.
    base : "global" or "personalised"
        The network that the adapter gets: as the training left it, or after the training's own personalisation
        (fine-tuning, Ditto's and APFL's own models, FedICON's own classifier).
    """

    training: str
    adapter: str
    summary: str
    base: Base = "global"


METHODS: dict[str, Method] = {
    "fedavg": Method("cross_entropy", "none", "the global head, unadapted"),
    "personal": Method("cross_entropy", "personal", "the personal head, unadapted"),
    "fixed_mix": Method("cross_entropy", "fixed_mix", "plain average of the two heads"),
    "fedthe": Method("balanced_softmax", "fedthe", "test-time head ensemble"),
    "fedthe_plus": Method("balanced_softmax", "fedthe_plus", "FedTHE, then tuning by marginal entropy"),
    "btfl": Method("cross_entropy", "btfl", "dual-Bayesian head interpolation"),
    "fedicon": Method("fedicon", "fedicon", "contrastive tuning of the encoder", "personalised"),
    "fedicon_us": Method("fedicon_us", "fedicon", "the same, trained without labels", "personalised"),
    "atp": Method("cross_entropy", "atp", "every module by its learned rate"),
    "bbn": Method("cross_entropy", "bbn", "class-balanced BatchNorm and self-distillation"),
    # federated and personalised training
    "local": Method("local", "none", "every client for itself"),
    "fedavg_ft": Method("cross_entropy", "none", "FedAvg, then fine-tuning", "personalised"),
    "fedavg_views": Method("fedavg_views", "none", "FedAvg with FedICON's augmentations"),
    "fedprox": Method("fedprox", "none", "a pull towards the received model"),
    "fedavgm": Method("fedavgm", "none", "momentum on the server"),
    "qffl": Method("qffl", "none", "clients with a large loss count more"),
    "gma": Method("gma", "none", "values that clients agree on move more"),
    "fedper": Method("fedper", "none", "the head stays on the client"),
    "fedrep": Method("fedrep", "none", "head first, then encoder; the head stays on the client"),
    "fedbn": Method("fedbn", "none", "BatchNorm stays on the client"),
    "fedrod": Method("fedrod", "fedrod", "a balanced global and a residual personal head"),
    "ditto": Method("ditto", "none", "a personal model near the global one", "personalised"),
    "apfl": Method("apfl", "none", "an adaptive mixture of local and global weights", "personalised"),
    "knn_per": Method("cross_entropy", "knn_per", "the head mixed with the client's nearest neighbours"),
    "personal_balanced": Method("balanced_heads", "personal", "a personal head by balanced softmax"),
    # test-time adaptation
    "bn_adapt": Method("cross_entropy", "bn_adapt", "BatchNorm statistics of the batch"),
    "tent": Method("cross_entropy", "tent", "entropy minimisation through BatchNorm"),
    "eata": Method("cross_entropy", "eata", "Tent on reliable and new samples, without forgetting"),
    "cotta": Method("cross_entropy", "cotta", "averaged teacher and stochastic restoration"),
    "rotta": Method("cross_entropy", "rotta", "robust BatchNorm and a class-balanced memory"),
    "roid": Method("cross_entropy", "roid", "weight ensembling and diversity weighting"),
    "memo": Method("cross_entropy", "memo", "marginal entropy over augmented views"),
    "ttt": Method("rotation", "ttt", "telling rotations apart"),
    "t3a": Method("cross_entropy", "t3a", "class prototypes of confident features"),
    "shot": Method("cross_entropy", "shot", "information maximisation and pseudo-labels"),
    "surgical": Method("cross_entropy", "surgical", "entropy minimisation in one block"),
    "em": Method("cross_entropy", "em", "label prior by expectation maximisation"),
    "bbse": Method("cross_entropy", "bbse", "label prior by the confusion matrix"),
    "tsa": Method("cross_entropy", "tsa", "the heads' mixture on which two views agree"),
}


#: Needs of an adapter that only a client with training of its own can meet.
PERSONALISED = OWN_NEEDS | {"personal_head", "residual_head", "datastore"}
#: Needs that a statistics round meets.
STATISTICS = STATISTICS_NEEDS | {"personal_head"}


@dataclass(frozen=True)
class MethodRow:
    """One row that a run evaluates; `named` by the user, or one of those that `all` stands for."""

    label: str
    method: Method
    training: str
    options: dict[str, object] = field(default_factory=dict)
    base: Base = "global"
    named: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """Return what its adapter needs."""
        return ADAPTERS[self.method.adapter].needs

    @property
    def collaborates(self) -> bool:
        """Tell whether it can take part in test-time rounds, which start from one network that nobody trains."""
        untrained = self.base == "global" and self.training == "cross_entropy"
        return untrained and ADAPTERS[self.method.adapter].collaborates

    @property
    def personal(self) -> bool:
        """Tell whether it needs what a client learned from labels of its own."""
        private = any(phase.partial for phase in TRAININGS[self.training].phases)
        return bool(self.needs & PERSONALISED) or self.base == "personalised" or private


@dataclass(frozen=True)
class Training:
    """One federated training that several rows share; `name` is a key of `TRAININGS`."""

    name: str
    rows: tuple[MethodRow, ...]

    @property
    def recipe(self) -> Recipe:
        """Return how it goes."""
        return TRAININGS[self.name]

    @property
    def needs(self) -> frozenset[str]:
        """Return what its rows' adapters need."""
        return frozenset().union(*(row.needs for row in self.rows))

    @property
    def variants(self) -> list[str]:
        """Return which rates its rows need: "all", or only "params" or "stats" (ATP, Table 4)."""
        rows = [row for row in self.rows if "rates" in row.needs]
        return list(dict.fromkeys(str(row.options.get("adapt", "all")) for row in rows))


def parse_rows(text: str) -> list[MethodRow]:
    """Parse the setting `methods` into rows; `all` becomes one row for each method of the table.

    Raises
    ------
    SettingsError
        An unknown method or option, an impossible value, or a row that occurs twice; what exists is listed.
    """
    rows: list[MethodRow] = []
    for part in (part.strip() for part in text.split(",")):
        found = [_parse_row(name, False) for name in METHODS] if part == ALL else [_parse_row(part, True)]
        for row in found:
            if any(other.label == row.label for other in rows):
                raise SettingsError(f"methods: {row.label} is named twice")
            rows.append(row)
    return rows


def _parse_row(part: str, named: bool) -> MethodRow:
    match = re.fullmatch(r"([\w.-]+)(?:\[(.*)\])?", part)
    if not match or match[1] not in METHODS:
        raise SettingsError(f"methods: unknown method {part!r}; there are: {ALL}, {', '.join(METHODS)}")
    method, label = METHODS[match[1]], part.replace(" ", "")
    options = dict(assignments(match[2] or "", f"methods: {match[1]}"))
    training = _choice(label, "training", str(options.pop("training", method.training)), tuple(TRAININGS))
    base = _choice(label, "base", str(options.pop("base", method.base)), get_args(Base))
    try:
        typed = parse_options(method.adapter, {name: str(value) for name, value in options.items()})
    except ValueError as error:
        raise SettingsError(f"methods: {label}: {error}") from error
    return MethodRow(label, method, training, typed, "global" if base == "global" else "personalised", named)


def _choice(label: str, option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise SettingsError(f"methods: {label}: {option} = {value!r}; allowed: {', '.join(allowed)}")
    return value


def plan(settings: Settings, roles: Sequence[str] = ()) -> list[Training]:
    """Group the rows by training: methods with the same one share it.

    Parameters
    ----------
    roles : sequence of str
        What the clients that are there can do, once that is known; see `check_roles`.

    Raises
    ------
    SettingsError
        As `parse_rows`, or a method that was asked for by name does not fit; the message says what would.
    """
    rows, _ = choose(settings, roles)
    names = dict.fromkeys(row.training for row in rows)
    trainings = [Training(name, tuple(row for row in rows if row.training == name)) for name in names]
    if expected := roles or _expected_roles(settings):
        check_roles(trainings, expected)
    return trainings


def choose(settings: Settings, roles: Sequence[str] = ()) -> tuple[list[MethodRow], dict[str, list[str]]]:
    """Return the rows of a run, and those of `all` that do not fit: reason → labels.

    Raises as `plan`, roles apart.
    """
    if settings.model not in MODELS:
        raise SettingsError(f"model = {settings.model!r}: allowed are {', '.join(MODELS)}")
    rows: list[MethodRow] = []
    left_out: dict[str, list[str]] = {}
    for row in parse_rows(settings.methods):
        _check_training(row)
        reason = _misfit(row, settings)
        if row.named and reason:
            raise SettingsError(f"methods: {row.label} {reason}")
        if not row.named:  # what named rows are refused for elsewhere
            reason = reason or _misfit_of_run(row, settings, roles or _expected_roles(settings))
        if reason:
            left_out.setdefault(reason, []).append(row.label)
        else:
            rows.append(row)
    return rows, left_out


def _expected_roles(settings: Settings) -> list[str]:
    """Return the roles that the settings give to clients; none where each trains and tests."""
    return ["source", "target"] if settings.target_fraction or settings.target_domain else []


def check_roles(trainings: Sequence[Training], roles: Sequence[str]) -> None:
    """Refuse what the clients that are there cannot do.

    Raises
    ------
    SettingsError
        No client trains, no client tests, or a method needs what a client learned from labels of its own and a client
        that tests never trains.
    """
    if all(role == "target" for role in roles) or all(role == "source" for role in roles):
        raise SettingsError(f"all clients are {roles[0]}s: some must train and some must test")
    personal = [row.label for training in trainings for row in training.rows if row.personal]
    if "target" in roles and personal:
        raise SettingsError(f"methods: {', '.join(personal)} need clients that train, and target clients do not")


def _misfit(row: MethodRow, settings: Settings) -> str:
    """Say why a row does not fit the network or the aggregation, and what would; empty if it does."""
    recipe = TRAININGS[row.training]
    kept = [phase for phase in recipe.phases if phase.partial]
    own = recipe.changes.get("aggregation", settings.aggregation)
    options = assignments(settings.model_options, "model-options")
    if MODELS[settings.model].normalisation_with(options) != "batch":
        lacking = f"BatchNorm{{}}, which {settings.model} lacks; fitting: {', '.join(_with_batchnorm())}"
        if "batchnorm" in ADAPTERS[row.method.adapter].needs:
            return f"adapts {lacking.format('')}"
        if any(phase.kept == BATCHNORM for phase in kept):
            return f"keeps {lacking.format(' on the clients')}"
    if settings.aggregation not in ("fedavg", own):
        return f"is joined by {own}: aggregation = {settings.aggregation!r}; allowed are fedavg, {own}"
    if kept and settings.aggregation != "fedavg":
        return f"keeps arrays on the clients: aggregation = {settings.aggregation!r}; allowed is fedavg"
    return ""


def _with_batchnorm() -> list[str]:
    """Return the networks that have BatchNorm, with the option that gives it to those that have a choice."""
    having = [name for name, info in MODELS.items() if info.normalisation == "batch"]
    choice = [(name, info.normalisation_option) for name, info in MODELS.items() if info.normalisation_option]
    return [*(f"{name} with model-options {option}=batch" for name, option in choice), *having]


def _misfit_of_run(row: MethodRow, settings: Settings, roles: Sequence[str]) -> str:
    """Say why a row is nothing for these clients or this kind of run; empty if it is."""
    if settings.collaborations:
        return "" if row.collaborates else "cannot take part in test-time rounds"
    if "target" in roles and row.personal:
        return "needs clients that train, and target clients do not"
    if settings.init and TRAININGS[row.training].rotation_head:
        return f"needs a rotation head, which the network of init = {settings.init!r} need not have; ask for it by name"
    return ""


def _check_training(row: MethodRow) -> None:
    """Refuse an adapter on a training that does not make what it needs."""
    recipe = TRAININGS[row.training]
    for need, trained in (("rotation_head", "rotation"), ("residual_head", "fedrod")):
        if need in row.needs and row.training != trained:
            raise SettingsError(f"methods: {row.label}: training = {row.training!r}; allowed: {trained}")
    if "personal_head" in row.needs and not recipe.makes_personal_head:
        fitting = ", ".join(name for name, other in TRAININGS.items() if other.makes_personal_head)
        raise SettingsError(f"methods: {row.label}: training = {row.training!r}; with a personal head are: {fitting}")
