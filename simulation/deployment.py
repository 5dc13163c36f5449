"""Deployments on this machine: a SuperLink, SuperNodes that reach it over gRPC, and resident agents, as processes.

Each SuperNode has its own Flower home and working directory, as on a separate machine. By default connections are
encrypted, the SuperLink has a certificate and every node a registered key.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tomli_w
from numpy.typing import NDArray

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.simulation import superlink
from fedtta.simulation.certificates import KeysError
from fedtta.simulation.keys import Keys, make_keys
from fedtta.simulation.superlink import POLL, PROJECT, FlowerError, Scalar, environment, free_ports

NODE_LOG = "supernode.log"
TAIL = 30  # last lines of each log that an error shows
AGENT_LOG = "agent.log"
RESTART = 65.0  # seconds until an ended SuperNode is started again, as docker/systemd/fedtta-supernode.service
PATIENCE = 120.0  # seconds for an agent to start, and to answer


@dataclass(frozen=True)
class Deployed:
    """A running deployment.

    Parameters
    ----------
    fleet : str
        Address of the SuperLink for nodes.
    keys : Keys or None
        None: insecure.
    nodes : list
        The SuperNodes' processes.
    """

    fleet: str
    keys: Keys | None
    nodes: list[subprocess.Popen[bytes]]


@contextlib.contextmanager
def deployment(
    home: Path, nodes: Sequence[Mapping[str, Scalar]], insecure: bool = False, keys: Path | None = None
) -> Iterator[Deployed]:
    """Run a SuperLink and one SuperNode for each node config, and stop all of their processes at the end.

    This does not wait for the nodes, because the server does: a node that cannot start fails the first run.

    Parameters
    ----------
    home : Path
        Absolute; node i has the home `node-<i>`. Keys of an earlier deployment in this home are used.
    nodes : sequence of mapping
        Node configs, such as {"name": "site-a", "state-dir": "/var/lib/fedtta"}.
    insecure : bool
        Neither encrypt connections nor authenticate nodes.
    keys : Path, optional
        Folder of keys, made if missing; by default `keys` in `home`.

    Raises
    ------
    KeysError
        Existing keys cannot be used.
    FlowerError
        The SuperLink does not answer in time, or a process could not be stopped.
    """
    made = None if insecure else make_keys(keys or home / "keys", len(nodes))[0]
    for private in [made.node(number)[0] for number in range(len(nodes))] if made else ():
        if not private.is_file():
            raise KeysError(f"{private} is missing: it must be here to start the SuperNode on this machine")
    # leaving the SuperLink stops all processes of its home, before the stack waits for them
    with contextlib.ExitStack() as started, superlink.superlink(home, simulation=False, keys=made) as fleet:
        if made:  # a node with an unregistered key is refused and ends
            keys_of = [made.node(number)[1] for number in range(len(nodes))]
            superlink.register(home, keys_of, [str(config.get("name", "")) for config in nodes])
        running = []
        for number, config in enumerate(nodes):
            own = (made.ca, made.node(number)[0]) if made else None
            running.append(started.enter_context(supernode(home / f"node-{number}", fleet, config, own)))
        yield Deployed(fleet, made, running)


def supernode(
    home: Path, fleet: str, config: Mapping[str, Scalar], keys: tuple[Path, Path] | None, options: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a SuperNode in its own Flower home and return its process, which the caller stops.

    `keys` are the authority's certificate and the node's private key; None: insecure. `options` are further arguments
    of `fedtta supernode`.
    """
    home.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    with (home / NODE_LOG).open("ab") as log:
        return subprocess.Popen(
            [*supernode_command(fleet, port, config, keys), *options],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=home, env=node_environment(home), start_new_session=True,
        )  # fmt: skip


def node_environment(home: Path) -> dict[str, str]:
    """Return the environment of a SuperNode: this project is where its command is found, from any working directory."""
    environ = environment(home)
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), environ.get("PYTHONPATH"))))}


class Supervised:
    """A SuperNode that is started again when it ends, as a service manager would.

    Flower refuses a killed node's successor until the heartbeat of the old one has lapsed, a minute later. One that is
    accepted at that very moment hides from the server that its predecessor has lost a message: it is started later.

    Parameters
    ----------
    start : callable
        Starts the process.

    Attributes
    ----------
    process : Popen
        The last one that was started, at the time `since` of the monotonic clock.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._ended: float | None = None
        self.process = start()
        self.since = time.monotonic()

    def tend(self) -> int | None:
        """Start the SuperNode again if it ended `RESTART` seconds ago; return the status of one that has just ended."""
        status = self.process.poll()
        if status is None:
            return None
        if self._ended is None:
            self._ended = time.monotonic()
            return status
        if time.monotonic() - self._ended >= RESTART:
            self._ended, self.process, self.since = None, self._start(), time.monotonic()
        return None

    def replace(self) -> None:
        """Kill the SuperNode: `tend` starts it again."""
        self.process.kill()


def supernode_command(fleet: str, port: int, config: Mapping[str, Scalar], keys: tuple[Path, Path] | None) -> list[str]:
    """Return the command of a SuperNode, which its own processes reach at `port` of this machine."""
    if keys:
        secure = ["--root-certificates", str(keys[0]), "--auth-supernode-private-key", str(keys[1])]
    else:
        secure = ["--insecure"]
    return [
        sys.executable, "-m", "fedtta", "supernode", *secure, "--superlink", fleet,
        "--host", "127.0.0.1", "--port", str(port), "--node-config", node_config(config),
    ]  # fmt: skip


def node_config(config: Mapping[str, Scalar]) -> str:
    """Return the text for `--node-config`, strings in quotes.

    Raises
    ------
    ValueError
        A string contains a quote, which Flower cannot read.
    """
    for key, value in config.items():
        if isinstance(value, str) and ('"' in value or "'" in value):
            raise ValueError(f"{key} = {value!r}: allowed is a text without quotes")
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def run(home: Path, config: Mapping[str, Scalar], timeout: float, show: bool = False, project: Path = PROJECT) -> None:
    """Run an app on the nodes of a deployment and wait for its end; see `superlink.run`.

    Raises
    ------
    FlowerError
        Flower refused the run, or it did not complete; the message has Flower's reason and the nodes' logs.
    """
    try:
        superlink.run(home, config, timeout, show, project=project)
    except FlowerError as error:
        raise FlowerError(f"{error}\n{logs(home, f'*/{NODE_LOG}')}") from error


def logs(home: Path, pattern: str) -> str:
    """Return the last lines of the logs in `home` whose paths match."""
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(home.glob(pattern))}
    return "\n".join(f"{path.parent.name}:\n" + "\n".join(text.splitlines()[-TAIL:]) for path, text in texts.items())


#: Policy of agents on the operator's own machine: what a simulation may do, they do, with the same numbers.
TRUSTING: dict[str, Scalar] = {
    **dict.fromkeys(("phases", "models", "datasets", "dataset-options", "statistics"), "*"),
    **dict.fromkeys(("least-samples", "least-batch-size", "least-clients", "count-step"), 1),
    **dict.fromkeys(
        ("most-epochs", "most-memory-mb", "most-state-mb", "messages-per-hour", "evaluations-per-day"), 10**6
    ),
    "least-train-part": 0.0,
    "least-effective-samples": 1.0,
    "least-active-share": 0.0,
    "most-image-size": 1024,
    "most-message-mb": 1024,
    "least-days-kept": 0.0,
    "download": True,
    "serve": "any",
}


def agent_config(folder: Path, sockets: Path, name: str, chosen: Mapping[str, Any]) -> Path:
    """Write an agent's `device-<name>.toml` and return its path; the agent's state is in `agent-<name>` beside it.

    Parameters
    ----------
    folder : Path
        Absolute.
    sockets : Path
        Folder of the agents' sockets; short, since the path of a socket has at most 107 bytes.
    chosen : mapping
        Further keys, such as `adapter`.
    """
    content = {
        "name": name,
        "state-dir": str(folder / f"agent-{name}"),
        "listen": f"unix:{sockets}/a{name}",
        "relay": f"unix:{sockets}/r{name}",
        "policy": TRUSTING,
        **chosen,
    }
    path = folder / f"device-{name}.toml"
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


@contextlib.contextmanager
def sockets_folder() -> Iterator[Path]:
    """Make a temporary folder with a short path that only its owner can enter."""
    with tempfile.TemporaryDirectory(prefix="fedtta-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def agent_command(config: Path) -> list[str]:
    """Return the command of an agent, for the project's folder."""
    return [sys.executable, "-m", "fedtta.client.agent", "--config", str(config)]


def start_agent(home: Path, config: Path) -> subprocess.Popen[bytes]:
    """Start an agent in a home inside that of the deployment, which stops it."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / AGENT_LOG).open("ab") as log:
        return subprocess.Popen(
            agent_command(config), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=PROJECT, env=environment(home), start_new_session=True,
        )  # fmt: skip


def wait_for_agents(agents: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until `docker/health.py` finds all agents (address → process) serving.

    Raises
    ------
    FlowerError
        An agent has ended, or does not serve within `PATIENCE` seconds.
    """
    command = [sys.executable, str(PROJECT / "docker" / "health.py"), *agents, "--wait", str(PATIENCE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as probe:
        try:
            while probe.poll() is None:
                for address, process in agents.items():
                    if process.poll() is not None:
                        raise FlowerError(f"the agent at {address} ended with status {process.returncode}")
                time.sleep(POLL)
        except BaseException:  # a signal, too: it would be waited for
            probe.kill()
            raise
        assert probe.stdout is not None
        output = probe.stdout.read()
    if probe.returncode:
        raise FlowerError(f"an agent does not serve: {output}")


def ask(address: str, images: NDArray[np.uint8]) -> tuple[pb.StatusReply, pb.PredictReply | None]:
    """Let an agent predict images uint8 [B, C, H, W], B >= 0; return its status and the reply (None for B = 0).

    Raises
    ------
    FlowerError
        The agent does not answer, or refuses; the message has its reason.
    """
    with grpc.insecure_channel(address) as channel:
        stub = agent_pb2_grpc.PredictorStub(channel)
        try:
            reply = None
            if len(images):
                request = pb.PredictRequest(id="deploy-local", images=protobuf.to_images(images))
                reply = stub.Predict(request, timeout=PATIENCE, wait_for_ready=True)
            return stub.Status(pb.StatusRequest(), timeout=PATIENCE, wait_for_ready=True), reply
        except grpc.RpcError as error:
            raise FlowerError(f"the agent at {address}: {error.code().name}: {error.details()}") from error


def predicted(reply: pb.PredictReply) -> NDArray[np.int64]:
    """Return the predicted classes [B]."""
    table = np.frombuffer(reply.probabilities, "<f4").reshape(reply.samples, reply.classes)
    return table.argmax(1)
