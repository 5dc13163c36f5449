"""What all tests share: one torch thread (bits depend on the number), Flower messages without a Flower process."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import hypothesis
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is no property
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _flower_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Message(...)` be made outside a Flower process."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
