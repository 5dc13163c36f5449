"""What a training's strategy keeps from round to round beside the model.

FedAvgM keeps a velocity and its own copy of the model. The others keep nothing that changes a result: what
`configure_train` notes is noted anew in each round, and `PartialFedAvg` only spares messages (a client that has values
of its own keeps them, whatever comes).
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvgM, Strategy

from server.checkpoints import STRATEGY, Records

CURRENT, MOMENTUM = f"{STRATEGY}.current", f"{STRATEGY}.momentum"


def strategy_records(strategy: Strategy) -> Records:
    """Return a strategy's state between two rounds as records of a checkpoint; no records when it has none."""
    if not isinstance(strategy, FedAvgM) or strategy.current_arrays is None:
        return {}
    current = {name: array.numpy() for name, array in strategy.current_arrays.items()}
    if strategy.momentum_vector is None:
        return {CURRENT: current}
    return {CURRENT: current, MOMENTUM: dict(zip(current, strategy.momentum_vector, strict=True))}


def load_strategy_records(strategy: Strategy, records: Records) -> None:
    """Go on from `strategy_records`."""
    if isinstance(strategy, FedAvgM) and CURRENT in records:
        strategy.current_arrays = ArrayRecord({name: Array(value) for name, value in records[CURRENT].items()})
        strategy.momentum_vector = list(records[MOMENTUM].values()) if MOMENTUM in records else None
