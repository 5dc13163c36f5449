"""Server-side aggregation rules: one file a rule, each a Flower strategy on top of pure functions.

They know Flower and arrays only, so that any Flower app can use them.
"""

from flwr.serverapp.strategy import FedAvg

from strategies import similarity
from strategies.atp import ATPRates
from strategies.average import weighted_mean
from strategies.broadcast import Broadcast
from strategies.collaborative import Collaborative
from strategies.fedamp import FedAMP
from strategies.fedavgm import FedAvgM
from strategies.fedprox import FedProx
from strategies.gma import GMA
from strategies.partial import PartialFedAvg
from strategies.pfedbbn import PFedBBN
from strategies.pfedgraph import PFedGraph
from strategies.qffl import QFFL
from strategies.robust import Krum, Median, Robust, Rule, TrimmedMean
from strategies.statistics_fedavg import StatisticsFedAvg
from strategies.uniform import FedProxAtTestTime, Local, TestTimeFedAvg, TestTimeFedAvgM

__all__ = [
    "COLLABORATIONS",
    "GMA",
    "QFFL",
    "ATPRates",
    "Broadcast",
    "Collaborative",
    "FedAMP",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedProxAtTestTime",
    "Krum",
    "Local",
    "Median",
    "PFedBBN",
    "PFedGraph",
    "PartialFedAvg",
    "Robust",
    "Rule",
    "StatisticsFedAvg",
    "TestTimeFedAvg",
    "TestTimeFedAvgM",
    "TrimmedMean",
    "similarity",
    "weighted_mean",
]

#: Rules by which clients help each other at test time.
COLLABORATIONS: dict[str, type[Collaborative]] = {
    "none": Local,
    "fedavg": TestTimeFedAvg,
    "fedprox": FedProxAtTestTime,
    "fedavgm": TestTimeFedAvgM,
    "pfedgraph": PFedGraph,
    "fedamp": FedAMP,
    "pfedbbn": PFedBBN,
}
