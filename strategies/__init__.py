"""Server-side aggregation: one file a rule, each a pure function over arrays and a thin Flower strategy.

The package depends on Flower and numpy only, so that any Flower app can use it. `fedtta.strategies.registry` has the
names.
"""

from fedtta.strategies.aggregation import Aggregation, RobustAggregator, facts
from fedtta.strategies.arrays import weighted_mean
from fedtta.strategies.atp import ATPRates
from fedtta.strategies.baselines import FedAvgAtTestTime, FedAvgMAtTestTime, FedProxAtTestTime, Local
from fedtta.strategies.broadcast import Broadcast
from fedtta.strategies.collaborative import Collaborative
from fedtta.strategies.fedamp import FedAMP
from fedtta.strategies.fedavg import FedAvg, FedAvgM, FedProx
from fedtta.strategies.gma import GMA
from fedtta.strategies.partial import PartialFedAvg
from fedtta.strategies.pfedbbn import PFedBBN
from fedtta.strategies.pfedgraph import PFedGraph
from fedtta.strategies.qffl import QFFL
from fedtta.strategies.registry import AGGREGATIONS, COLLABORATIONS, aggregation_names
from fedtta.strategies.robust import (
    FedKrum,
    FedMedian,
    FedMultiKrum,
    FedTrimmedAvg,
    Krum,
    Median,
    RobustFedAvg,
    TrimmedMean,
)
from fedtta.strategies.statistics_fedavg import StatisticsFedAvg

__all__ = [
    "AGGREGATIONS",
    "COLLABORATIONS",
    "GMA",
    "QFFL",
    "ATPRates",
    "Aggregation",
    "Broadcast",
    "Collaborative",
    "FedAMP",
    "FedAvg",
    "FedAvgAtTestTime",
    "FedAvgM",
    "FedAvgMAtTestTime",
    "FedKrum",
    "FedMedian",
    "FedMultiKrum",
    "FedProx",
    "FedProxAtTestTime",
    "FedTrimmedAvg",
    "Krum",
    "Local",
    "Median",
    "PFedBBN",
    "PFedGraph",
    "PartialFedAvg",
    "RobustAggregator",
    "RobustFedAvg",
    "StatisticsFedAvg",
    "TrimmedMean",
    "aggregation_names",
    "facts",
    "weighted_mean",
]
