"""The table of methods, each a federated training and an adapter, and the plan of a run that follows from its settings.

A row of a run is a name from the table with options, e.g. `fedthe[beta=1;training=cross_entropy]` or
`tent[base=personalised]`; `all` stands for every method that fits the network and the clients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from fedtta.messages.requests import AdapterRow, Base, Variant
from fedtta.models.registry import MODELS, Abilities, abilities
from fedtta.server.aggregation import check_aggregation
from fedtta.server.privacy import check_privacy
from fedtta.server.trainings import BATCHNORM, TRAININGS, TrainingRecipe
from fedtta.settings import Settings, SettingsError, assignments, words
from fedtta.strategies import AGGREGATIONS
from fedtta.tta.registry import ADAPTERS, needs_of, parse_options
from fedtta.tta.statistics import PERSONALISED, STATISTICS_NEEDS

Options = dict[str, bool | int | float | str | None]
#: In place of methods by name: all of them.
ALL = "all"


@dataclass(frozen=True)
class Method:
    """One row of the methods table; everything by name.

    Parameters
    ----------
    training : str
        A key of `fedtta.server.trainings.TRAININGS`: local objective and strategy.
    adapter : str
        A key of `fedtta.tta.registry.ADAPTERS`.
    summary : str
        One line for people.
    base : "global" or "personalised"
        The network that the adapter gets: as the training left it, or after the local algorithm has personalized it
        (fine-tuning, the personal models of Ditto and APFL, FedICON's personal classifier).
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
    # federated and personalized training
    "local": Method("local", "none", "local training without a federation"),
    "fedavg_ft": Method("cross_entropy", "none", "FedAvg, then fine-tuning", "personalised"),
    "fedavg_views": Method("fedavg_views", "none", "FedAvg with FedICON's augmentations"),
    "fedprox": Method("fedprox", "none", "a proximal term towards the received model"),
    "fedavgm": Method("fedavgm", "none", "momentum on the server"),
    "qffl": Method("qffl", "none", "clients with a large loss get more weight"),
    "gma": Method("gma", "none", "larger steps where clients agree"),
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
    "tent": Method("cross_entropy", "tent", "entropy minimization through BatchNorm"),
    "eata": Method("cross_entropy", "eata", "Tent on reliable and new samples, without forgetting"),
    "cotta": Method("cross_entropy", "cotta", "averaged teacher and stochastic restoration"),
    "rotta": Method("cross_entropy", "rotta", "robust BatchNorm and a class-balanced memory"),
    "roid": Method("cross_entropy", "roid", "weight ensembling and diversity weighting"),
    "memo": Method("cross_entropy", "memo", "marginal entropy over augmented views"),
    "ttt": Method("rotation", "ttt", "rotation prediction"),
    "t3a": Method("cross_entropy", "t3a", "class prototypes of confident features"),
    "shot": Method("cross_entropy", "shot", "information maximization and pseudo-labels"),
    "surgical": Method("cross_entropy", "surgical", "entropy minimization in one block"),
    "em": Method("cross_entropy", "em", "label prior by expectation maximization"),
    "bbse": Method("cross_entropy", "bbse", "label prior by the confusion matrix"),
    "tsa": Method("cross_entropy", "tsa", "the heads' mixture on which two views agree"),
    "auto": Method("cross_entropy", "auto", "the adapter that is estimated to gain most, without labels"),
}
# Trainings and adapters without a line above are methods by their own names.
METHODS |= {
    name: Method(name, "none", recipe.summary, recipe.base) for name, recipe in TRAININGS.items() if recipe.base
}
_named = {method.adapter for method in METHODS.values()}
METHODS |= {name: Method("cross_entropy", name, ADAPTERS[name].adapts) for name in ADAPTERS if name not in _named}


#: Needs that a statistics round meets.
STATISTICS = STATISTICS_NEEDS | {"personal_head"}
#: Needs that only a training with such a head meets.
HEADS = ("rotation_head", "residual_head")


@dataclass(frozen=True)
class MethodRow:
    """One row that a run evaluates; `named` by the user, or one of those that `all` stands for."""

    label: str
    method: Method
    training: str
    options: Options = field(default_factory=dict)
    base: Base = "global"
    named: bool = True

    @property
    def recipe(self) -> TrainingRecipe:
        """Return its federated training."""
        return TRAININGS[self.training]

    @property
    def needs(self) -> frozenset[str]:
        """Return what its adapter needs, and the candidates that it names."""
        return needs_of(self.method.adapter, self.options)

    @property
    def collaborates(self) -> bool:
        """Whether it can take part in test-time rounds, in which all clients start from one network."""
        return self.base == "global" and self.recipe.plain and ADAPTERS[self.method.adapter].collaborates

    @property
    def personal(self) -> bool:
        """Whether it needs what a client learned from labels of its own."""
        return bool(self.needs & PERSONALISED) or self.base == "personalised" or self.recipe.partial

    def as_requested(self) -> AdapterRow:
        """Return the row as a request carries it."""
        return AdapterRow(self.label, self.method.adapter, self.options, self.base)


@dataclass(frozen=True)
class Training:
    """One federated training that several rows share; `name` is a key of `TRAININGS`."""

    name: str
    rows: tuple[MethodRow, ...]

    @property
    def recipe(self) -> TrainingRecipe:
        """Return its entry in the table."""
        return TRAININGS[self.name]

    @property
    def needs(self) -> frozenset[str]:
        """Return what its rows' adapters need."""
        return frozenset().union(*(row.needs for row in self.rows))

    def leaves_own_share_out(self, settings: Settings) -> bool:
        """Return whether a row takes a client's own share out of a mean over at least two clients."""
        said = {"leave_one_out": settings.clients} if settings.leave_one_out else {}
        return any(ADAPTERS[row.method.adapter].leaves_own_share_out({**said, **row.options}) for row in self.rows)

    @property
    def variants(self) -> list[Variant]:
        """Return which rates its rows need: "all", or only "params" or "stats" (ATP, Table 4)."""
        rows = [row for row in self.rows if "rates" in row.needs]
        return list(dict.fromkeys(cast(Variant, row.options.get("adapt", "all")) for row in rows))


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
    options = words(match[2] or "", f"methods: {match[1]}")
    training = _choice(label, "training", options.pop("training", method.training), tuple(TRAININGS))
    base = _choice(label, "base", options.pop("base", method.base), get_args(Base))
    try:
        typed = parse_options(method.adapter, options)
        needs_of(method.adapter, typed)  # raises for what cannot be a candidate
    except ValueError as error:
        raise SettingsError(f"methods: {label}: {error}") from error
    return MethodRow(label, method, training, cast(Options, typed), cast(Base, base), named)


def _choice(label: str, option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise SettingsError(f"methods: {label}: {option} = {value!r}; allowed: {', '.join(allowed)}")
    return value


def plan(settings: Settings, roles: Sequence[str] = ()) -> list[Training]:
    """Group the rows by training: methods with the same one share it.

    Parameters
    ----------
    roles : sequence of str
        Roles of the clients, once they are known; see `check_roles`.

    Raises
    ------
    SettingsError
        As `parse_rows` and `check_aggregation`, or a method that was asked for by name does not fit; the message says
        what would. The training batch is too small for the network.
    """
    check_aggregation(settings)
    rows, _ = choose(settings, roles)
    if settings.rounds and settings.batch_size == 1 and _abilities(settings).batchnorm:  # clients would refuse it
        raise SettingsError(f"batch-size = 1: allowed are 2 or more with BatchNorm, which {settings.model} has")
    names = dict.fromkeys(row.training for row in rows)
    trainings = [Training(name, tuple(row for row in rows if row.training == name)) for name in names]
    sources = sum(role != "target" for role in roles) or settings.clients
    check_privacy(settings, [training.recipe.settings(settings) for training in trainings], sources)
    if expected := roles or _expected_roles(settings):
        check_roles(trainings, expected)
    return trainings


def choose(settings: Settings, roles: Sequence[str] = ()) -> tuple[list[MethodRow], dict[str, list[str]]]:
    """Return the rows of a run, and those of `all` that do not fit: reason → labels.

    Raises as `plan`, apart from aggregation and roles.
    """
    _abilities(settings)
    rows: list[MethodRow] = []
    left_out: dict[str, list[str]] = {}
    for row in parse_rows(settings.methods):
        _check_heads(row)
        reason = _misfit(row, settings)
        if row.named and reason:
            raise SettingsError(f"methods: {row.label} {reason}")
        if not row.named:  # named rows are refused for these reasons elsewhere
            reason = reason or _misfit_of_run(row, settings, roles or _expected_roles(settings))
        if reason:
            left_out.setdefault(reason, []).append(row.label)
        else:
            rows.append(row)
    return rows, left_out


def _expected_roles(settings: Settings) -> list[str]:
    """Return the roles that the settings give to clients; none where all train and test."""
    return ["source", "target"] if settings.target_fraction or settings.target_domain else []


def check_roles(trainings: Sequence[Training], roles: Sequence[str]) -> None:
    """Refuse what clients with these roles cannot do.

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
    """Return why a row does not fit the network or the aggregation, and what would; empty if it fits."""
    own = str(row.recipe.changes.get("aggregation", settings.aggregation))
    network = _abilities(settings)
    if "nonnegative" in row.needs and not network.features_nonnegative:
        return (
            f"needs features that are not negative, which those of {settings.model} may be; fitting: {settings.model} "
            "with model-options features=relu"
        )
    if not network.batchnorm:
        lacking = f"BatchNorm{{}}, which {settings.model} lacks; fitting: {', '.join(_with_batchnorm())}"
        if "batchnorm" in row.needs:
            return f"adapts {lacking.format('')}"
        if any(stage.local == BATCHNORM for stage in row.recipe.stages):
            return f"keeps {lacking.format(' on the clients')}"
    if settings.aggregation not in (Settings.aggregation, own):
        return (
            f"is aggregated by {own}: aggregation = {settings.aggregation!r}; allowed are {Settings.aggregation}, {own}"
        )
    if row.recipe.partial and not AGGREGATIONS[settings.aggregation].aggregates_partial:
        fitting = ", ".join(name for name, one in AGGREGATIONS.items() if one.aggregates_partial)
        return f"keeps arrays on the clients: aggregation = {settings.aggregation!r}; allowed is {fitting}"
    if "proximal_mu" in AGGREGATIONS[own].options and not all(one.proximal for one in row.recipe.stages):
        fitting = ", ".join(name for name, one in AGGREGATIONS.items() if "proximal_mu" not in one.options)
        return f"trains without a proximal term: aggregation = {own!r}; allowed are {fitting}"
    if ADAPTERS[row.method.adapter].leaves_own_share_out(row.options):
        uniform = settings.statistics_weighting == "uniform"
        if not uniform or AGGREGATIONS[settings.aggregation].byzantine_robust:
            return (
                "takes a client's own share out of a mean over clients: allowed with statistics-weighting = 'uniform' "
                "and an aggregation that is not robust"
            )
    return ""


def _abilities(settings: Settings) -> Abilities:
    """Return what the network has that methods ask for; SettingsError if there is no such network."""
    try:
        options = assignments(settings.model_options, "model-options")
        return abilities(settings.model, settings.channels, settings.image_size, options)
    except (ValueError, ImportError) as error:
        given = f", model-options = {settings.model_options!r}" if settings.model_options else ""
        raise SettingsError(f"model = {settings.model!r}{given}: {error}") from error


def _with_batchnorm() -> list[str]:
    """Return the networks that have BatchNorm, with the option that gives it to those that have a choice."""
    having = [name for name, info in MODELS.items() if info.normalisation == "batch"]
    choice = [(name, info.normalisation_option) for name, info in MODELS.items() if info.normalisation_option]
    return [*(f"{name} with model-options {option}=batch" for name, option in choice), *having]


def _misfit_of_run(row: MethodRow, settings: Settings, roles: Sequence[str]) -> str:
    """Return why a row does not fit these clients or this kind of run; empty if it fits."""
    if settings.collaborations:
        return "" if row.collaborates else "cannot take part in test-time rounds"
    if "target" in roles and row.personal:
        return "needs clients that train, and target clients do not"
    if settings.init and "rotation_head" in row.recipe.heads:
        return f"needs a rotation head, which the network of init = {settings.init!r} need not have; ask for it by name"
    return ""


def _check_heads(row: MethodRow) -> None:
    """Refuse an adapter on a training without the head that it needs."""
    for head in HEADS:
        if head in row.needs and head not in row.recipe.heads:
            fitting = ", ".join(name for name, recipe in TRAININGS.items() if head in recipe.heads)
            raise SettingsError(f"methods: {row.label}: training = {row.training!r}; allowed: {fitting}")
    if "personal_head" in row.needs and not row.recipe.personal_head:
        fitting = ", ".join(name for name, recipe in TRAININGS.items() if recipe.personal_head)
        raise SettingsError(f"methods: {row.label}: training = {row.training!r}; with a personal head are: {fitting}")


def left_out_notes(settings: Settings, roles: Sequence[str]) -> list[str]:
    """Return the methods that `all` omits in this run and what they would need, one text for each reason."""
    _, left_out = choose(settings, roles)
    return [
        f"methods = all leaves out {', '.join(labels)}: {'each' if len(labels) > 1 else 'it'} {reason}"
        for reason, labels in left_out.items()
    ]


def tuning_note(settings: Settings, trainings: Sequence[Training]) -> str:
    """Return the rows that are measured on fewer samples than the others; empty if there are none."""
    rows = [row for training in trainings for row in training.rows]
    tuning = [row.label for row in rows if "gradients" in ADAPTERS[row.method.adapter].needs]
    if not (settings.tune_samples and tuning):
        return ""
    return f"{', '.join(tuning)}: measured on the first {settings.tune_samples} samples of each stream and client"
