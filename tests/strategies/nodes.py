"""Nodes of a collaborative run as functions, and rounds with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedtta.messages.arrays import digest
from fedtta.strategies import COLLABORATIONS, Collaborative
from tests.flower import LocalGrid, record, request

NETWORK = {"conv": np.arange(6, dtype=np.float32), "head": np.ones((2, 2), np.float32)}
START = {"gamma": np.ones(2, np.float32), "bn.running_var": np.full(2, 0.1, np.float32)}


class Device:
    """A node that adds its own step to the shared arrays, from its mixture or from the start; may be off."""

    def __init__(self, number: int, examples: int = 1) -> None:
        self.number, self.examples, self.on = number, examples, True
        self.step = np.float32(0.1 * number + 0.01)
        self.state = {name: value.copy() for name, value in START.items()}
        self.network: dict[str, np.ndarray] | None = None
        self.received: list[set[str]] = []

    @property
    def normalisation(self) -> ArrayRecord:
        return record(**{"bn.mean": np.array([self.number, 0.0]), "bn.variance": np.array([1.0, self.number])})

    def __call__(self, message: Message) -> RecordDict | None:
        content, config = message.content, message.content["config"]
        self.received.append(set(content))
        assert message.metadata.message_type == "train.adapt"
        if not self.on:
            return None
        if "arrays" in content:
            self.network = {name: array.numpy() for name, array in content["arrays"].items()}
        assert self.network is not None, "the network never came"
        assert digest(self.network) == config["network"]
        if "shared" in content:
            self.state = {name: array.numpy() for name, array in content["shared"].items()}
        self.state = {name: value + self.step for name, value in self.state.items()}
        records = {"shared": record(**self.state), "metrics": MetricRecord({"num-examples": self.examples})}
        if config["send-normalisation"]:
            records["normalisation"] = self.normalisation
        if config["send-start"]:
            records["start"] = record(**START)
        return RecordDict(records)


def begun(name: str = "fedavg") -> Collaborative:
    """Return a collaboration that has its network."""
    strategy = COLLABORATIONS[name]()
    strategy.begin(record(**NETWORK))
    return strategy


def rounds(strategy: Collaborative, grid: LocalGrid, numbers: range) -> None:
    """Run rounds of a collaboration."""
    for server_round in numbers:
        messages = list(strategy.configure_train(server_round, record(), ConfigRecord({"seed": 3}), grid))
        replies = list(grid.send_and_receive(messages))
        assert strategy.aggregate_train(server_round, replies) == (None, None)


def shared_reply(node: int, examples: float = 1, **records: Any) -> Message:
    """Return a reply of a node with the given array records."""
    metrics = MetricRecord({"num-examples": examples})
    return Message(RecordDict({**records, "metrics": metrics}), reply_to=request(node, "train.adapt"))
