"""What an operator does to a SuperLink that runs: register nodes, run the app. `python -m simulation.control --help`.

Everything goes through Flower's own `flwr`, which finds the SuperLink in a Flower home (`superlink.write_connection`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from settings import SettingsError
from settings.parse import convert
from simulation.superlink import CONNECTION, POLL, PROJECT, FlowerError, environment, program, write_connection

Scalar = bool | int | float | str
PATHS = ("results", "data-dir", "init", "state-dir")  # settings that are paths
SETTLED = 30.0  # seconds within which a run whose log has ended must have its final status
REGISTERED = "Public key already in use"  # Flower's answer to a key that it knows


def register(home: Path, public_keys: Sequence[Path]) -> int:
    """Let nodes with these keys in; return how many were not yet registered.

    Raises
    ------
    FlowerError
        A file is no public key of a node, or the SuperLink does not answer.
    """
    new = 0
    for path in public_keys:
        if not path.is_file():  # Flower's message is cut to the width of the terminal
            raise FlowerError(f"{path}: no such file; `make keys` makes keys")
        try:
            flwr(home, "supernode", "register", str(path), CONNECTION, "--name", path.stem)
            new += 1
        except FlowerError as error:
            if REGISTERED not in str(error):
                raise
    return new


def run(
    home: Path, config: Mapping[str, Scalar], timeout: float, show: bool = False, options: Sequence[str] = (),
    project: Path = PROJECT,
) -> None:  # fmt: skip
    """Bundle a project, run it, and wait until the run has ended.

    Parameters
    ----------
    home : Path
        Flower home that names the SuperLink.
    config : mapping
        Run config; what it lacks keeps the default in pyproject.toml. Paths must be absolute, on the SuperLink's
        machine.
    timeout : float
        Seconds the run may take; it is stopped then.
    show : bool
        Show the run's log on this terminal.
    options : sequence of str
        More words for `flwr run`.
    project : Path
        Folder of the app; by default this one.

    Raises
    ------
    FlowerError
        Flower did not take the run, or it did not complete; the message has Flower's reason.
    """
    path = home / "run.toml"  # a file, for a command line would have to quote values twice
    path.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
    number = flwr(home, "run", str(project), CONNECTION, "--run-config", str(path), *options)["run-id"]
    command = [program("flwr"), "log", number, CONNECTION, "--stream"]  # until the run ends
    try:
        told = subprocess.run(
            command, env=environment(home), timeout=timeout, capture_output=not show, text=True, check=False
        ).stdout
    except subprocess.TimeoutExpired as error:
        flwr(home, "stop", number, CONNECTION)
        raise FlowerError(f"not finished after {timeout:g} s, and stopped") from error
    status, details = _final_status(home, number)
    if status != "finished:completed":
        raise FlowerError(f"{status}: {details}\n{told or ''}".rstrip())


def flwr(home: Path, *words: str) -> dict[str, Any]:
    """Return what a command of Flower's CLI answers; FlowerError when it fails."""
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
    """Return `key=value` words, typed, over defaults.

    Keys and types are checked here, for Flower refuses an unknown key without naming it; values are the app's to check.

    Raises
    ------
    SettingsError
        A word is not of the form key=value, or the setting is unknown or of another type.
    """
    config: dict[str, Any] = dict(defaults or {})
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingsError(f"--set {word!r}: allowed is key=value")
        config[key] = convert(key, value)
    return config


def _final_status(home: Path, number: str) -> tuple[str, str]:
    """Return the status of a run, such as 'finished:failed', and its details."""
    end = time.monotonic() + SETTLED
    while True:
        (entry,) = flwr(home, "ls", CONNECTION, "--run-id", number)["runs"]
        if entry["status"].startswith("finished") or time.monotonic() > end:
            return entry["status"], entry["status-details"]
        time.sleep(POLL)


def main(words: Sequence[str] | None = None) -> int:
    """Do what is asked; exit status 0 when it is done, 1 when it failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m simulation.control", description=__doc__, allow_abbrev=False)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="address of its Runtime HTTP API")
    parser.add_argument("--root-certificates", required=True, type=Path, metavar="FILE", help="ca.crt of `make keys`")
    commands = parser.add_subparsers(dest="command", required=True)
    registers = commands.add_parser("register", help="let nodes in; those that are in already are no error")
    registers.add_argument("keys", nargs="+", type=Path, metavar="PUBLIC_KEY", help="node-<i>.pub of `make keys`")
    runs = commands.add_parser("run", help="run the app and show its log")
    runs.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings")
    runs.add_argument("--timeout", type=float, default=86400.0, help="seconds that the run may take")
    arguments = parser.parse_args(words)
    try:
        config = run_config(arguments.set) if arguments.command == "run" else {}
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fedtta-flower-") as folder:
        home = Path(folder).resolve()
        write_connection(home, arguments.superlink, arguments.root_certificates.resolve())
        try:
            if arguments.command == "run":
                run(home, config, arguments.timeout, show=True)
            else:
                new = register(home, arguments.keys)
                print(f"registered: {new} new, {len(arguments.keys) - new} already known")
        except FlowerError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
