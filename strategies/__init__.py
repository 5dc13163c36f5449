"""Server-side aggregation: one file a rule, each a pure function over arrays and a thin Flower strategy.

The package depends on Flower and numpy only, so that any Flower app can use it. `strategies.registry` has the names.
"""

from strategies.aggregation import Aggregation, RobustAggregator, facts
from strategies.arrays import weighted_mean
from strategies.atp import ATPRates
from strategies.baselines import FedAvgAtTestTime, FedAvgMAtTestTime, FedProxAtTestTime, Local
from strategies.broadcast import Broadcast
from strategies.collaborative import Collaborative
from strategies.fedamp import FedAMP
from strategies.fedavg import FedAvg, FedAvgM, FedProx
from strategies.gma import GMA
from strategies.partial import PartialFedAvg
from strategies.pfedbbn import PFedBBN
from strategies.pfedgraph import PFedGraph
from strategies.qffl import QFFL
from strategies.registry import AGGREGATIONS, COLLABORATIONS, aggregation_names
from strategies.robust import FedKrum, FedMedian, FedMultiKrum, FedTrimmedAvg, Krum, Median, RobustFedAvg, TrimmedMean
from strategies.statistics_fedavg import StatisticsFedAvg

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
