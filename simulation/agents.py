"""Agents of this machine: started beside a deployment's SuperNodes, and asked what they have learned."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tomli_w
from numpy.typing import NDArray

from client.agent import agent_pb2, agent_pb2_grpc
from simulation.superlink import POLL, PROJECT, FlowerError, environment

LOG = "agent.log"
PATIENCE = 120.0  # seconds that an agent may take to come up, and to answer


def agent_config(folder: Path, sockets: Path, partition: int, partitions: int, chosen: Mapping[str, Any]) -> Path:
    """Write `device-<i>.toml` and return its path; the agent keeps everything in `agent-<i>` beside it.

    Parameters
    ----------
    folder : Path
        Absolute.
    sockets : Path
        Where the agents' sockets are; short, for a socket's path may have some 107 bytes.
    chosen : mapping
        Further keys, such as `adapter`.
    """
    content = {
        "partition-id": partition,
        "num-partitions": partitions,
        "state-dir": str(folder / f"agent-{partition}"),
        "listen": f"unix:{sockets}/a{partition}",
        "relay": f"unix:{sockets}/r{partition}",
        **chosen,
    }
    path = folder / f"device-{partition}.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


@contextlib.contextmanager
def sockets_folder() -> Iterator[Path]:
    """Make a folder with a short path that only its owner can enter; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fedtta-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def agent_command(config: Path) -> list[str]:
    """Return how an agent is started, from the project's folder."""
    return [sys.executable, "-m", "client.agent", "--config", str(config)]


def start_agent(home: Path, config: Path) -> subprocess.Popen[bytes]:
    """Start an agent in a home inside that of the deployment, which stops it with all else."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOG).open("ab") as log:
        return subprocess.Popen(
            agent_command(config), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=PROJECT, env=environment(home), start_new_session=True,
        )  # fmt: skip


def wait_for(agents: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until all agents, address → process, serve, as `docker/health.py` sees it.

    Raises
    ------
    FlowerError
        One has ended, or does not serve within `PATIENCE` seconds.
    """
    command = [sys.executable, str(PROJECT / "docker" / "health.py"), *agents, "--wait", str(PATIENCE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as probe:
        while probe.poll() is None:
            for address, process in agents.items():
                if process.poll() is not None:
                    probe.kill()
                    raise FlowerError(f"the agent at {address} ended with status {process.returncode}")
            time.sleep(POLL)
        assert probe.stdout is not None
        told = probe.stdout.read()
    if probe.returncode:
        raise FlowerError(f"an agent does not serve: {told}")


def ask(address: str, images: NDArray[np.uint8]) -> tuple[agent_pb2.StatusReply, agent_pb2.PredictReply | None]:
    """Let an agent predict images [B, C, H, W] (none: B = 0), then return its status and the reply.

    Raises
    ------
    FlowerError
        It does not answer, or refuses; the message has its reason.
    """
    with grpc.insecure_channel(address) as channel:
        stub = agent_pb2_grpc.PredictorStub(channel)
        try:
            reply = None
            if len(images):
                sent = agent_pb2.Images(
                    kind=agent_pb2.Images.UINT8, shape=images.shape, values=np.ascontiguousarray(images).tobytes()
                )
                request = agent_pb2.PredictRequest(id="deploy-local", images=sent)
                reply = stub.Predict(request, timeout=PATIENCE, wait_for_ready=True)
            return stub.Status(agent_pb2.StatusRequest(), timeout=PATIENCE, wait_for_ready=True), reply
        except grpc.RpcError as error:
            raise FlowerError(f"the agent at {address}: {error.code().name}: {error.details()}") from error


def predicted(reply: agent_pb2.PredictReply) -> NDArray[np.int64]:
    """Return the classes [B] that an agent predicted."""
    table = np.frombuffer(reply.probabilities, "<f4").reshape(reply.samples, reply.classes)
    return table.argmax(1)
