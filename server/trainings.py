"""The table of federated trainings: what clients do, what of it is joined, and by which rule.

A training is one or more phases of rounds. In a phase each client follows a rule (`client.rules`) and the server joins
the arrays that the phase shares; the others stay on the clients. Several methods may test one training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from settings import Scalar, Settings
from strategies.partial import shared_names

EVERYTHING = ("*",)
HEAD = ("head.*",)
ENCODER = ("encoder.*",)
BATCHNORM = ("kind:batchnorm",)


@dataclass(frozen=True)
class Phase:
    """Rounds of one kind.

    Parameters
    ----------
    rule : str
        What a client does; a key of `client.rules.RULES`.
    objective : str
        The loss that the rule minimises; a key of `client.objectives.OBJECTIVES`.
    shared, kept : tuple of str
        Patterns of names: what is joined, and what of that stays on the clients; see `strategies.PartialFedAvg`.
    rounds : str
        The setting that says how many rounds there are.
    """

    rule: str = "joint"
    objective: str = "cross_entropy"
    shared: tuple[str, ...] = EVERYTHING
    kept: tuple[str, ...] = ()
    rounds: Literal["rounds", "classifier_rounds"] = "rounds"

    @property
    def makes_personal_head(self) -> bool:
        """Tell whether clients train a personal head on the frozen encoder beside it."""
        return self.rule in ("joint", "own", "rotation")

    @property
    def partial(self) -> bool:
        """Tell whether anything stays on the clients."""
        return self.shared != EVERYTHING or bool(self.kept)


@dataclass(frozen=True)
class Recipe:
    """A federated training.

    Parameters
    ----------
    summary : str
        One line for people, with the paper.
    phases : tuple of Phase
        In order; each starts from what the one before made.
    changes : mapping
        Settings (field names) that this training changes, on the server and in every message.
    rotation_head : bool
        Whether the network gets a third head that tells rotations apart.
    """

    summary: str
    phases: tuple[Phase, ...] = (Phase(),)
    changes: Mapping[str, Scalar] = field(default_factory=dict)
    rotation_head: bool = False

    def settings(self, settings: Settings) -> Settings:
        """Return the run's settings with what this training changes."""
        changes = dict(self.changes)
        if self.rotation_head:
            changes["model_options"] = ";".join(filter(None, (settings.model_options, "rotation_head=true")))
        return settings.replace(**changes)

    def rounds(self, settings: Settings) -> int:
        """Return how many training rounds all phases have."""
        return sum(getattr(settings, phase.rounds) for phase in self.phases)

    @property
    def makes_personal_head(self) -> bool:
        """Tell whether clients train a personal head on the final encoder."""
        return self.phases[-1].makes_personal_head

    def joined_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of a network's arrays that any phase joins; a client keeps its own values of the others."""
        found = {name for phase in self.phases for name in shared_names(names, phase.shared, phase.kept)}
        return [name for name in names if name in found]


def _contrastive(rule: str) -> tuple[Phase, ...]:
    """Return FedICON's phases: encoder rounds, then classifier rounds on the frozen encoder."""
    return (
        Phase(rule, shared=ENCODER),
        Phase("classifier", shared=HEAD, rounds="classifier_rounds"),
    )


TRAININGS: dict[str, Recipe] = {
    "cross_entropy": Recipe("FedAvg (McMahan et al., AISTATS 2017)"),
    "balanced_softmax": Recipe(
        "FedAvg with balanced softmax (FedTHE, ICLR 2023, section 4.2)", (Phase(objective="balanced_softmax"),)
    ),
    "balanced_heads": Recipe(
        "balanced softmax for both heads (FedTHE, Table 13, row 16)",
        (Phase(objective="balanced_softmax"),),
        {"personal_objective": "balanced_softmax"},
    ),
    "fedprox": Recipe("FedProx (Li et al., MLSys 2020)", changes={"aggregation": "fedprox"}),
    "fedavgm": Recipe("FedAvgM (Hsu et al., 2019)", changes={"aggregation": "fedavgm"}),
    "qffl": Recipe("q-FFL (Li et al., ICLR 2020)", changes={"aggregation": "qffl"}),
    "gma": Recipe("gradient masked averaging (Tenison et al., 2022)", changes={"aggregation": "gma"}),
    "local": Recipe("every client for itself", (Phase("own", shared=()),)),
    "fedper": Recipe("FedPer (Arivazhagan et al., 2019)", (Phase("own", kept=HEAD),)),
    "fedrep": Recipe("FedRep (Collins et al., ICML 2021)", (Phase("fedrep", kept=HEAD),)),
    "fedbn": Recipe("FedBN (Li et al., ICLR 2021)", (Phase("own", kept=BATCHNORM),)),
    "fedrod": Recipe("FedRoD (Chen & Chao, ICLR 2022)", (Phase("fedrod", "balanced_softmax"),)),
    "ditto": Recipe("Ditto (Li et al., ICML 2021)", (Phase("ditto"),)),
    "apfl": Recipe("APFL (Deng et al., 2020)", (Phase("apfl"),)),
    "rotation": Recipe(
        "FedAvg with rotations to tell apart (TTT: Sun et al., ICML 2020)", (Phase("rotation"),), rotation_head=True
    ),
    "fedicon": Recipe("FedICON (2023): contrastive encoder, then classifier", _contrastive("supervised_contrastive")),
    "fedicon_us": Recipe("FedICON-us: no labels in the encoder phase", _contrastive("self_contrastive")),
    "fedicon_local": Recipe(
        "FedICON without sharing: every client for itself (its Table 8)",
        (Phase("supervised_contrastive", shared=()), Phase("classifier", shared=(), rounds="classifier_rounds")),
    ),
    "fedavg_views": Recipe("FedAvg with FedICON's augmentations", changes={"views": "contrastive"}),
}
