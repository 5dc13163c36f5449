"""The table of federated trainings: what clients do, which arrays are aggregated, and how.

A training is one or more stages of rounds. In a stage each client runs a local algorithm (`fedtta.client.algorithms`)
and the server aggregates the arrays that the stage shares; the others stay on the clients. Several methods may evaluate
one training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedtta.messages.requests import Base
from fedtta.settings import Scalar, Settings
from fedtta.strategies.partial import shared_names

EVERYTHING = ("*",)
HEAD = ("head.*",)
ENCODER = ("encoder.*",)
BATCHNORM = ("kind:batchnorm",)
#: Local algorithms with FedProx's term in their loss; the others would train as if there were none.
PROXIMAL = ("fedavg", "personalized", "ditto", "ttt")


@dataclass(frozen=True)
class TrainingStage:
    """Rounds of one kind.

    Parameters
    ----------
    algorithm : str
        The local algorithm; a key of `fedtta.client.algorithms.ALGORITHMS`.
    objective : str
        The loss that it minimizes; a key of `fedtta.client.algorithms.training.OBJECTIVES`.
    aggregated, local : tuple of str
        Patterns of array names: what is aggregated, and what of that stays on the clients nevertheless; see
        `fedtta.strategies.PartialFedAvg`.
    rounds : str
        The setting that holds the number of rounds.
    personal_head : bool
        Whether the algorithm trains a personal head on the frozen encoder (its `uses_personal_head`).
    """

    algorithm: str = "fedavg"
    objective: str = "cross_entropy"
    aggregated: tuple[str, ...] = EVERYTHING
    local: tuple[str, ...] = ()
    rounds: Literal["rounds", "classifier_rounds"] = "rounds"
    personal_head: bool = True

    @property
    def partial(self) -> bool:
        """Whether any array stays on the clients."""
        return self.aggregated != EVERYTHING or bool(self.local)

    @property
    def proximal(self) -> bool:
        """Whether the loss can have FedProx's term."""
        return self.algorithm in PROXIMAL

    def aggregated_names(self, names: Sequence[str]) -> list[str]:
        """Return which of a network's arrays are aggregated, in the order given."""
        return shared_names(names, self.aggregated, self.local)


@dataclass(frozen=True)
class TrainingRecipe:
    """A federated training.

    Parameters
    ----------
    summary : str
        One line for people, with the paper.
    stages : tuple of TrainingStage
        In order; each starts from the result of the one before.
    changes : mapping
        Settings (field names) that this training changes, on the server and in every request.
    base : "global", "personalised" or None
        The network that the method of the training's own name tests without adapting it; None: such a method is not
        made, or `fedtta.server.methods.METHODS` lists it.
    heads : frozenset of str
        Heads that it trains in addition to the global and the personal one: "rotation_head", a further head of the
        network, or "residual_head", a personal head added to the global one.
    """

    summary: str
    stages: tuple[TrainingStage, ...] = (TrainingStage(),)
    changes: Mapping[str, Scalar] = field(default_factory=dict)
    heads: frozenset[str] = frozenset()
    base: Base | None = None

    def settings(self, settings: Settings) -> Settings:
        """Return the run's settings with what this training changes."""
        changes = dict(self.changes)
        if "rotation_head" in self.heads:
            changes["model_options"] = ";".join(filter(None, (settings.model_options, "rotation_head=true")))
        return settings.replace(**changes)

    def rounds(self, settings: Settings) -> int:
        """Return how many training rounds all stages have."""
        return sum(getattr(settings, stage.rounds) for stage in self.stages)

    @property
    def partial(self) -> bool:
        """Whether any array stays on the clients in any stage."""
        return any(stage.partial for stage in self.stages)

    @property
    def plain(self) -> bool:
        """Whether it is FedAvg without any change."""
        return self.stages == (TrainingStage(),) and not self.changes and not self.heads

    @property
    def personal_head(self) -> bool:
        """Whether clients train a personal head on the final encoder."""
        return self.stages[-1].personal_head

    def aggregated_names(self, names: Sequence[str]) -> list[str]:
        """Return which of a network's arrays any stage aggregates; of the others a client keeps values of its own."""
        found = {name for stage in self.stages for name in stage.aggregated_names(names)}
        return [name for name in names if name in found]


def _personal(algorithm: str, objective: str = "cross_entropy", local: tuple[str, ...] = ()) -> TrainingStage:
    """Return a stage of a personalized algorithm, which trains no personal head in addition to its own arrays."""
    return TrainingStage(algorithm, objective, local=local, personal_head=False)


def _fedicon(
    algorithm: str, encoder: tuple[str, ...] = ENCODER, head: tuple[str, ...] = HEAD
) -> tuple[TrainingStage, ...]:
    """Return FedICON's stages: encoder rounds, then classifier rounds on the frozen encoder."""
    return (
        TrainingStage(algorithm, aggregated=encoder, personal_head=False),
        TrainingStage("classifier", aggregated=head, rounds="classifier_rounds", personal_head=False),
    )


TRAININGS: dict[str, TrainingRecipe] = {
    "cross_entropy": TrainingRecipe("FedAvg (McMahan et al., AISTATS 2017)"),
    "balanced_softmax": TrainingRecipe(
        "FedAvg with balanced softmax (FedTHE, ICLR 2023, section 4.2)", (TrainingStage(objective="balanced_softmax"),)
    ),
    "balanced_heads": TrainingRecipe(
        "balanced softmax for both heads (FedTHE, Table 13, row 16)",
        (TrainingStage(objective="balanced_softmax"),),
        {"personal_objective": "balanced_softmax"},
    ),
    "fedprox": TrainingRecipe("FedProx (Li et al., MLSys 2020)", changes={"aggregation": "fedprox"}),
    "fedavgm": TrainingRecipe("FedAvgM (Hsu et al., 2019)", changes={"aggregation": "fedavgm"}),
    "qffl": TrainingRecipe("q-FFL (Li et al., ICLR 2020)", changes={"aggregation": "qffl"}),
    "gma": TrainingRecipe("gradient masked averaging (Tenison et al., 2022)", changes={"aggregation": "gma"}),
    "local": TrainingRecipe("local training without a federation", (TrainingStage("personalized", aggregated=()),)),
    "fedper": TrainingRecipe("FedPer (Arivazhagan et al., 2019)", (TrainingStage("personalized", local=HEAD),)),
    "fedrep": TrainingRecipe("FedRep (Collins et al., ICML 2021)", (_personal("fedrep", local=HEAD),)),
    "fedbn": TrainingRecipe("FedBN (Li et al., ICLR 2021)", (TrainingStage("personalized", local=BATCHNORM),)),
    "fedrod": TrainingRecipe(
        "FedRoD (Chen & Chao, ICLR 2022)",
        (_personal("fedrod", "balanced_softmax"),),
        heads=frozenset({"residual_head"}),
    ),
    "ditto": TrainingRecipe("Ditto (Li et al., ICML 2021)", (_personal("ditto"),)),
    "apfl": TrainingRecipe("APFL (Deng et al., 2020)", (_personal("apfl"),)),
    "rotation": TrainingRecipe(
        "FedAvg with rotation prediction (TTT: Sun et al., ICML 2020)",
        (TrainingStage("ttt"),),
        heads=frozenset({"rotation_head"}),
    ),
    "fedicon": TrainingRecipe(
        "FedICON (2023): contrastive encoder, then classifier", _fedicon("supervised_contrastive")
    ),
    "fedicon_us": TrainingRecipe("FedICON-us: no labels in the encoder stage", _fedicon("self_contrastive")),
    "fedicon_local": TrainingRecipe(
        "FedICON without a federation (its Table 8)", _fedicon("supervised_contrastive", (), ())
    ),
    "fedavg_views": TrainingRecipe("FedAvg with FedICON's augmentations", changes={"views": "contrastive"}),
}
