"""One client of a small federation of the embedded digits, trained by typed requests."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.config import AgentConfig
from fedtta.client.node import Node, make_device, perform
from fedtta.client.policy import Policy
from fedtta.client.resources import federation_of
from fedtta.client.serving import Served
from fedtta.client.state import MemoryState
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Evaluated, Reply
from fedtta.messages.requests import AdapterRow, Evaluate, Request, Summarize, Train, TrainingTask
from fedtta.models import build
from fedtta.settings import Settings, to_json

Perform = Callable[[Request], Reply]
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
#: Replies are those of a simulation; runs are forgotten at once.
EXACT = Policy(
    count_step=1, least_batch_size=1, least_effective_samples=1.0, least_active_share=0.0, least_days_kept=0.0
)
TASK = TrainingTask("cross_entropy")


def config(folder: Path, **changes: Any) -> AgentConfig:
    """Nothing is saved by itself, unless `changes` say so."""
    defaults: dict[str, Any] = {
        "name": "0",
        "state_dir": str(folder / "state"),
        "device": "cpu",
        "save_every_samples": 10**6,
        "save_every_seconds": 10.0**6,
        "policy": EXACT,
    }
    return AgentConfig(**{**defaults, **changes})


def common(run: str = "run1") -> dict[str, Any]:
    """The fields of every request."""
    return {"settings": to_json(SETTINGS), "run": run}


@lru_cache(maxsize=1)
def initial() -> Arrays:
    network = build("cnn", 10, image_size=SETTINGS.image_size, norm="batch", seed=1)
    return {name: value.numpy().copy() for name, value in network.global_state().items()}


def evaluation(
    arrays: Arrays, statistics: Arrays | None, run: str = "run1", task: TrainingTask = TASK, round: int = 2
) -> Evaluate:
    rows = [AdapterRow("fedavg", "none")]
    return Evaluate(
        round=round, task=task, arrays=arrays, statistics=statistics, rows=rows, shifts=["original"], **common(run)
    )


def train(perform: Perform) -> tuple[Evaluate, Evaluated]:
    """Train a round, take statistics and evaluate; return the evaluation's request and its reply."""
    trained: Any = perform(Train(round=1, task=TASK, arrays=initial(), **common()))
    means: Any = perform(Summarize(round=2, task=TASK, arrays=trained.arrays, **common()))
    request = evaluation(trained.arrays, means.statistics)
    reply = perform(request)
    assert isinstance(reply, Evaluated)
    return request, reply


@lru_cache(maxsize=1)
def trained() -> tuple[Node, Evaluate]:
    """A client whose network is right on 9 of 10 digits, and the evaluation's request; its state is in memory."""
    node = Node("0", MemoryState(), settings={"device": "cpu"})
    return node, train(lambda request: perform(request, node))[0]


@lru_cache(maxsize=8)
def served(adapter: str, base: str = "global", **options: Any) -> Served:
    """What `Device.serve` makes of the trained client; to be left as it is."""
    node, request = trained()
    rates = {"all": {name: np.array(0.01) for name in request.arrays}}
    row = AdapterRow(adapter, adapter, options, base)  # type: ignore[arg-type]
    return make_device(request, node).serve(dataclasses.replace(request, rates=rates), row)


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
    """Kill -9 a process; return its last output that was not read, or None."""
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


def sample_images(start: int = 0, count: int = 40) -> NDArray[np.uint8]:
    """Test images of the client, uint8 [count, 3, 16, 16], over and over."""
    federation = federation_of(SETTINGS)
    test = federation.splits[0].test
    return federation.images.pixels[test[np.arange(start, start + count) % len(test)]]


def labels(start: int = 0, count: int = 40) -> NDArray[np.int64]:
    federation = federation_of(SETTINGS)
    test = federation.splits[0].test
    return federation.images.labels[test[np.arange(start, start + count) % len(test)]]
