"""Flower's SuperLink: start and stop one on this machine, register nodes with it, run the app on it.

Runs are submitted by Flower's own `flwr`, which finds the SuperLink in a Flower home (`write_connection`).

Flower starts simulations, and Ray its workers, in sessions that outlive the SuperLink. Processes of a SuperLink are
recognized by their environment, which names its Flower home. Environments are read from /proc, so starting one here
requires Linux; plain `flwr run` does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedtta.settings import SettingsError, class_names
from fedtta.settings.parse import convert
from fedtta.simulation import control
from fedtta.simulation.control import FlowerError as FlowerError  # what most of its users need besides
from fedtta.simulation.keys import Keys

PROJECT = Path(__file__).resolve().parent.parent
CONNECTION = "own"  # name of the SuperLink in Flower's config: `flwr run . own`
HEALTHY = 60.0  # seconds for a SuperLink to start answering
STOPPING = (signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)  # and the seconds for each
POLL = 0.2  # seconds
DATABASE = "superlink.db"  # of nodes and runs, so that a SuperLink may be killed and restarted
Scalar = bool | int | float | str
SILENT = 30.0  # seconds for a SuperLink to answer a question about a run
ASKED = 1.0  # seconds between such questions
UNKNOWN = "Run ID not found"  # Flower's answer about a run that is not in its database
APP_FAILED = "ServerApp failed with exception"  # begins Flower's reason for a run that the app itself has ended


class RunLostError(FlowerError):
    """A run ended because its SuperLink or its ServerApp died; it can be resumed from its last checkpoint."""


@contextlib.contextmanager
def superlink(home: Path, simulation: bool = True, keys: Keys | None = None, database: bool = True) -> Iterator[str]:
    """Run a SuperLink in a Flower home; at the end, stop all processes of this home and of homes inside it.

    Parameters
    ----------
    simulation : bool
        Simulate the nodes. Otherwise they connect to the address that this yields.
    keys : Keys, optional
        Encrypt connections, and require registered keys of nodes. None: neither, on this machine only.
    database : bool
        Keep nodes, runs and messages in a file of the home; otherwise in memory, as in simulations.

    Raises
    ------
    FlowerError
        It does not answer in time, or one of its processes could not be stopped; or another one uses this home.
    """
    if not Path("/proc/self/environ").exists():
        raise FlowerError("this system has no /proc, which is needed to find and stop processes; use `flwr run`")
    if others := started(home):  # the end would stop them, too
        raise FlowerError(f"{home} is in use by the processes {others}: stop them, or choose another folder")
    port, fleet_port = free_ports(2)
    address, fleet = f"127.0.0.1:{port}", f"127.0.0.1:{fleet_port}"
    write_connection(home, address, keys.ca if keys else None)
    command = superlink_command("127.0.0.1", port, fleet, keys)
    command += ["--simulation"] if simulation else ["--database", str(home / DATABASE)] if database else []
    for old in home.glob(f"{DATABASE}*"):  # an interrupted run of an earlier SuperLink would go on
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
    """Return the command of a SuperLink that `flwr` reaches at `host` and `port`, and nodes at `fleet`."""
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
    """Write a Flower home's address of the SuperLink and authority to trust (None: connect without encryption)."""
    how = {"root-certificates": str(ca)} if ca else {"insecure": True}
    content = {"superlink": {CONNECTION: {"address": address, **how}}}
    (home / "config.toml").write_text(tomli_w.dumps(content), encoding="utf-8")


@contextlib.contextmanager
def temporary_home(address: str, ca: Path | None) -> Iterator[Path]:
    """Make a Flower home that names a SuperLink, and remove it at the end; FileNotFoundError if there is no `ca`."""
    with tempfile.TemporaryDirectory(prefix="fedtta-flower-") as folder:
        home = Path(folder).resolve()
        write_connection(home, address, control.existing(ca).resolve() if ca else None)
        yield home


def connection(home: Path) -> tuple[str, Path | None]:
    """Return what `write_connection` wrote: a SuperLink's address, and the authority to trust."""
    own = tomllib.loads((home / "config.toml").read_text(encoding="utf-8"))["superlink"][CONNECTION]
    return own["address"], Path(own["root-certificates"]) if "root-certificates" in own else None


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a started process: Flower home, programs beside this Python, absolute data folder."""
    environ = dict(os.environ)
    environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environ["COLUMNS"] = str(max(120, shutil.get_terminal_size().columns))  # apps write to a log, not to a terminal
    quiet = "ignore:Tip:FutureWarning"  # Ray's advice about its own variable
    environ["PYTHONWARNINGS"] = ",".join(filter(None, (environ.get("PYTHONWARNINGS"), quiet)))
    if environ.get("FEDTTA_DATA"):
        environ["FEDTTA_DATA"] = str(Path(environ["FEDTTA_DATA"]).expanduser().resolve())
    return environ


def program(name: str) -> str:
    """Return the path of a program installed beside this Python."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path, keys: Keys | None = None) -> None:
    """Wait until the SuperLink answers; raise FlowerError with its log if it ends or stays silent."""
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
    """Return the ids of the running processes whose environment names this Flower home, or one inside it."""
    mark, found = f"FLWR_HOME={home}/".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                variables = (entry / "environ").read_bytes().split(b"\0")
                if any((variable + b"/").startswith(mark) for variable in variables):
                    found.append(int(entry.name))
    return found


def stop(home: Path) -> list[int]:
    """Terminate, then kill all processes of this home and of homes inside it; return those that remain."""
    left = started(home)
    for number, patience in STOPPING:
        signalled: set[int] = set()
        end = time.monotonic() + patience
        while left and time.monotonic() < end:
            for pid in set(left) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= set(left)
            time.sleep(POLL)
            left = started(home)
    return left


def register(home: Path, public_keys: Sequence[Path], names: Sequence[str] = ()) -> int:
    """Register nodes by their public keys; return how many are new.

    Parameters
    ----------
    names : sequence of str, optional
        The devices' names, one for each key; a key without one is registered by its file, which binds no name.

    Raises
    ------
    FlowerError, FileNotFoundError
        As `control.register`.
    """
    named = zip(public_keys, [*names, *[""] * (len(public_keys) - len(names))], strict=True)
    return sum(control.register(*connection(home), key, name or key.stem) is not None for key, name in named)


def run(
    home: Path, config: Mapping[str, Scalar], timeout: float, show: bool = False, options: Sequence[str] = (),
    project: Path = PROJECT,
) -> None:  # fmt: skip
    """Bundle a project, run it, and wait for its end; see `start` and `finish`."""
    finish(home, start(home, config, options, project), timeout, show)


def start(home: Path, config: Mapping[str, Scalar], options: Sequence[str] = (), project: Path = PROJECT) -> str:
    """Bundle a project, submit a run of it, and return the run's number.

    Parameters
    ----------
    home : Path
        Flower home that names the SuperLink.
    config : mapping
        Run config; other keys have the defaults in pyproject.toml. Paths must be absolute, on the SuperLink's
        machine.
    options : sequence of str
        Further arguments of `flwr run`.
    project : Path
        Folder of the app.

    Raises
    ------
    FlowerError
        Flower refused the run.
    """
    path = home / "run.toml"  # a file: a command line would need quotes twice
    path.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
    with app_files(project) as app:
        number: str = flwr(home, "run", str(app), CONNECTION, "--run-config", str(path), *options)["run-id"]
    return number


@contextlib.contextmanager
def app_files(project: Path = PROJECT) -> Iterator[Path]:
    """Make a folder of the files that a project's bundle consists of.

    Flower would look at every file of the project, those of `.venv` among them, for seconds. A project that does not
    name its files (`fab-include`) is taken as it is.
    """
    about = project / "pyproject.toml"
    content = tomllib.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    included = content.get("tool", {}).get("flwr", {}).get("app", {}).get("fab-include")
    if not included:
        yield project
        return
    with tempfile.TemporaryDirectory(prefix="fedtta-app-") as folder:
        for pattern in (about.name, ".gitignore", *included):
            for path in filter(Path.is_file, project.glob(pattern)):
                copy = Path(folder) / path.relative_to(project)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        yield Path(folder)


def finish(home: Path, number: str, timeout: float, show: bool = False, silent: float = SILENT) -> None:
    """Follow a run's log and wait for the run's end, also when the log breaks off before.

    Parameters
    ----------
    number : str
        The run's number.
    timeout : float
        Seconds after which the run is stopped.
    show : bool
        Show the run's log on this terminal.
    silent : float
        Seconds for which the SuperLink may be away.

    Raises
    ------
    RunLostError
        The SuperLink or the ServerApp died.
    FlowerError
        The run did not complete for another reason; the message has Flower's.
    """
    end = time.monotonic() + timeout
    where, run = connection(home), int(number)
    try:
        if show:
            command = [program("flwr"), "log", number, CONNECTION, "--stream"]  # until the run ends, or the SuperLink
            # a group of its own: Ctrl-C reaches this process alone, and Flower shows no traceback
            subprocess.run(command, env=environment(home), timeout=timeout, check=False, process_group=0)
        status, details = _final_status(where, run, end, silent)
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        control.stop(*where, run)
        raise FlowerError(f"not finished after {timeout:g} s, and stopped") from error
    if status != "finished:completed":
        lost = status == "finished:failed" and not details.startswith(APP_FAILED)
        log = "" if show else control.log(*where, run)
        raise (RunLostError if lost else FlowerError)(f"{status}: {details}\n{log}".rstrip())


def flwr(home: Path, *words: str) -> dict[str, Any]:
    """Run a command of Flower's CLI and return its answer; raise FlowerError if it fails."""
    command = [program("flwr"), *words, "--format", "json"]
    done = subprocess.run(command, cwd=PROJECT, env=environment(home), capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        answer = {}
    if done.returncode or not answer.get("success", True) or not answer:
        raise FlowerError(f"flwr {' '.join(words[:2])}: {done.stdout}{done.stderr}")
    return answer


def run_config(words: Sequence[str], defaults: Mapping[str, Scalar] | None = None) -> dict[str, Any]:
    """Return the settings in `key=value` words, typed, over defaults.

    Keys and types are checked here because Flower does not name an unknown key; callers check the values, some of which
    they set. A file of class names is read here, since the other machines do not have it.

    Raises
    ------
    SettingsError
        A word is not of the form key=value, the setting is unknown or has another type, or as `class_names`.
    """
    config: dict[str, Any] = dict(defaults or {})
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingsError(f"--set {word!r}: allowed is key=value")
        config[key] = convert(key, value)
    if config.get("classes"):
        config["classes"] = class_names(config["classes"])
    return config


def _final_status(where: tuple[str, Path | None], number: int, end: float, silent: float) -> tuple[str, str]:
    """Wait until a run has ended; return its status, such as 'finished:failed', and its details.

    Raises
    ------
    RunLostError
        The SuperLink does not answer for `silent` seconds, or does not know the run.
    TimeoutError
        The run has not ended at the time `end`.
    """
    answered = time.monotonic()
    while True:
        try:
            (run,) = control.runs(*where, number)
        except FlowerError as error:
            if UNKNOWN in str(error):
                raise RunLostError(
                    "the SuperLink does not know the run: it was restarted without its database"
                ) from error
            if time.monotonic() > answered + silent:
                raise RunLostError(f"the SuperLink has not answered for {silent:g} s: {error}") from error
        else:
            answered = time.monotonic()
            if run.over:
                return run.status, run.details
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(ASKED)
