"""`python -m fedtta.simulation.flower_cli`: the app through Flower's own `flwr run`, on a SuperLink of its own.

Flower's CLI exits with 0 even if a run failed; this script exits according to the run's status.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.server.resume import run_folder_of
from fedtta.settings import Settings, SettingsError, from_config, keys_in
from fedtta.simulation.engine import with_devices
from fedtta.simulation.gpus import allocate, environment_with, mask
from fedtta.simulation.program import show_results, unwind_on_signals
from fedtta.simulation.superlink import FlowerError, run_config, superlink
from fedtta.simulation.superlink import run as run_app

#: Settings that decide what the simulated nodes compute on.
RESOURCES = ("device", "num-gpus", "workers")


@dataclass(frozen=True)
class Submission:
    """A run to submit to Flower.

    Parameters
    ----------
    config : dict
        Run config; other keys have the defaults in pyproject.toml.
    clients, cpus : int
        Simulated nodes, and how many of them run at the same time.
    timeout : float
        Seconds after which the run is stopped.
    gpus : list of str
        The GPUs that these nodes share (`fedtta.simulation.gpus.visible_gpus`).
    """

    config: dict[str, Any]
    clients: int
    cpus: int
    timeout: float
    gpus: list[str]

    @property
    def folder(self) -> Path:
        """Return the run folder; a resumed run has its own."""
        if resume := self.config.get("resume"):
            return run_folder_of(resume)
        return Path(self.config["results"]) / self.config["run-name"]

    def federation(self) -> str:
        """Return the text for `--federation-config`; Ray logs to its own files.

        Flower carries the share in 32 bits; rounded up, one node fewer would fit.
        """
        share = self.config.get("num-gpus", 0.0)
        if float(np.float32(share)) > share:
            share = float(np.nextafter(np.float32(share), np.float32(0)))
        return (
            f"num-supernodes={self.clients} client-resources-num-cpus=1 client-resources-num-gpus={share} "
            f"init-args-num-cpus={self.cpus} init-args-num-gpus={len(self.gpus)} "
            "init-args-log-to-driver=false init-args-logging-level='ERROR'"
        )


def parse(words: Sequence[str] | None = None) -> Submission:
    """Parse the command line.

    Raises
    ------
    SettingsError
        A setting is unknown, impossible or not of the form key=value; or as `engine.with_devices` and `gpus.allocate`.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m fedtta.simulation.flower_cli", description=__doc__)
    parser.add_argument(
        "--clients", type=int, default=defaults.clients, help="simulated nodes, unless there are `devices`"
    )
    parser.add_argument("--cpus", type=int, default=defaults.workers, help="nodes that run at the same time")
    parser.add_argument("--timeout", type=float, default=86400.0, help="seconds after which the run is stopped")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings")
    arguments = parser.parse_args(words)
    for word in arguments.set:
        if word.partition("=")[0] in ("clients", "workers"):
            raise SettingsError(f"--set {word!r}: clients and workers are given by --clients and --cpus")
    name = time.strftime("flower-%Y%m%d-%H%M%S")
    config = run_config(arguments.set, {"results": defaults.results, "run-name": name})
    # absolute, because Flower chooses the working directory of the apps
    config |= {key: str(Path(config[key]).expanduser().resolve()) for key in keys_in("paths") if config.get(key)}
    config |= {"clients": arguments.clients, "workers": arguments.cpus}
    if config.get("devices"):
        found = with_devices(from_config(config))
        config |= {"clients": found.clients, "devices": found.devices}
    allocation = allocate(from_config(config))
    if allocation.gpus:
        config |= {key: allocation.settings.flat()[key] for key in RESOURCES}
    return Submission(config, config["clients"], arguments.cpus, arguments.timeout, allocation.gpus)


def run(submission: Submission) -> None:
    """Start a SuperLink, run the app on it, and stop everything.

    Raises
    ------
    FlowerError
        The run did not complete; the message has Flower's reason.
    """
    with tempfile.TemporaryDirectory(prefix="fedtta-flower-", ignore_cleanup_errors=True) as folder:
        home = Path(folder).resolve()
        with environment_with(mask(submission.gpus)), superlink(home):
            federation = ("--federation-config", submission.federation())
            run_app(home, submission.config, submission.timeout, show=True, options=federation)


def main(words: Sequence[str] | None = None) -> int:
    """Run and print the table; return exit status 0 if the run completed, 1 if not, 2 for bad arguments."""
    try:
        submission = parse(words)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    unwind_on_signals()
    try:
        run(submission)
    except FlowerError as error:
        print(f"run failed: {error}", file=sys.stderr)
        return 1
    show_results(submission.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
