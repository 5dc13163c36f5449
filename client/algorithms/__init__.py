"""Local algorithms: what a client does in a round of training, one file each."""

from __future__ import annotations

from client.algorithms.apfl import APFL
from client.algorithms.base import LocalAlgorithm, LocalContext
from client.algorithms.ditto import Ditto
from client.algorithms.fedavg import FedAvg
from client.algorithms.fedicon import Classifier, Contrastive
from client.algorithms.fedrep import FedRep
from client.algorithms.fedrod import FedRoD
from client.algorithms.ttt import TTT

__all__ = [
    "ALGORITHMS",
    "APFL",
    "TTT",
    "Classifier",
    "Contrastive",
    "Ditto",
    "FedAvg",
    "FedRep",
    "FedRoD",
    "LocalAlgorithm",
    "LocalContext",
    "find_algorithm",
]

#: Every local algorithm by name; "personalized" trains like "fedavg" and tests the network as it is (FedPer, FedBN).
ALGORITHMS: dict[str, LocalAlgorithm] = {
    "fedavg": FedAvg(),
    "personalized": FedAvg(finetune=False),
    "fedrep": FedRep(),
    "ditto": Ditto(),
    "apfl": APFL(),
    "fedrod": FedRoD(),
    "ttt": TTT(),
    "supervised_contrastive": Contrastive(labels=True),
    "self_contrastive": Contrastive(labels=False),
    "classifier": Classifier(),
}


def find_algorithm(name: str) -> LocalAlgorithm:
    """Return a local algorithm by name; ValueError lists what exists."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown local algorithm {name!r}; there are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
