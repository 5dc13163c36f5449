"""The app on real nodes of this machine: a SuperLink, SuperNodes that reach it over gRPC, and runs one after another.

Each SuperNode has a Flower home and a working directory of its own, as if it were on another machine. Connections are
encrypted, the SuperLink has a certificate and every node a registered key, unless told otherwise (`insecure`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulation import control
from simulation.certificates import Keys, make_keys
from simulation.control import Scalar
from simulation.superlink import PROJECT, FlowerError, environment, free_ports, program, superlink

LOG = "supernode.log"
TAIL = 30  # lines of each node's log that a failure shows
#: A SuperNode looks for work this often (seconds); Flower's default of 1 s is a good part of a short round.
WORK_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


@dataclass(frozen=True)
class Deployed:
    """What runs.

    Parameters
    ----------
    fleet : str
        Where nodes reach the SuperLink.
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
    """Run a SuperLink and one SuperNode for each node config; stop all that was started at the end, whatever happens.

    The server waits for its nodes, so this does not: a node that cannot start fails the first run.

    Parameters
    ----------
    home : Path
        Absolute; node i lives in `node-<i>`. Keys that an earlier deployment left there are used.
    nodes : sequence of mapping
        Node configs, such as {"partition-id": 0, "num-partitions": 2, "state-dir": "/var/lib/fedtta"}.
    insecure : bool
        Neither encrypt connections nor ask nodes for a key.
    keys : Path, optional
        Folder of keys, made where missing; by default `keys` in `home`.

    Raises
    ------
    KeysError
        Keys that are there cannot be used.
    FlowerError
        The SuperLink does not answer in time, or something could not be stopped.
    """
    made = None if insecure else make_keys(keys or home / "keys", len(nodes))[0]
    # the SuperLink is left first, which stops all processes of its home; then those of the stack have ended
    with contextlib.ExitStack() as started, superlink(home, simulation=False, keys=made) as fleet:
        if made:  # a node whose key is not registered is refused and ends
            control.register(home, [made.node(number)[1] for number in range(len(nodes))])
        running = []
        for number, config in enumerate(nodes):
            own = (made.ca, made.node(number)[0]) if made else None
            running.append(started.enter_context(supernode(home / f"node-{number}", fleet, config, own)))
        yield Deployed(fleet, made, running)


def supernode(
    home: Path, fleet: str, config: Mapping[str, Scalar], keys: tuple[Path, Path] | None
) -> subprocess.Popen[bytes]:
    """Start a SuperNode in a Flower home of its own and return its process; the caller stops it.

    `keys` are the authority's certificate and the node's private key; None: insecure.
    """
    home.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    with (home / LOG).open("ab") as log:
        return subprocess.Popen(
            supernode_command(fleet, port, config, keys),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=home, env=environment(home) | WORK_POLL, start_new_session=True,
        )  # fmt: skip


def supernode_command(fleet: str, port: int, config: Mapping[str, Scalar], keys: tuple[Path, Path] | None) -> list[str]:
    """Return how a SuperNode is started; its own processes reach it at `port` of this machine."""
    if keys:
        secure = ["--root-certificates", str(keys[0]), "--auth-supernode-private-key", str(keys[1])]
    else:
        secure = ["--insecure"]
    return [
        program("flower-supernode"), *secure, "--superlink", fleet,
        "--host", "127.0.0.1", "--port", str(port), "--node-config", node_config(config),
    ]  # fmt: skip


def node_config(config: Mapping[str, Scalar]) -> str:
    """Return the text for `--node-config`, strings in quotes.

    Raises
    ------
    ValueError
        A string has a quote in it, which Flower cannot read.
    """
    for key, value in config.items():
        if isinstance(value, str) and ('"' in value or "'" in value):
            raise ValueError(f"{key} = {value!r}: allowed is a text without quotes")
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def run(home: Path, config: Mapping[str, Scalar], timeout: float, show: bool = False, project: Path = PROJECT) -> None:
    """Run this app, or another project's, on the nodes of a deployment and wait for its end; see `control.run`.

    Raises
    ------
    FlowerError
        Flower did not take the run, or it did not complete; the message has Flower's reason and what the nodes logged.
    """
    try:
        control.run(home, config, timeout, show, project=project)
    except FlowerError as error:
        raise FlowerError(f"{error}\n{logs(home, f'*/{LOG}')}") from error


def logs(home: Path, pattern: str) -> str:
    """Return the ends of the logs in `home` whose paths match."""
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(home.glob(pattern))}
    return "\n".join(f"{path.parent.name}:\n" + "\n".join(text.splitlines()[-TAIL:]) for path, text in texts.items())
