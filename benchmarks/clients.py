"""Clients in this process, without a server: devices of a run's settings, and the requests that they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtta.client.device import Device
from fedtta.client.node import Node, make_device
from fedtta.client.serving import Served
from fedtta.client.state import MemoryState
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Summarized
from fedtta.messages.requests import AdapterRow, Evaluate, Identify, Summarize, TrainingTask
from fedtta.settings import Settings, to_json


def client_of(settings: Settings, partition: int) -> Device:
    """Return one client of a run, with private state that ends with the process.

    Raises
    ------
    ValueError
        As `fedtta.client.node.make_device`.
    """
    node = Node(str(partition), MemoryState(), memory=MemoryState())
    return make_device(Identify(**_common(settings)), node)


def summarize(device: Device, round: int, training: str, arrays: Arrays, wanted: Sequence[str]) -> Summarized:
    """Train a client's personal head on a network and return its statistics under it."""
    task = TrainingTask(training)
    return device.summarize(
        Summarize(round=round, task=task, arrays=arrays, wanted=list(wanted), **_common(device.settings))
    )


def serve(
    device: Device, round: int, training: str, arrays: Arrays, statistics: Arrays | None, row: AdapterRow
) -> Served:
    """Return a row's adapter on a client, with a network of its own."""
    more: dict[str, Any] = {"rows": [row], "shifts": [], "statistics": statistics, **_common(device.settings)}
    return device.serve(Evaluate(round=round, task=TrainingTask(training), arrays=arrays, **more), row)


def _common(settings: Settings) -> dict[str, Any]:
    return {"settings": to_json(settings), "run": "benchmark"}
