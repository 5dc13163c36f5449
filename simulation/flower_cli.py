"""`python -m simulation.flower_cli`: the app through Flower's own `flwr run`, simulated on a SuperLink of its own.

Flower's CLI exits 0 when a run failed; this script reads the run's status and exits accordingly.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from server.report import METRICS_FILE, read_results, render_tables
from settings import Settings, SettingsError
from simulation import control
from simulation.superlink import FlowerError, superlink


@dataclass(frozen=True)
class Submission:
    """What is asked of Flower.

    Parameters
    ----------
    config : dict
        Run config; what it lacks keeps the default in pyproject.toml.
    clients, cpus : int
        Simulated nodes, and how many of them work at a time.
    timeout : float
        Seconds the run may take.
    """

    config: dict[str, Any]
    clients: int
    cpus: int
    timeout: float

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return Path(self.config["results"]) / self.config["run-name"]

    def federation(self) -> str:
        """Return the text for `--federation-config`; Ray's own messages stay in Ray's files."""
        gpus = self.config.get("num-gpus", 0.0)
        return (
            f"num-supernodes={self.clients} client-resources-num-cpus=1 client-resources-num-gpus={gpus} "
            f"init-args-num-cpus={self.cpus} init-args-log-to-driver=false init-args-logging-level='ERROR'"
        )


def parse(words: Sequence[str] | None = None) -> Submission:
    """Parse the command line.

    Keys and types are checked here, for Flower refuses an unknown key without naming it; values are the app's to check.

    Raises
    ------
    SettingsError
        A setting is unknown, of the wrong type or not of the form key=value.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m simulation.flower_cli", description=__doc__)
    parser.add_argument("--clients", type=int, default=defaults.clients, help="simulated nodes")
    parser.add_argument("--cpus", type=int, default=defaults.workers, help="nodes that work at the same time")
    parser.add_argument("--timeout", type=float, default=86400.0, help="seconds that the run may take")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings")
    arguments = parser.parse_args(words)
    for word in arguments.set:
        if word.partition("=")[0] in ("clients", "workers"):
            raise SettingsError(f"--set {word!r}: clients and workers are given by --clients and --cpus")
    name = time.strftime("flower-%Y%m%d-%H%M%S")
    config = control.run_config(arguments.set, {"results": defaults.results, "run-name": name})
    # the working directory of the apps is Flower's affair
    config |= {key: str(Path(config[key]).expanduser().resolve()) for key in control.PATHS if config.get(key)}
    config |= {"clients": arguments.clients, "workers": arguments.cpus}
    return Submission(config, arguments.clients, arguments.cpus, arguments.timeout)


def run(submission: Submission) -> None:
    """Start a SuperLink, run the app on it, and stop all that was started, whatever happens.

    Raises
    ------
    FlowerError
        The run did not complete; the message has Flower's reason.
    """
    with tempfile.TemporaryDirectory(prefix="fedtta-flower-", ignore_cleanup_errors=True) as folder:
        home = Path(folder).resolve()
        with superlink(home):
            federation = ("--federation-config", submission.federation())
            control.run(home, submission.config, submission.timeout, show=True, options=federation)


def unwind(number: int, frame: object) -> None:
    """Leave by an exception, so that all is stopped on the way out; a second Ctrl-C must not cut that short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("interrupted; stopping what was started", file=sys.stderr)
    sys.exit(128 + number)


def main(words: Sequence[str] | None = None) -> int:
    """Run and print the table; exit status 0 when the run completed, 1 when not, 2 for bad arguments."""
    try:
        submission = parse(words)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, unwind)
    try:
        run(submission)
    except FlowerError as error:
        print(f"run failed: {error}", file=sys.stderr)
        return 1
    console = Console()
    for table in render_tables(read_results(submission.folder / METRICS_FILE)):
        console.print(table)
    console.print(f"Results: {submission.folder}/ (open {submission.folder}/report.html)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
