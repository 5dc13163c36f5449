"""A device under a hostile server: its owner's policy, what a server asks of it, and the files that it touches."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.benchmarks.reconstruction import SIZE, chosen_weights
from fedtta.client.agent import audit
from fedtta.client.agent.core import Agent
from fedtta.client.config import AgentConfig
from fedtta.client.node import make_device
from fedtta.client.policy import Policy
from fedtta.client.resources import federation_of
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import (
    AdapterRow,
    Evaluate,
    Identify,
    Masking,
    Summarize,
    Train,
    TrainingTask,
)
from fedtta.settings import Settings, to_json

#: A run of the digits whose weights the server has chosen, one step for all samples.
RUN = Settings(
    clients=3,
    partition="iid",
    image_size=SIZE,
    normalization="half",
    augment=False,
    local_epochs=1,
    batch_size=512,
    personal_epochs=0,
    learning_rate=0.1,
    weight_decay=0.0,
    device="cpu",
)
TASK = TrainingTask("t")
#: A device whose owner allows what was allowed before there was a policy.
OPEN = Policy(
    count_step=1, least_batch_size=1, least_samples=1, least_effective_samples=1.0, least_active_share=0.0,
    least_train_part=0.0, most_epochs=10**9, phases="*", statistics="*",
)  # fmt: skip
#: A device whose owner has models, statistics and rates leave in secure sums of at least four clients only.
HIDDEN = Policy(secure_aggregation=True, least_clients=4)
GRACE = 2.0  # seconds of computation after its deadline in which work has to end, however busy the machine is


def agent_in(folder: Path, policy: Policy | None = None, **keys: Any) -> Agent:
    given = {"name": "0", "state_dir": str(folder / "state"), "device": "cpu", "save_every_seconds": 1e6, **keys}
    return Agent(AgentConfig(**given, policy=policy or Policy()))


def common(run: str = "run1", **changes: Any) -> dict[str, Any]:
    return {"settings": to_json(RUN.replace(**changes)), "run": run}


def training(arrays: Arrays | None = None, run: str = "run1", **changes: Any) -> Train:
    return Train(round=1, task=TASK, arrays=arrays or chosen_weights(), **common(run, **changes))


def summary(wanted: list[str], **changes: Any) -> Summarize:
    return Summarize(round=1, task=TASK, arrays=chosen_weights(), wanted=wanted, **common(**changes))


def evaluation(*rows: AdapterRow, arrays: Arrays | None = None, **changes: Any) -> Evaluate:
    given = {"rows": list(rows) or [AdapterRow("plain", "none")], "shifts": ["original"]}
    return Evaluate(round=1, task=TASK, arrays=arrays or chosen_weights(), **given, **common(**changes))


def last(agent: Agent) -> dict[str, Any]:
    """The last line of the audit log."""
    return list(audit.lines(agent.config.state_folder))[-1]


def digits() -> np.ndarray:
    """The images that client 0 of the digits trains on."""
    federation = federation_of(RUN)
    return federation.images.pixels[federation.splits[0].train]


SITE = RUN.replace(classes=",".join(map(str, range(10))))


def own_images(agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    """The images of its own that a device trains on, and all others."""
    device = make_device(Identify(settings=to_json(SITE), run="run1"), agent.backend.node)
    split, images = device.federation.splits[0], device.federation.images
    return images.pixels[split.train], images.pixels[np.concatenate([split.validation, split.test])]


def masked(request: Any, members: int = 4, keys: int | None = None) -> Any:
    """The request for a secure sum; its keys are invented."""
    public = [f"{one:064x}" for one in range(2, 2 + (members if keys is None else keys))]
    return dataclasses.replace(
        request, masking=Masking("s", 1, list(range(1, members + 1)), public, members, 1000, "uniform")
    )


SECURE: dict[str, Any] = {"clients": 4, "secure_aggregation": True}


TOUCHED: list[str] = []
WATCHED: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        WATCHED
        and event in ("open", "os.listdir", "os.scandir")
        and isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        path = str(Path(os.fsdecode(arguments[0])).absolute())
        TOUCHED.extend(path for outside in WATCHED if path.startswith(outside))


sys.addaudithook(_watch)
