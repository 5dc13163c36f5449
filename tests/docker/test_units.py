"""The agent's unit as systemd would run it, without systemd: what code of the server, as another user, can reach of it.

The users, the modes, the view of /proc and the system calls are those of the units. Needs root and libseccomp.
"""

from __future__ import annotations

import ctypes.util
import grp
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedtta.benchmarks.speed.served import PARTITION, fabricate, sample_images
from fedtta.client.agent.store import Store
from fedtta.simulation import deployment
from fedtta.simulation.superlink import PROJECT
from tests.docker.test_recipes import Unit

AGENT, NODE = 64001, 64002  # users and groups that no machine has
SHARED = "games"  # a group that every machine has
STARTING = 60.0  # seconds

#: What code of the server does on a device: prints JSON, name of an attempt → whether it succeeded.
ATTEMPTS = """
import json, os, pathlib, socket, sys
agent, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def connect(name):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(folder / "run" / name))
attempts = {
    "relay": lambda: connect("relay.sock"),
    "predictions": lambda: connect("agent.sock"),
    "state": lambda: (folder / "state" / "manifest.json").read_bytes(),
    "config": lambda: (folder / "device.toml").read_bytes(),
    "state through /proc": lambda: os.listdir(f"/proc/{agent}/root{folder}/state"),
    "memory": lambda: open(f"/proc/{agent}/mem", "rb"),
    "process list": lambda: os.stat(f"/proc/{agent}"),
    "signal": lambda: os.kill(agent, 0),
    "machine": lambda: open("/proc/meminfo"),
}
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = True
    except OSError:
        found[name] = False
filtered = "Seccomp:\\t2" in open("/proc/self/status").read()
print(json.dumps(found | {"filtered": filtered}))
"""


def interpreter() -> tuple[str, str] | None:
    """Return a Python that any user can start, and its PYTHONPATH; None if there is none."""
    own = (sys.executable, str(PROJECT))
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = (f"/usr/bin/python{minor}", f"{PROJECT}:{sysconfig.get_path('purelib')}")
    for python, path in (own, system):
        probe = [
            "setpriv",
            f"--reuid={NODE}",
            f"--regid={NODE}",
            "--clear-groups",
            "sh",
            "-c",
            f"{python} -c 'import grpc'",
        ]
        done = subprocess.run(probe, env={"PYTHONPATH": path, "PATH": os.defpath}, capture_output=True, check=False)
        if not done.returncode:
            return python, path
    return None


def calls() -> list[str]:
    """Return the system calls of the units' filters."""
    text = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    groups: dict[str, list[str]] = {}
    for line in text.splitlines():
        word = line.strip()
        if word and not word.startswith("#"):
            if line.startswith("@"):
                current = groups.setdefault(word, [])
            else:
                current.append(word)

    def members(name: str) -> Iterator[str]:
        for word in groups[name]:
            yield from members(word) if word.startswith("@") else [word]

    filters = {Unit(f"fedtta-{name}.service")["Service"]["SystemCallFilter"] for name in ("agent", "supernode")}
    assert filters == {"@system-service"}
    return sorted(set(members("@system-service")))


NEEDED = ("unshare", "setpriv", "systemd-analyze")
if os.getuid() or not ctypes.util.find_library("seccomp") or not all(map(shutil.which, NEEDED)) or not interpreter():
    pytest.skip("needs root, libseccomp, and what systemd's package has", allow_module_level=True)


@dataclass
class Device:
    """The folders of an agent, with the modes that its unit gives them."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.chmod(0o755)
        store = Store(self.folder / "state", 1, print)
        store.add(fabricate(), "served")
        store.close()
        (self.folder / "run").mkdir()
        (self.folder / "run").chmod(int(Unit("fedtta-agent.service")["Service"]["RuntimeDirectoryMode"], 8))
        config = {
            "name": str(PARTITION), "state-dir": str(self.folder / "state"), "device": "cpu", "adapter": "fedthe",
            "listen": f"unix:{self.folder}/run/agent.sock", "relay": f"unix:{self.folder}/run/relay.sock",
            "relay-group": SHARED,
        }  # fmt: skip
        (self.folder / "device.toml").write_text(tomli_w.dumps(config))
        (self.folder / "device.toml").chmod(0o600)
        for path in (*self.folder.rglob("*"),):
            os.chown(path, AGENT, AGENT)

    def command(self, user: int, *program: str) -> list[str]:
        """Return a command as the unit of a user runs it."""
        unit = {"uid": user, "gid": user, "groups": [grp.getgrnam(SHARED).gr_gid], "calls": calls()}
        python, _ = interpreter() or ("", "")
        return [sys.executable, str(Path(__file__).parent / "confined.py"), json.dumps(unit), python, *program]


@pytest.fixture(scope="module")
def device() -> Iterator[tuple[Device, subprocess.Popen[bytes]]]:
    """An agent under its unit, with a view of /proc of its own that attempts enter, too."""
    with tempfile.TemporaryDirectory(prefix="fedtta-") as name:
        made = Device(Path(name))
        _, path = interpreter() or ("", "")
        mounted = 'mount -t proc -o hidepid=invisible,subset=pid proc /proc && exec "$0" "$@"'
        agent = made.command(AGENT, "-m", "fedtta.client.agent", "--config", f"{name}/device.toml")
        log = Path(name) / "log"
        with log.open("wb") as file, subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--fork", "sh", "-c", mounted, *agent],
            cwd=PROJECT, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": os.defpath, "HOME": "/"},
            stdout=file, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                end = time.monotonic() + STARTING
                while not (made.folder / "run" / "relay.sock").exists():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < end, log.read_text()
                    time.sleep(0.1)
                yield made, process
            finally:
                os.kill(
                    inside(process), signal.SIGKILL
                )  # which is the first of its namespace, and takes the others along


def inside(process: subprocess.Popen[bytes]) -> int:
    """Return the id of the first process in a namespace that `unshare` has made."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def attempts(device: tuple[Device, subprocess.Popen[bytes]], user: int) -> dict[str, Any]:
    """Return what code of the server's achieves as a user."""
    made, process = device
    _, path = interpreter() or ("", "")
    entered = [
        "nsenter",
        "--mount",
        "--pid",
        f"--target={inside(process)}",
        *made.command(user, "-c", ATTEMPTS, "1", str(made.folder)),
    ]
    done = subprocess.run(
        entered, env={"PYTHONPATH": path, "PATH": os.defpath}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_agent_predicts_and_adapts_under_its_unit(device: tuple[Device, subprocess.Popen[bytes]]) -> None:
    made, process = device
    status, reply = deployment.ask(f"unix:{made.folder}/run/agent.sock", sample_images(40))
    assert reply is not None
    assert status.adapter.startswith("fedthe")
    assert status.samples == 40
    assert process.poll() is None


def test_code_of_the_server_reaches_the_relay_and_nothing_else(device: tuple[Device, subprocess.Popen[bytes]]) -> None:
    found = attempts(device, NODE)
    assert found.pop("filtered")
    assert {name for name, succeeded in found.items() if succeeded} == {"relay"}


def test_as_the_agents_user_it_reached_everything(device: tuple[Device, subprocess.Popen[bytes]]) -> None:
    """The attempts are real: with one user for both, as it was, they succeed."""
    found = attempts(device, AGENT)
    assert {"state", "config", "predictions", "state through /proc", "process list", "signal"} <= {
        name for name, succeeded in found.items() if succeeded
    }
