"""What a training's strategy keeps from round to round beside the model, as records of a checkpoint.

A strategy says itself what that is: `strategies.Aggregation.state_arrays`.
"""

from __future__ import annotations

from flwr.serverapp.strategy import Strategy

from server.checkpoints import STRATEGY, Records
from strategies import facts


def strategy_records(strategy: Strategy) -> Records:
    """Return a strategy's state between two rounds as records of a checkpoint; no records when it has none."""
    return {f"{STRATEGY}.{group}": arrays for group, arrays in facts(strategy).state_arrays().items()}


def load_strategy_records(strategy: Strategy, records: Records) -> None:
    """Go on from `strategy_records`."""
    prefix = f"{STRATEGY}."
    state = {key.removeprefix(prefix): arrays for key, arrays in records.items() if key.startswith(prefix)}
    facts(strategy).load_state_arrays(state)
