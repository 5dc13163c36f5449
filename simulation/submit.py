"""`python -m fedtta.simulation.submit`: register nodes, and run the app, at a SuperLink that is already running.

A run ends with its SuperLink: Flower's SuperExec stops the ServerApp when the process that started both is gone, and a
SuperLink restarted on its database fails the run a minute later. With `--supervise` the run is submitted again then,
with `resume`, and ends with the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedtta.client.names import check_name
from fedtta.server.report.journal import COPY
from fedtta.settings import Settings, SettingsError, from_config
from fedtta.simulation import devices, signing, superlink
from fedtta.simulation.standing import KEY as STANDING
from fedtta.simulation.superlink import FlowerError, RunLostError, Scalar, run_config

OBSERVE_EVERY = 60.0  # seconds between two questions how the devices are, unless a setting says otherwise
DAY = 86400.0  # seconds after which a run is stopped
AWAY = 600.0  # seconds for a killed SuperLink to be restarted
#: The server's reasons for a run that died before its first checkpoint; see `fedtta.server.resume`.
NOTHING_KEPT = re.compile("no checkpoint can be used: there is none|allowed is the folder of a run")

#: Submits a run with a config and returns its number.
Start = Callable[[Mapping[str, Scalar]], str]


def supervise(
    home: Path, config: Mapping[str, Scalar], timeout: float, resumes: int, begin: Start, show: bool = False
) -> None:
    """Run, and resume from the last checkpoint when the SuperLink or the ServerApp has died.

    A run that died before its first checkpoint begins once more under another name, and a standing run, which has
    none, as it is. A run that its app has ended, by an error of its own, or that was stopped, is not resumed.

    Parameters
    ----------
    home : Path
        Flower home that names the SuperLink.
    config : mapping
        As in `superlink.start`.
    timeout : float
        Seconds after which the run is stopped.
    resumes : int
        How often it is submitted again, at most.
    begin : callable
        Submits a run.
    show : bool
        Show the run's log on this terminal.

    Raises
    ------
    RunLostError, FlowerError
        As `superlink.finish`, for the last attempt.
    """
    end = time.monotonic() + timeout
    name = str(config.get("run-name") or time.strftime("submit-%Y%m%d-%H%M%S"))
    results = Path(str(config.get("results") or Settings().results))
    now = dict(config) if config.get(STANDING) else {**config, "run-name": name}
    for left in reversed(range(resumes + 1)):
        try:
            return superlink.finish(home, begin(now), end - time.monotonic(), show, AWAY)
        except FlowerError as error:
            empty = "resume" in now.keys() - config.keys() and NOTHING_KEPT.search(str(error))
            if not left or not (empty or isinstance(error, RunLostError)):
                raise
            reason = str(error).splitlines()[0]
        if config.get(STANDING):
            how = "begins once more"
        elif empty:
            name += "-again"
            now, how = {**config, "run-name": name}, f"begins once more as {name}"
        else:
            folder = str(_folder_of(config["resume"]) if config.get("resume") else results / name)
            now, how = {**config, "run-name": name, "resume": folder}, f"is resumed from {folder}"
        print(f"the run was lost ({reason}) and {how}; {left - 1} more times, if need be", file=sys.stderr, flush=True)


def _folder_of(resume: Scalar) -> Path:
    """Return the run folder that `resume` names on the SuperLink's machine: by now it may have later checkpoints."""
    path = Path(str(resume))
    return path.parent.parent if path.parent.name == Path(COPY).parent.name else path


def _named(words: Sequence[str], address: str, ca: Path) -> tuple[list[Path], list[str]]:
    """Return files and names of `[NAME=]PUBLIC_KEY`; SettingsError: a name is given twice, or is enrolled otherwise."""
    parts = [word.rpartition("=") for word in words]
    keys, names = [Path(key) for *_, key in parts], [check_name(name) if name else "" for name, *_ in parts]
    if any(names):
        enrolled = devices.listed(address, ca)
        for i, (key, name) in enumerate(zip(keys, names, strict=True)):
            if name and name in names[:i]:
                raise SettingsError(f"{name}={key}: the name is given twice; allowed is one device of a name")
            devices.check_free(enrolled, key, name)
    return keys, names


def main(words: Sequence[str] | None = None) -> int:
    """Register nodes or run the app; return status 0 on success, 1 on failure, 2 for bad arguments, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m fedtta.simulation.submit", description=__doc__, allow_abbrev=False)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="address of its Runtime HTTP API")
    parser.add_argument("--root-certificates", required=True, type=Path, metavar="FILE", help="ca.crt of `make keys`")
    commands = parser.add_subparsers(dest="command", required=True)
    registers = commands.add_parser("register", help="register nodes; registered ones are no error")
    registers.add_argument(
        "keys", nargs="+", metavar="[NAME=]PUBLIC_KEY", help="node-<i>.pub of `make keys`, and the device's name"
    )
    runs = commands.add_parser("run", help="run the app and show its log")
    runs.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings")
    runs.add_argument(
        "--timeout",
        type=float,
        help=f"seconds until the run is stopped (default: {DAY:g}; a standing run: never)",
    )
    runs.add_argument("--supervise", type=int, default=0, metavar="N", help="resume a lost run, at most so often")
    runs.add_argument("--signed", type=Path, metavar="FILE", help="run this bundle of `fedtta sign`")
    runs.add_argument("--database", type=Path, metavar="FILE", help="with --signed: the SuperLink's database")
    arguments = parser.parse_args(words)
    try:
        config = run_config(arguments.set, {"observe-every": OBSERVE_EVERY}) if arguments.command == "run" else {}
        if arguments.command == "run" and (arguments.signed is None) != (arguments.database is None):
            raise SettingsError("--signed and --database: allowed are both, or neither")
        if arguments.command == "run" and arguments.supervise < 0:
            raise SettingsError(f"--supervise {arguments.supervise}: allowed is 0 or more")
        from_config(config)  # the app would refuse values with a traceback
        with superlink.temporary_home(arguments.superlink, arguments.root_certificates) as home:
            if arguments.command == "run":
                _run(home, config, arguments)
            else:
                keys, names = _named(arguments.keys, arguments.superlink, arguments.root_certificates)
                new = superlink.register(home, keys, names)
                print(f"registered: {new} new, {len(keys) - new} already known")
    except (SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FlowerError as error:
        print(f"failed: {error}", file=sys.stderr)
        if isinstance(error, RunLostError):
            print("resume=<results>/<run-name> continues it; --supervise N does so by itself", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if arguments.command == "run":
            print("interrupted; a run that has begun goes on: `flwr stop` ends it", file=sys.stderr)
        return 130
    return 0


def _run(home: Path, config: Mapping[str, Scalar], arguments: argparse.Namespace) -> None:
    """Run the app once, or supervised; from the project's folder, or a signed bundle."""

    def begin(config: Mapping[str, Scalar]) -> str:
        if arguments.signed is None:
            return superlink.start(home, config)
        where = arguments.superlink, arguments.root_certificates
        return signing.start(*where, arguments.database, arguments.signed, config)

    timeout = arguments.timeout
    if timeout is None:
        timeout = math.inf if config.get(STANDING) else DAY
    if arguments.supervise:
        supervise(home, config, timeout, arguments.supervise, begin, show=True)
    else:
        superlink.finish(home, begin(config), timeout, show=True)


if __name__ == "__main__":
    sys.exit(main())
