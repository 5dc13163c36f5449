"""A Flower SuperLink of our own: started on free ports, found by `flwr` in a Flower home of its own, stopped for sure.

Flower starts simulations, and Ray its workers, in sessions that outlive the SuperLink. What belongs to it is known by
its environment, which names the Flower home. Environments are read from /proc, so this needs Linux; plain `flwr run`
does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from server.errors import RunError
from simulation.certificates import Keys

PROJECT = Path(__file__).resolve().parent.parent
CONNECTION = "own"  # name of the SuperLink in Flower's config: `flwr run . own`
HEALTHY = 60.0  # seconds within which a SuperLink must answer
STOPPING = (signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)  # and the seconds that each may take
POLL = 0.2  # seconds
DATABASE = "superlink.db"  # where nodes and runs are, so that a SuperLink may be killed and started again


class FlowerError(RunError):
    """Flower could not be started or stopped, did not take a run, or the run did not complete."""


@contextlib.contextmanager
def superlink(home: Path, simulation: bool = True, keys: Keys | None = None) -> Iterator[str]:
    """Run a SuperLink in a Flower home; stop all processes of this home, and of those inside it, at the end.

    Parameters
    ----------
    simulation : bool
        Whether it simulates its nodes; if not, they connect to the address that this yields.
    keys : Keys, optional
        With them connections are encrypted and nodes must have a registered key; None: neither, on this machine only.

    Raises
    ------
    FlowerError
        It does not answer in time, or something of it could not be stopped.
    """
    if not Path("/proc/self/environ").exists():
        raise FlowerError("this system has no /proc, by which processes are found to stop them; use `flwr run`")
    port, fleet_port = free_ports(2)
    address, fleet = f"127.0.0.1:{port}", f"127.0.0.1:{fleet_port}"
    write_connection(home, address, keys.ca if keys else None)
    command = superlink_command("127.0.0.1", port, fleet, keys)
    command += ["--simulation"] if simulation else ["--database", str(home / DATABASE)]
    for old in home.glob(f"{DATABASE}*"):  # a run that was cut short with an earlier SuperLink would go on
        old.unlink()
    log = home / "superlink.log"
    with log.open("wb") as file, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        cwd=PROJECT, env=environment(home), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            wait_until_healthy(process, f"{'https' if keys else 'http'}://{address}/health", log, keys)
            yield fleet
        finally:
            left = stop(home)
    if left:
        raise FlowerError(f"processes {left} could not be stopped")


def superlink_command(host: str, port: int, fleet: str, keys: Keys | None) -> list[str]:
    """Return how a SuperLink is started; `flwr` reaches it at `host` and `port`, nodes at `fleet`."""
    command = [
        program("flower-superlink"), "--disable-runtime-dependency-installation",
        "--host", host, "--port", str(port), "--fleet-api-address", fleet,
    ]  # fmt: skip
    if keys is None:
        return [*command, "--insecure"]
    certificate, key = (str(path) for path in keys.server)
    return [
        *command, "--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", certificate, "--ssl-keyfile", key,
        "--enable-supernode-auth",
    ]  # fmt: skip


def write_connection(home: Path, address: str, ca: Path | None) -> None:
    """Tell `flwr` of this Flower home where the SuperLink is, and whom to trust (None: connect without encryption)."""
    how = {"root-certificates": str(ca)} if ca else {"insecure": True}
    content = {"superlink": {CONNECTION: {"address": address, **how}}}
    (home / "config.toml").write_text(tomli_w.dumps(content), encoding="utf-8")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of what is started: our Flower home, programs beside this Python, data by full path."""
    environ = dict(os.environ)
    environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environ["COLUMNS"] = str(max(120, shutil.get_terminal_size().columns))  # the apps write to a log, not a terminal
    quiet = "ignore:Tip:FutureWarning"  # Ray's advice on a variable of its own
    environ["PYTHONWARNINGS"] = ",".join(filter(None, (environ.get("PYTHONWARNINGS"), quiet)))
    if environ.get("FEDTTA_DATA"):
        environ["FEDTTA_DATA"] = str(Path(environ["FEDTTA_DATA"]).expanduser().resolve())
    return environ


def program(name: str) -> str:
    """Return the path of a program that was installed beside this Python."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path, keys: Keys | None = None) -> None:
    """Wait until the SuperLink answers; FlowerError with its log when it ends or stays silent."""
    trust = ssl.create_default_context(cafile=keys.ca) if keys else None
    end = time.monotonic() + HEALTHY
    while process.poll() is None and time.monotonic() < end:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(address, timeout=2, context=trust),
        ):
            return
        time.sleep(POLL)
    how = "did not answer" if process.poll() is None else f"ended with status {process.returncode}"
    raise FlowerError(f"the SuperLink {how}; its log:\n{log.read_text(encoding='utf-8', errors='replace')}")


def started(home: Path) -> list[int]:
    """Return the ids of the living processes whose environment names this Flower home, or one inside it."""
    mark, found = f"FLWR_HOME={home}/".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any((variable + b"/").startswith(mark) for variable in variables):
                    found.append(int(entry.name))
    return found


def stop(home: Path) -> list[int]:
    """Ask all processes of this home, and of those inside it, to end, then make them; return those still there."""
    left = started(home)
    for number, patience in STOPPING:
        told: set[int] = set()
        end = time.monotonic() + patience
        while left and time.monotonic() < end:
            for pid in set(left) - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= set(left)
            time.sleep(POLL)
            left = started(home)
    return left
