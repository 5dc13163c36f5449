"""One client of a small federation of the embedded digits, trained through an agent's own `perform`."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.agent.config import AgentConfig
from client.agent.serving import Served
from client.evaluation import Row
from client.phases import Node, device_of, perform, round_of, task_of
from client.runtime import federation_of
from client.state import MemoryState
from client.work import Arrays, Done, Work
from models import build
from settings import Settings

Perform = Callable[[Work], Done]
SETTINGS = Settings(
    clients=3,
    partition="iid",
    image_size=16,
    local_epochs=12,
    learning_rate=0.1,
    augment=False,
    device="cpu",
    model="cnn",
    model_options="norm=batch",
)
TEST = ("original",)


def config(folder: Path, **changes: Any) -> AgentConfig:
    """Nothing is saved by itself, unless `changes` say so."""
    defaults: dict[str, Any] = {
        "partition_id": 0,
        "num_partitions": SETTINGS.clients,
        "state_dir": str(folder / "state"),
        "device": "cpu",
        "save_every_samples": 10**6,
        "save_every_seconds": 10.0**6,
    }
    return AgentConfig(**{**defaults, **changes})


def message(phase: str, round: int, run: str = "run1", settings: Settings = SETTINGS, **changes: Any) -> dict[str, Any]:
    """The config of a message."""
    own = {
        "server-round": round,
        "training": "cross_entropy",
        "rule": "joint",
        "objective": "cross_entropy",
        "run": run,
    }
    return {**settings.flat(), **own, **changes}


@lru_cache(maxsize=1)
def initial() -> Arrays:
    network = build("cnn", 10, image_size=SETTINGS.image_size, norm="batch", seed=1)
    return {name: value.numpy().copy() for name, value in network.global_state().items()}


def evaluation(arrays: Arrays, statistics: Arrays | None, run: str = "run1", round: int = 2, **changes: Any) -> Work:
    rows = {"labels": ["fedavg"], "adapters": ["none"], "options": [json.dumps({})], "bases": ["global"]}
    records: dict[str, Mapping[str, NDArray[Any]]] = {"arrays": arrays}
    if statistics is not None:
        records["statistics"] = statistics
    content = message("evaluate", round, run, **{**rows, "shifts-resolved": list(TEST), **changes})
    return Work("evaluate", content, {name: dict(record) for name, record in records.items()})


def train(perform: Perform, run: str = "run1", arrays: Arrays | None = None, **changes: Any) -> tuple[Work, Done]:
    """Train a round, take statistics and evaluate; return the evaluation's message and its answer."""
    task = {key: value for key, value in changes.items() if key in ("training", "rule", "objective")}
    first = Work("train", message("train", 1, run, **task), {"arrays": arrays or initial()})
    trained = perform(first).records["arrays"]
    second = Work("statistics", message("statistics", 2, run, wanted=[], **task), {"arrays": trained})
    means = perform(second).records["statistics"]
    work = evaluation(trained, means, run, **changes)
    return work, perform(work)


@lru_cache(maxsize=1)
def trained() -> tuple[Node, Work]:
    """A client whose network is right on 9 of 10 digits, and the evaluation's message; its state is in memory."""
    node = Node(0, SETTINGS.clients, MemoryState(), settings={"device": "cpu"})
    work, _ = train(lambda message: perform(message, node))
    return node, work


@lru_cache(maxsize=8)
def served(adapter: str, base: str = "global", **options: Any) -> Served:
    """What `Device.serve` makes of the trained client; to be left as it is."""
    node, work = trained()
    records = work.records["arrays"], work.records["statistics"]
    row = Row(adapter, adapter, options, base)
    rates = {"all": dict.fromkeys(work.records["arrays"], 0.01)}
    return device_of(work, node).serve(round_of(work), task_of(work), *records, row, rates)


def fork(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a function in a copy of this process, for killing; it gets one end of a pipe first."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def said(pipe: Connection, most: int) -> Any:
    """Return the last of the next `most` things that a process says; waits for each, but not for ever."""
    last = None
    for _ in range(most):
        assert pipe.poll(60), "the process says nothing"
        last = pipe.recv()
    return last


def killed(process: BaseProcess, pipe: Connection) -> Any:
    """Kill -9 a process; return the last thing it had said and nobody had heard, or None."""
    process.kill()
    process.join(30)
    assert process.exitcode == -9
    last = None
    while pipe.poll(0):
        try:
            last = pipe.recv()
        except EOFError:
            break
    return last


def unseen() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images that the client has not trained on, and their labels."""
    federation = federation_of(SETTINGS)
    index = np.setdiff1d(np.arange(len(federation.images)), federation.splits[0].train)
    return federation.images.pixels[index], federation.images.labels[index]


def pictures(start: int = 0, count: int = 40) -> NDArray[np.uint8]:
    """Test images of the client, uint8 [count, 3, 16, 16], over and over."""
    federation = federation_of(SETTINGS)
    test = federation.splits[0].test
    return federation.images.pixels[test[np.arange(start, start + count) % len(test)]]


def labels(start: int = 0, count: int = 40) -> NDArray[np.int64]:
    federation = federation_of(SETTINGS)
    test = federation.splits[0].test
    return federation.images.labels[test[np.arange(start, start + count) % len(test)]]
