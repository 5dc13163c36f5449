"""Flower's own FedAvg as an app, beside which `fedtta.benchmarks.speed.fleet` measures ours.

It is bundled alone, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()  # the nodes are light devices: no code of the app runs there


class TimedFedAvg(FedAvg):
    """FedAvg that notes the seconds of each round, from configuration to aggregation."""

    seconds: list[float]

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """See FedAvg."""
        self._start = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
        """See FedAvg."""
        found = super().aggregate_train(*args, **kwargs)
        self.seconds.append(time.perf_counter() - self._start)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and write their seconds and the final model beside each other."""
    config, path = context.run_config, Path(str(context.run_config["results"]))
    nodes = int(config["nodes"])
    strategy = TimedFedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes, min_evaluate_nodes=0
    )
    strategy.seconds = []
    with np.load(str(config["initial"]), allow_pickle=False) as file:
        initial = ArrayRecord({name: Array(value) for name, value in file.items()})
    result = strategy.start(
        grid=grid, initial_arrays=initial, num_rounds=int(config["rounds"]), timeout=float(config["timeout"])
    )
    final: dict[str, Any] = {name: array.numpy() for name, array in result.arrays.items()}
    np.savez(path.with_suffix(".npz"), **final)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(strategy.seconds), encoding="utf-8")
    unfinished.replace(path)
