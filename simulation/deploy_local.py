"""`python -m fedtta.simulation.deploy_local`: a deployment on this machine, one run, predictions by its agents.

TLS and node authentication work as in a real deployment. Data, models and adapters belong to the agents, which the
SuperNodes reach over sockets. The nodes divide the run's data set, or have data of their own (`--devices`, the agents'
files). At the end every agent reports its status and predictions of some test images.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedtta.settings import Settings, SettingsError, from_config, from_toml, keys_in
from fedtta.simulation.program import show_results, unwind_on_signals
from fedtta.simulation.superlink import FlowerError, Scalar, run_config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULTS: dict[str, Any] = {"rounds": 3, "local-epochs": 2}  # other than a simulation's; --set overrides them
SHOWN = 8  # predictions of each agent at the end
OURS = {
    "clients": "--nodes",
    "workers": "nothing: every client has its own process",
    "state-dir": "--folder",
    "devices": "--devices",
}
#: Keys of a device's file that say where its agent runs and listens, which the deployment decides.
PLACE = ("name", "state-dir", "listen", "relay", "relay-group", "metrics", "certificate", "key", "client-ca")


@dataclass(frozen=True)
class Plan:
    """A deployment and its run.

    Parameters
    ----------
    settings : Settings
        Settings of the run.
    agents : dict
        Name of each agent → keys of its config, beside its identity and addresses.
    devices : str
        Path or glob pattern of the files of devices with data of their own; empty: the nodes divide the data set.
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
    agents: dict[str, dict[str, Any]]
    devices: str
    folder: Path | None
    keys: Path | None
    insecure: bool
    timeout: float

    @property
    def results(self) -> Path:
        """Return the run folder; a resumed run has its own.

        Raises
        ------
        SettingsError
            There is no such run to resume.
        """
        if self.settings.resume:
            from fedtta.server.resume import run_folder_of

            return run_folder_of(self.settings.resume)
        return Path(self.settings.results) / self.settings.run_name


def parse(words: Sequence[str] | None = None) -> Plan:
    """Parse and check the command line before anything is started.

    Raises
    ------
    SettingsError
        A setting or an agent's key is unknown, has the wrong type or a value that is not allowed.
    """
    parser = argparse.ArgumentParser(prog="fedtta deploy-local", description=__doc__, allow_abbrev=False)
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--nodes", type=int, default=3, help="SuperNodes, each with an agent (default: 3)")
    nodes.add_argument(
        "--devices",
        default="",
        metavar="FILES",
        help="agents' files with data of their own, e.g. 'sites/*.toml': a node each",
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings of the run"
    )
    parser.add_argument("--adapter", default="fedthe", help="the agents' adapter, e.g. 'btfl' (default: fedthe)")
    parser.add_argument("--base", default="global", help="the adapter's network: global or personalised")
    parser.add_argument("--training", default="", help="training whose model is served; empty: the first that fits")
    parser.add_argument("--folder", type=Path, help="folder of keys, logs and the agents' state, for reuse")
    security = parser.add_mutually_exclusive_group()
    security.add_argument("--keys", type=Path, help="folder of keys (`make keys`); made if missing")
    security.add_argument("--insecure", action="store_true", help="no TLS, no node authentication")
    parser.add_argument("--timeout", type=float, default=86400.0, help="seconds after which the run is stopped")
    arguments = parser.parse_args(words)
    config = run_config(arguments.set, DEFAULTS | {"run-name": time.strftime("deploy-%Y%m%d-%H%M%S")})
    for key, instead in OURS.items():
        if any(word.split("=")[0] == key for word in arguments.set):
            raise SettingsError(f"--set {key}: allowed is {instead}")
    common = {"adapter": arguments.adapter, "base": arguments.base, "training": arguments.training}
    clients = _count(arguments.devices) if arguments.devices else arguments.nodes
    config = Settings().flat() | config | {"clients": clients}
    # absolute, because Flower chooses the working directory of the apps
    config |= {key: str(Path(config[key]).expanduser().resolve()) for key in keys_in("paths") if config[key]}
    settings = from_config(config)
    common |= {"device": settings.device} | ({"data-dir": settings.data_dir} if settings.data_dir else {})
    if arguments.devices:
        agents = _agents_of(arguments.devices, settings, common)
    else:
        agents = {str(i): common for i in range(settings.clients)}
    _check_agents(agents)
    folder = arguments.folder and arguments.folder.expanduser().resolve()
    keys = arguments.keys and arguments.keys.expanduser().resolve()
    return Plan(settings, agents, arguments.devices, folder, keys, arguments.insecure, arguments.timeout)


def _count(files: str) -> int:
    """Return the number of device files, which other settings are compared with."""
    from fedtta.client.sites import device_files

    return len(device_files(files))


def _agents_of(files: str, settings: Settings, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the agents of device files in the order of their names; a file's own keys win over common ones.

    Paths become absolute, because the deployment writes the files of its agents elsewhere.
    """
    from fedtta.client.config import AgentConfig
    from fedtta.client.own import settings_alone
    from fedtta.client.sites import device_files, simulated_nodes

    settings_alone(settings)  # refuses a run without class names
    found: dict[str, dict[str, Any]] = {}
    for path in device_files(files):
        content = from_toml(path, ("policy",))
        try:
            config = AgentConfig.from_mapping({"state-dir": ".", **content}, path.parent)
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from error
        own = {key: getattr(config, key.replace("-", "_")) for key in content if key not in (*PLACE, "policy")}
        own |= {key: content[key] for key in content if key == "policy"}
        found[config.name] = {**common, **own}
    return {node.name: found[node.name] for node in simulated_nodes(settings.replace(devices=files))}


def _check_agents(agents: dict[str, dict[str, Any]]) -> None:
    """Check the agents' keys as agents do."""
    from fedtta.client.config import AgentConfig

    for name, keys in agents.items():
        AgentConfig.from_mapping({"name": name, "state-dir": "/", **keys})


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
    OSError
        The folder cannot be written.
    """
    from fedtta.simulation import deployment

    with ExitStack() as stack:
        folder = plan.folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="fedtta-deploy-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made)).resolve()
        home = folder / "flower"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        sockets = stack.enter_context(deployment.sockets_folder())
        files = {name: deployment.agent_config(folder, sockets, name, keys) for name, keys in plan.agents.items()}
        config: list[dict[str, Scalar]] = [{"name": name, "agent": f"unix:{sockets}/r{name}"} for name in files]
        say(f"starting a SuperLink in {folder}{', without TLS' if plan.insecure else ''}")
        try:
            with deployment.deployment(home, config, plan.insecure, plan.keys):
                started = {
                    f"unix:{sockets}/a{name}": deployment.start_agent(home / f"agent-{name}", file)
                    for name, file in files.items()
                }
                deployment.wait_for_agents(started)
                say(f"{len(files)} SuperNodes and agents are up; the run starts")
                deployment.run(home, plan.settings.flat(), plan.timeout, show=True)
                return _ask_all(plan, sockets)
        except FlowerError as error:
            raise FlowerError(f"{error}\n{deployment.logs(home, f'*/{deployment.AGENT_LOG}')}".rstrip()) from error


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _ask_all(plan: Plan, sockets: Path) -> Table:
    """Query every agent for predictions of some of its test images, and for its status."""
    from fedtta.simulation.deployment import ask, predicted

    rows = Table("agent", "model", "adapter", "samples", "guard", f"first {SHOWN} test images", title="Agents")
    for name, images, labels in _first_test_images(plan):
        address = f"unix:{sockets}/a{name}"
        status, reply = ask(address, images[:0])
        result = "no test images" if status.model_version else "no model: see its log"  # it refuses one that is no good
        if status.model_version and len(images):
            status, reply = ask(address, images)
        if reply is not None:
            right = int((predicted(reply) == labels).sum())
            result = f"{right} of {len(images)} right" if (labels >= 0).all() else f"{len(images)} without labels"
        guard = ", ".join(f"{kind} {count}" for kind, count in sorted(status.guard_events.items()) if count) or "quiet"
        rows.add_row(name, status.model_version, status.adapter, str(status.samples), guard, result)
    return rows


def _first_test_images(plan: Plan) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield each agent's name and its first test images with their labels, -1 without any.

    Data of a device's own are scanned here once more, as any program on that device could.
    """
    from fedtta.client.resources import federation_of
    from fedtta.client.sites import simulated_nodes
    from fedtta.simulation.engine import scanned

    if not plan.devices:
        federation = federation_of(plan.settings)
        for name, split in zip(plan.agents, federation.splits, strict=True):
            chosen = split.test[:SHOWN]
            yield name, federation.images.pixels[chosen], federation.images.labels[chosen]
        return
    with tempfile.TemporaryDirectory(prefix="fedtta-") as folder:
        for node in simulated_nodes(plan.settings.replace(devices=plan.devices)):
            data = scanned(node, plan.settings.replace(state_dir=folder))
            chosen = data.split.test[:SHOWN]
            yield node.name, data.images.pixels[chosen], data.images.labels[chosen]


def main(words: Sequence[str] | None = None) -> int:
    """Deploy, run, print the tables; return exit status 0 on success, 1 on failure, 2 for bad arguments."""
    try:
        plan = parse(words)
        results = plan.results
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # imports torch and Flower, which refusing a setting does not need
    from fedtta.server.report import METRICS_FILE
    from fedtta.simulation.certificates import KeysError

    unwind_on_signals()
    if not plan.settings.resume and (results / METRICS_FILE).exists():
        print(f"error: {results} already holds a run; choose another run-name", file=sys.stderr)
        return 2
    try:
        table = deploy(plan)
    except (FlowerError, KeysError, OSError) as error:
        print(f"deployment failed: {error}", file=sys.stderr)
        return 1
    show_results(results, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
