"""Server-side aggregation rules: one file a rule, each a Flower strategy on top of pure functions.

They know Flower and arrays only, so that any Flower app can use them.
"""

from flwr.serverapp.strategy import FedAvg

from strategies.average import weighted_mean
from strategies.statistics_fedavg import StatisticsFedAvg

__all__ = ["STRATEGIES", "FedAvg", "StatisticsFedAvg", "weighted_mean"]

#: Strategies that a method row can name.
STRATEGIES = {"FedAvg": FedAvg, "StatisticsFedAvg": StatisticsFedAvg}
