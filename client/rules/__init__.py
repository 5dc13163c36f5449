"""Rules of local training by name, one file a rule."""

from __future__ import annotations

from client.rules.apfl import APFL
from client.rules.base import Local, Rule
from client.rules.contrastive import Classifier, Contrastive
from client.rules.ditto import Ditto
from client.rules.fedrep import FedRep
from client.rules.fedrod import FedRoD
from client.rules.joint import Joint
from client.rules.rotation import Rotation

__all__ = [
    "APFL",
    "RULES",
    "Classifier",
    "Contrastive",
    "Ditto",
    "FedRep",
    "FedRoD",
    "Joint",
    "Local",
    "Rotation",
    "Rule",
    "rule",
]

#: Every rule by name; "own" trains like "joint" and tests with the network as it is (FedPer, FedBN, Local).
RULES: dict[str, Rule] = {
    "joint": Joint(),
    "own": Joint(finetune=False),
    "fedrep": FedRep(),
    "ditto": Ditto(),
    "apfl": APFL(),
    "fedrod": FedRoD(),
    "rotation": Rotation(),
    "supervised_contrastive": Contrastive(labels=True),
    "self_contrastive": Contrastive(labels=False),
    "classifier": Classifier(),
}


def rule(name: str) -> Rule:
    """Return the rule called `name`; ValueError lists what exists."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; there are: {', '.join(RULES)}")
    return RULES[name]
