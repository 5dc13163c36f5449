"""`python -m fedtta.simulation.deploy_local`: a deployment on this machine, one run, predictions by its agents.

TLS and node authentication work as in a real deployment. Data, models and adapters belong to the agents, which the
SuperNodes reach over sockets. At the end every agent reports its status and some predictions.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedtta.settings import Settings, SettingsError, from_config, keys_in
from fedtta.simulation.superlink import FlowerError, Scalar, run_config

DEFAULTS: dict[str, Any] = {"rounds": 3, "local-epochs": 2}  # other than a simulation's; --set overrides them
SHOWN = 8  # predictions of each agent at the end
OURS = {
    "clients": "--nodes",
    "workers": "nothing: every client has its own process",
    "state-dir": "--folder",
    "devices": "nothing: it is for simulations, and the nodes here divide the run's data set",
}


@dataclass(frozen=True)
class Plan:
    """A deployment and its run.

    Parameters
    ----------
    settings : Settings
        Settings of the run.
    agents : dict
        Keys in every agent's config, beside its identity and addresses.
    folder : Path or None
        Folder for keys, logs and state; None: a temporary one.
    keys : Path or None
        Folder of keys; None: in `folder`.
    insecure : bool
        Neither TLS nor node authentication.
    timeout : float
        Seconds after which the run is stopped.
    """

    settings: Settings
    agents: dict[str, Any]
    folder: Path | None
    keys: Path | None
    insecure: bool
    timeout: float

    @property
    def results(self) -> Path:
        """Return the run folder."""
        return Path(self.settings.results) / self.settings.run_name


def parse(words: Sequence[str] | None = None) -> Plan:
    """Parse and check the command line before anything is started.

    Raises
    ------
    SettingsError
        A setting or an agent's key is unknown, has the wrong type or a value that is not allowed.
    """
    parser = argparse.ArgumentParser(prog="fedtta deploy-local", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=3, help="SuperNodes, each with an agent (default: 3)")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings of the run"
    )
    parser.add_argument("--adapter", default="fedthe", help="the agents' adapter, e.g. 'btfl' (default: fedthe)")
    parser.add_argument("--base", default="global", help="the adapter's network: global or personalised")
    parser.add_argument("--training", default="", help="training whose model is served; empty: the first that fits")
    parser.add_argument("--folder", type=Path, help="folder of keys, logs and the agents' state, for reuse")
    parser.add_argument("--keys", type=Path, help="folder of keys (`make keys`); made if missing")
    parser.add_argument("--insecure", action="store_true", help="no TLS, no node authentication")
    parser.add_argument("--timeout", type=float, default=86400.0, help="seconds after which the run is stopped")
    arguments = parser.parse_args(words)
    config = run_config(arguments.set, DEFAULTS | {"run-name": time.strftime("deploy-%Y%m%d-%H%M%S")})
    for key, instead in OURS.items():
        if any(word.split("=")[0] == key for word in arguments.set):
            raise SettingsError(f"--set {key}: allowed is {instead}")
    config = Settings().flat() | config | {"clients": arguments.nodes}
    # absolute, because Flower chooses the working directory of the apps
    config |= {key: str(Path(config[key]).expanduser().resolve()) for key in keys_in("paths") if config[key]}
    settings = from_config(config)
    agents = {"adapter": arguments.adapter, "base": arguments.base, "training": arguments.training}
    agents |= {"device": settings.device} | ({"data-dir": settings.data_dir} if settings.data_dir else {})
    _check_agent(agents)
    folder = arguments.folder and arguments.folder.expanduser().resolve()
    keys = arguments.keys and arguments.keys.expanduser().resolve()
    return Plan(settings, agents, folder, keys, arguments.insecure, arguments.timeout)


def _check_agent(keys: dict[str, Any]) -> None:
    """Check the agents' keys as an agent does."""
    from fedtta.client.agent.config import AgentConfig

    AgentConfig.from_mapping({"name": "0", "state-dir": "/", **keys})


def deploy(plan: Plan) -> Table:
    """Start everything, run the app, query the agents, and stop everything.

    Returns
    -------
    Table
        Status and predictions of every agent.

    Raises
    ------
    FlowerError, KeysError
        A process could not be started or stopped, the run did not complete, or an agent does not answer.
    """
    from fedtta.simulation import deployment

    nodes = range(plan.settings.clients)
    with ExitStack() as stack:
        folder = plan.folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="fedtta-deploy-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made)).resolve()
        home = folder / "flower"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        sockets = stack.enter_context(deployment.sockets_folder())
        devices = [deployment.agent_config(folder, sockets, str(i), plan.agents) for i in nodes]
        config: list[dict[str, Scalar]] = [{"name": str(i), "agent": f"unix:{sockets}/r{i}"} for i in nodes]
        say(f"starting a SuperLink in {folder}{', without TLS' if plan.insecure else ''}")
        try:
            with deployment.deployment(home, config, plan.insecure, plan.keys):
                started = {
                    f"unix:{sockets}/a{i}": deployment.start_agent(home / f"agent-{i}", devices[i]) for i in nodes
                }
                deployment.wait_for_agents(started)
                say(f"{len(nodes)} SuperNodes and agents are up; the run starts")
                deployment.run(home, plan.settings.flat(), plan.timeout, show=True)
                return _ask_all(plan, sockets)
        except FlowerError as error:
            raise FlowerError(f"{error}\n{deployment.logs(home, f'*/{deployment.AGENT_LOG}')}".rstrip()) from error


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _ask_all(plan: Plan, sockets: Path) -> Table:
    """Query every agent for predictions of some of its test images, and for its status."""
    from fedtta.client.resources import federation_of
    from fedtta.simulation.deployment import ask, predicted

    federation = federation_of(plan.settings)
    rows = Table("agent", "model", "adapter", "samples", "guard", f"first {SHOWN} test images", title="Agents")
    for i, split in enumerate(federation.splits):
        chosen = split.test[:SHOWN]
        status, reply = ask(f"unix:{sockets}/a{i}", federation.images.pixels[chosen])
        result = "no test images"
        if reply is not None:
            right = int((predicted(reply) == federation.images.labels[chosen]).sum())
            result = f"{right} of {len(chosen)} right"
        guard = ", ".join(f"{name} {count}" for name, count in sorted(status.guard_events.items()) if count) or "quiet"
        rows.add_row(str(i), status.model_version, status.adapter, str(status.samples), guard, result)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Deploy, run, print the tables; return exit status 0 on success, 1 on failure, 2 for bad arguments."""
    try:
        plan = parse(words)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # imports torch and Flower, which refusing a setting does not need
    from fedtta.server.report import METRICS_FILE, read_results, render_tables
    from fedtta.simulation.certificates import KeysError
    from fedtta.simulation.flower_cli import unwind

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, unwind)
    if (plan.results / METRICS_FILE).exists():
        print(f"error: {plan.results} already holds a run; choose another run-name", file=sys.stderr)
        return 2
    try:
        table = deploy(plan)
    except (FlowerError, KeysError) as error:
        print(f"deployment failed: {error}", file=sys.stderr)
        return 1
    console = Console()
    for each in [*render_tables(read_results(plan.results / METRICS_FILE)), table]:
        console.print(each)
    console.print(f"Results: {plan.results}/ (open {plan.results}/report.html)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
