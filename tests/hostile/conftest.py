"""Devices under a hostile server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtta.benchmarks.reconstruction import SIZE
from fedtta.client.agent.core import Agent
from fedtta.client.agent.server import serve
from fedtta.client.policy import Policy
from fedtta.messages import agent_pb2_grpc
from fedtta.messages.requests import (
    Identify,
)
from tests.client.agent import fake
from tests.hostile.device import (
    OPEN,
    TOUCHED,
    WATCHED,
    agent_in,
    common,
)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(policy: Policy | None = None, **keys: Any) -> Agent:
        made.append(agent_in(tmp_path / str(len(made)), policy, **keys))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A device with the default policy, for messages that change nothing."""
    agent = agent_in(tmp_path_factory.mktemp("shared"))
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data of a device's own: images of noise, of which none is like another."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("noise") / "data.npz"
    images = rng.integers(0, 256, (1000, 1, SIZE, SIZE), np.uint8)
    np.savez(path, x=images, y=np.arange(1000) % 10)
    return f"npz:{path}"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of images and files that no message may touch."""
    folder = tmp_path / "outside"
    (folder / "a").mkdir(parents=True)
    (folder / "secret.npz").write_bytes(b"secret")
    WATCHED[:], TOUCHED[:] = [str(folder), "/etc/"], []
    yield folder
    WATCHED.clear()


@pytest.fixture
def socket() -> Iterator[tuple[Agent, agent_pb2_grpc.RelayStub]]:
    """A device whose owner bounds no epochs, behind its socket."""
    with fake.folder() as folder:
        agent = agent_in(folder, dataclasses.replace(OPEN, most_seconds=60.0))
        agent.perform(Identify(**common()))  # what is imported and loaded once takes no part in the times below
        running = serve(agent, agent.config)
        with fake.channel(running.relay) as line:
            yield agent, agent_pb2_grpc.RelayStub(line)
        running.stop(10.0)
        agent.close()
