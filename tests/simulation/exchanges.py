"""The exchanges of the contract of transports: the same requests over any transport, and what came back as plain data.

It runs in the process that has the transport: in the tests', or in that of a ServerApp, whose answers are then read
from files. Nothing here needs pytest.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.messages.arrays import Arrays, digest
from fedtta.messages.requests import (
    Adapt,
    AdapterRow,
    Evaluate,
    Identify,
    RefineRates,
    Request,
    Summarize,
    Train,
    TrainingTask,
)
from fedtta.messages.transport import Addressed, Answer, Transport
from fedtta.models import build
from fedtta.settings import Settings, to_json
from fedtta.tta.atp import zero_rates

CLIENTS = 2
PATIENCE = 300.0  # seconds for an exchange that has all the time it needs
TOO_SHORT = 1e-3  # seconds
SETTINGS = Settings(
    clients=CLIENTS, partition="iid", fraction=0.3, image_size=16, device="cpu", local_epochs=1, augment=False,
    model="resnet20-bn", model_options="depth=8;width=4", batch_size=16, shifts="original", workers=2,
    collaborations="fedavg", stream_mix="iid", stream_size=20, stream_batch=10, stream_rounds=2,
)  # fmt: skip
TASK = TrainingTask("contract")
UNKNOWN = 999
TIMES = ("seconds", "context-bytes")


@dataclass(frozen=True)
class Heard:
    """An answer: partition of the client (UNKNOWN: none), why there is no reply, and the reply in plain form."""

    partition: int
    kind: str
    reason: str
    reply: str  # its kind on the wire; empty: none
    values: dict[str, Any]
    arrays: dict[str, bytes]
    read_only: bool


Played = dict[str, list[Heard]]


def play(transport: Transport, settings: Settings = SETTINGS, too_short: float = TOO_SHORT) -> Played:
    """Exchange the requests of the contract and return the answers by the name of the request, sorted by partition.

    `too_short` is a timeout in which no two clients train, in seconds. Over gRPC each request costs a process, so an
    exchange shows several things: the first one finds the nodes; most carry another request to each client; the last
    one, in reversed order after late replies, has a client that fails, one that does not, and a node that is not there.
    """
    nodes, model = _nodes(transport), _model(settings)
    sent = {name: value.tobytes() for name, value in model.items()}
    common: dict[str, Any] = {"settings": to_json(settings), "run": "contract"}
    network: dict[str, Any] = {"network": digest(model), "arrays": model}
    rates = {name: np.float64(0.01) * np.ones(()) for name in zero_rates(_network(settings))}
    train = Train(round=1, task=TASK, arrays=model, **common)
    coded = dataclasses.replace(train, task=TrainingTask("coded"), update_format="int8")
    requests: dict[str, Request] = {
        "train": train,
        "summarize": Summarize(round=2, task=TASK, arrays=model, **common),
        "refine": RefineRates(round=1, variant="all", rates=rates, **network, **common),
        "adapt": Adapt(round=1, cell="cell", row=AdapterRow("bbn", "bbn"), share="statistics", **network, **common),
        "evaluate": Evaluate(
            round=2, task=TASK, arrays=model, rows=[AdapterRow("fedavg", "none")], shifts=["original"], **common
        ),
        "int8": coded,
        "int8 later": dataclasses.replace(coded, round=2),
        "broken": dataclasses.replace(train, arrays={name: value[..., :0] for name, value in model.items()}),
        "absent": train,
        "late": dataclasses.replace(train, task=TrainingTask("late")),
        "train again": train,
    }
    identify = Identify(**common)
    identified = list(transport.exchange([Addressed(node, identify) for node in nodes], PATIENCE))
    partitions = {one.node: int(one.reply.name) for one in identified}  # type: ignore[union-attr]
    first, second = sorted(partitions, key=partitions.__getitem__)
    played: Played = {"identify": [_heard(one, partitions[one.node]) for one in identified]}

    def exchange(*asked: tuple[int, str], timeout: float = PATIENCE) -> None:
        names = dict(asked)
        for one in transport.exchange([Addressed(node, requests[name]) for node, name in asked], timeout):
            played.setdefault(names[one.node], []).append(_heard(one, partitions.get(one.node, UNKNOWN)))

    exchange((first, "train"), (second, "train"))
    exchange((first, "summarize"), (second, "refine"))
    exchange((first, "adapt"), (second, "int8"))
    exchange((first, "evaluate"), (second, "int8 later"))
    exchange((first, "late"), (second, "late"), timeout=too_short)
    exchange((second, "broken"), (first, "train again"), (2**40 + 1, "absent"))
    assert {name: value.tobytes() for name, value in model.items()} == sent, "a client changed the arrays of a request"
    return {name: sorted(heard, key=lambda one: one.partition) for name, heard in played.items()}


def _nodes(transport: Transport) -> list[int]:
    """Wait for all nodes."""
    end = time.monotonic() + PATIENCE
    while len(nodes := transport.nodes()) < CLIENTS:
        assert time.monotonic() < end, f"only nodes {nodes} are connected"
        time.sleep(0.2)
    return nodes


def _network(settings: Settings) -> Any:
    options = {"depth": 8, "width": 4}
    return build("resnet20-bn", 10, image_size=settings.image_size, seed=1, **options)


def _model(settings: Settings) -> Arrays:
    return {name: value.numpy().copy() for name, value in _network(settings).global_state().items()}


def _heard(answer: Answer, partition: int) -> Heard:
    if answer.reply is None:
        return Heard(partition, answer.kind, answer.reason, "", {}, {}, True)
    record = answer.reply.to_record()
    arrays = {f"{name}/{key}": value for name, one in record.arrays.items() for key, value in one.items()}
    read_only = not any(value.flags.writeable for value in arrays.values())
    stored = {
        name: value.dtype.str.encode() + str(value.shape).encode() + value.tobytes() for name, value in arrays.items()
    }
    return Heard(partition, answer.kind, answer.reason, record.kind, _timeless(record.values), stored, read_only)


def _timeless(value: Any) -> Any:
    """Return values without times, and without what an agent did with the model, which only the relay reports."""
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in (*TIMES, "served")}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def save(played: Played, folder: Path) -> None:
    """Write what `load` reads."""

    def plain(heard: Heard) -> dict[str, Any]:
        return dataclasses.asdict(heard) | {"arrays": {name: value.hex() for name, value in heard.arrays.items()}}

    content = {name: [plain(one) for one in answers] for name, answers in played.items()}
    (folder / "played.json").write_text(json.dumps(content), encoding="utf-8")


def load(folder: Path) -> Played:
    """Return what was saved."""
    content = json.loads((folder / "played.json").read_text(encoding="utf-8"))
    return {name: [_made(one) for one in answers] for name, answers in content.items()}


def _made(content: dict[str, Any]) -> Heard:
    return Heard(**{**content, "arrays": {name: bytes.fromhex(value) for name, value in content["arrays"].items()}})
