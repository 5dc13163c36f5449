"""The names of server aggregations and of test-time collaborations, and their classes.

A new aggregation is a class in a file of its own and a line here; what a run must know about it stands on the class
(`fedtta.strategies.aggregation.Aggregation`, `fedtta.strategies.collaborative.Collaborative`).
"""

from __future__ import annotations

from fedtta.strategies.aggregation import Aggregation
from fedtta.strategies.baselines import FedAvgAtTestTime, FedAvgMAtTestTime, FedProxAtTestTime, Local
from fedtta.strategies.collaborative import Collaborative
from fedtta.strategies.fedamp import FedAMP
from fedtta.strategies.fedavg import FedAvg, FedAvgM, FedProx
from fedtta.strategies.gma import GMA
from fedtta.strategies.pfedbbn import PFedBBN
from fedtta.strategies.pfedgraph import PFedGraph
from fedtta.strategies.qffl import QFFL
from fedtta.strategies.robust import FedKrum, FedMedian, FedMultiKrum, FedTrimmedAvg

#: Aggregations of trained models: values of the setting `aggregation`.
AGGREGATIONS: dict[str, type[Aggregation]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavgm": FedAvgM,
    "qffl": QFFL,
    "gma": GMA,
    "fedmedian": FedMedian,
    "fedtrimmedavg": FedTrimmedAvg,
    "krum": FedKrum,
    "multikrum": FedMultiKrum,
}

NO_COLLABORATION = "none"
#: Rules that mix clients' arrays at test time: names in the setting `collaborations`.
COLLABORATIONS: dict[str, type[Collaborative]] = {
    NO_COLLABORATION: Local,
    "fedavg": FedAvgAtTestTime,
    "fedprox": FedProxAtTestTime,
    "fedavgm": FedAvgMAtTestTime,
    "pfedgraph": PFedGraph,
    "fedamp": FedAMP,
    "pfedbbn": PFedBBN,
}


def aggregation_names(byzantine_robust: bool = False) -> tuple[str, ...]:
    """Return the names of all aggregations, or of the Byzantine-robust ones."""
    return tuple(name for name, one in AGGREGATIONS.items() if one.byzantine_robust or not byzantine_robust)
