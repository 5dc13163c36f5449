"""The table of adapters: what each one is, needs and offers, readable without torch.

A server refuses a bad combination before training from this table alone; the class behind a row is imported when an
adapter is made or when its options, which are its constructor's arguments, are asked for.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tta.base import Adapter

#: What an adapter may ask of the training before it, of the model, or of the machine.
NEEDS = frozenset(
    {
        "personal_head", "descriptor", "dle", "entropy", "gradients", "batchnorm", "rates",
        "datastore", "label_prior", "confusion", "block_scores", "rotation_head", "residual_head",
    }
)  # fmt: skip

#: Needs that are statistics of labels: clients send them only if a row asks, and use their mean.
POOLED = ("label_prior", "confusion", "block_scores")

#: What a collaborating adapter lets others mix; see `tta.collaborator`.
Share = Literal["affine", "statistics", "all"]

#: Arguments of a constructor that are no options: what comes from the training or the network.
GIVEN = ("self", "model", "statistics", "rates", "datastore", "fisher", "num_classes")


@dataclass(frozen=True)
class AdapterInfo:
    """One row of the table.

    Parameters
    ----------
    name : str
        As in settings and tables.
    path : str
        "module:Class".
    paper : str
        Title and venue; empty for a plain baseline.
    adapts : str
        What changes at test time.
    per : "sample" or "batch"
        Whether a sample's result is independent of how the stream is cut, with default options.
    needs : frozenset of str
        A subset of `NEEDS`.
    collaborates : bool
        Whether it can take part in test-time rounds; see `tta.collaborator`.
    shares : bool
        Whether there is anything that clients could mix then.

    Raises
    ------
    ValueError
        A need is unknown.
    """

    name: str
    path: str
    paper: str
    adapts: str
    per: Literal["sample", "batch"]
    needs: frozenset[str] = frozenset()
    collaborates: bool = False
    shares: bool = True

    def __post_init__(self) -> None:
        if not self.needs <= NEEDS:
            raise ValueError(
                f"{self.name} has unknown needs {sorted(self.needs - NEEDS)}; there are: {', '.join(sorted(NEEDS))}"
            )

    @property
    def class_name(self) -> str:
        """Name of the class, as `tta` exports it."""
        return self.path.partition(":")[2]

    def load(self) -> type[Adapter]:
        """Import and return the class (this imports torch)."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """Name → (type, default) of every option, from the constructor (this imports torch)."""
        constructor = self.load().__init__
        hints = typing.get_type_hints(constructor)
        parameters = inspect.signature(constructor).parameters
        return {name: (hints[name], given.default) for name, given in parameters.items() if name not in GIVEN}


_FEDTHE = "Test-Time Robust Personalization for Federated Learning (ICLR 2023)"
_BTFL = "BTFL: A Bayesian-based Test-Time Generalization Method (KDD 2025)"
_MEMO = "MEMO: Test Time Robustness via Adaptation and Augmentation (NeurIPS 2022)"

_ROWS = (
    AdapterInfo(
        "none", "tta.none:NoAdaptation", "", "nothing: the global head", "sample", collaborates=True, shares=False
    ),
    AdapterInfo(
        "personal", "tta.personal:Personal", "", "nothing: the personal head", "sample", frozenset({"personal_head"})
    ),
    AdapterInfo(
        "fixed_mix",
        "tta.fixed_mix:FixedMix",
        "",
        "nothing: a fixed mixture of the heads",
        "sample",
        frozenset({"personal_head"}),
    ),
    AdapterInfo(
        "fedthe",
        "tta.fedthe:FedTHE",
        _FEDTHE,
        "the weight of the global head",
        "sample",
        frozenset({"personal_head", "descriptor"}),
    ),
    AdapterInfo(
        "btfl",
        "tta.btfl:BTFL",
        _BTFL,
        "the weight of the global head",
        "sample",
        frozenset({"personal_head", "dle", "entropy"}),
    ),
    AdapterInfo("memo", "tta.memo:MEMO", _MEMO, "all parameters, for one sample", "sample", frozenset({"gradients"})),
    AdapterInfo(
        "fedthe_plus",
        "tta.fedthe_plus:FedTHEPlus",
        _FEDTHE,
        "the weight of the global head, then all parameters for one sample",
        "sample",
        frozenset({"personal_head", "descriptor", "gradients"}),
    ),
    AdapterInfo(
        "atp",
        "tta.atp:ATP",
        "Adaptive Test-Time Personalization for Federated Learning (NeurIPS 2023)",
        "every module by its learned rate",
        "batch",
        frozenset({"rates"}),
    ),
    AdapterInfo(
        "bn_adapt",
        "tta.bn_adapt:BNAdapt",
        "Improving robustness against common corruptions by covariate shift adaptation (NeurIPS 2020)",
        "BatchNorm statistics",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
        shares=False,
    ),
    AdapterInfo(
        "tent",
        "tta.tent:Tent",
        "Tent: Fully Test-Time Adaptation by Entropy Minimization (ICLR 2021)",
        "BatchNorm statistics, weights and biases",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "cotta",
        "tta.cotta:CoTTA",
        "Continual Test-Time Domain Adaptation (CVPR 2022)",
        "all parameters of student and teacher",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "rotta",
        "tta.rotta:RoTTA",
        "Robust Test-Time Adaptation in Dynamic Scenarios (CVPR 2023)",
        "BatchNorm statistics, weights and biases",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "roid",
        "tta.roid:ROID",
        "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, Prior Correction (WACV 2024)",
        "BatchNorm statistics, weights and biases",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "bbn",
        "tta.bbn:BBN",
        "pFedBBN: a personalized federated test-time adaptation with balanced batch normalization (under review, 2025)",
        "class statistics, BatchNorm weights and biases",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "eata",
        "tta.eata:EATA",
        "Efficient Test-Time Model Adaptation without Forgetting (ICML 2022)",
        "BatchNorm statistics, weights and biases",
        "batch",
        frozenset({"batchnorm"}),
        collaborates=True,
    ),
    AdapterInfo(
        "ttt",
        "tta.ttt:TTT",
        "Test-Time Training with Self-Supervision for Generalization under Distribution Shifts (ICML 2020)",
        "encoder and rotation head",
        "sample",
        frozenset({"rotation_head", "gradients"}),
    ),
    AdapterInfo(
        "t3a",
        "tta.t3a:T3A",
        "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization (NeurIPS 2021)",
        "the classes' prototypes",
        "sample",
    ),
    AdapterInfo(
        "shot",
        "tta.shot:SHOT",
        "Do We Really Need to Access the Source Data? Source Hypothesis Transfer (ICML 2020)",
        "the encoder",
        "batch",
    ),
    AdapterInfo(
        "surgical",
        "tta.surgical:Surgical",
        "Surgical Fine-Tuning Improves Adaptation to Distribution Shifts (ICLR 2023)",
        "one block of layers",
        "batch",
        frozenset({"block_scores"}),
    ),
    AdapterInfo(
        "em",
        "tta.em:EM",
        "Adjusting the Outputs of a Classifier to New a Priori Probabilities (Neural Computation 2002)",
        "the label prior",
        "batch",
        frozenset({"label_prior"}),
    ),
    AdapterInfo(
        "bbse",
        "tta.bbse:BBSE",
        "Detecting and Correcting for Label Shift with Black Box Predictors (ICML 2018)",
        "the label prior",
        "batch",
        frozenset({"confusion"}),
    ),
    AdapterInfo(
        "tsa",
        "tta.tsa:TSA",
        "Self-Supervised Aggregation of Diverse Experts for Test-Agnostic Long-Tailed Recognition (NeurIPS 2022)",
        "the weight of the global head",
        "batch",
        frozenset({"personal_head"}),
    ),
    AdapterInfo(
        "knn_per",
        "tta.knn_per:KNNPer",
        "Personalized Federated Learning through Local Memorization (ICML 2022)",
        "nothing: the head and the nearest training samples",
        "sample",
        frozenset({"datastore"}),
    ),
    AdapterInfo(
        "fedrod",
        "tta.fedrod:FedRoD",
        "On Bridging Generic and Personalized Federated Learning for Image Classification (ICLR 2022)",
        "nothing: the sum of both heads",
        "sample",
        frozenset({"residual_head"}),
    ),
    AdapterInfo(
        "fedicon",
        "tta.fedicon:FedICON",
        "Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning (2023)",
        "the encoder",
        "batch",
    ),
)

#: Every adapter by name.
ADAPTERS: dict[str, AdapterInfo] = {row.name: row for row in _ROWS}
