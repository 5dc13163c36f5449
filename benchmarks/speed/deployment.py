"""A training round on real nodes over one of an empty Flower app.

A SuperLink, SuperNodes and agents as processes of this machine, with TLS and node authentication. Both apps run on the
same SuperLink and SuperNodes, one after the other: first the empty one (`fedtta.benchmarks.speed.empty_app`), whose
arrays have the shapes of the network's, then ours. The first round of each, in which data are loaded, is left out.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics as averages
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tomli_w

from fedtta.benchmarks.speed import empty_app
from fedtta.benchmarks.speed.measurement import Measured, Ratio
from fedtta.client.resources import federation_of, network_spec
from fedtta.models import build
from fedtta.server.events import Event, RunError
from fedtta.server.report import METRICS_FILE
from fedtta.settings import Scalar, Settings, from_config, keys_in
from fedtta.simulation import deployment as nodes
from fedtta.simulation.superlink import FlowerError

#: One training of the embedded digits, and as little after it as a run allows.
BASE = {"dataset": "digits", "model": "cnn", "methods": "fedavg", "shifts": "original", "local-epochs": 1}
NODES, ROUNDS, TIMEOUT = 2, 5, 1800.0
RUN = "app"  # name of our run
APP = "empty-app"  # what `flwr build` takes for a name


@dataclass(frozen=True)
class RoundTime:
    """One round of ours: seconds on the server's clock, and of the client that trained longest."""

    round: int
    seconds: float
    training_seconds: float


@dataclass(frozen=True)
class Summary:
    """Medians over rounds, in seconds: a round of ours, of the empty app, and of training in a client.

    `over_floor` is ours over the empty app's, `beside_training` what ours takes beyond it and training.
    """

    seconds: float
    floor_seconds: float
    training_seconds: float
    over_floor: float
    beside_training: float


def deployment(quick: bool) -> Measured:
    """Deploy, run both apps, and return a round's seconds over the empty app's.

    Raises
    ------
    RunError
        Something did not start, a run failed, or a client did: its round would be too short.
    """
    settings = from_config({**BASE, "clients": NODES, "rounds": 2 if quick else ROUNDS})
    with tempfile.TemporaryDirectory(prefix="fedtta-bench-", ignore_cleanup_errors=True) as folder:
        floor, events = deployed(settings, Path(folder).resolve(), TIMEOUT)
    ours, floor = round_times(events), floor[1:]
    summary = summarise(ours, floor)
    what = f"a training round of {NODES} nodes over TLS"
    seconds = summary.seconds, summary.floor_seconds
    details = {"nodes": NODES, "tls": True, "medians": asdict(summary), "empty_app_rounds": floor}
    details |= {"rounds": [asdict(time) for time in ours], "settings": settings.flat()}
    return Measured([Ratio(what, summary.over_floor, "s", *seconds, "an empty Flower app")], details)


def deployed(settings: Settings, folder: Path, timeout: float) -> tuple[list[float], list[Event]]:
    """Start everything, run both apps and stop it; return the seconds of the empty app's rounds, and our events.

    Parameters
    ----------
    folder : Path
        Empty and absolute.

    Raises
    ------
    FlowerError
        Something could not be started or stopped, or a run did not complete.
    """
    number, home = settings.clients, folder / "flower"
    home.mkdir(mode=0o700)
    config: dict[str, Any] = settings.flat() | {"results": str(folder / "results"), "run-name": RUN}
    # the working directory of the apps is Flower's affair
    config |= {key: str(Path(config[key]).expanduser().resolve()) for key in keys_in("paths") if config[key]}
    settings = from_config(config)
    keys = {"device": settings.device} | ({"data-dir": settings.data_dir} if settings.data_dir else {})
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(nodes.sockets_folder())
        devices = [nodes.agent_config(folder, sockets, str(i), keys) for i in range(number)]
        configs: list[dict[str, Scalar]] = [{"name": str(i), "agent": f"unix:{sockets}/r{i}"} for i in range(number)]
        try:
            stack.enter_context(nodes.deployment(home, configs))
            nodes.wait_for_agents(
                {f"unix:{sockets}/a{i}": nodes.start_agent(home / f"agent-{i}", devices[i]) for i in range(number)}
            )
            floor = run_empty_app(home, write_empty_app(folder, settings, timeout), timeout)
            nodes.run(home, settings.flat(), timeout)
        except FlowerError as error:
            raise FlowerError(f"{error}\n{nodes.logs(home, f'*/{nodes.AGENT_LOG}')}".rstrip()) from error
    return floor, read_events(folder / "results" / RUN / METRICS_FILE)


def write_empty_app(folder: Path, settings: Settings, timeout: float) -> Path:
    """Write the empty app, which does as many rounds with as many nodes, and return its folder."""
    images = federation_of(settings).images
    spec = network_spec(images, settings)
    shapes = [list(value.shape) for value in build(**spec).global_state().values()]
    config = {"nodes": settings.clients, "rounds": settings.rounds, "timeout": timeout, "shapes": json.dumps(shapes)}
    return write_app(folder / APP, empty_app, {**config, "results": str(folder / "empty.json")})


def write_app(folder: Path, module: ModuleType, config: Mapping[str, Any]) -> Path:
    """Write a Flower app of one module, which has a `server` and a `client`, and return its folder."""
    name = module.__name__.rpartition(".")[2]
    components = {"serverapp": f"{name}:server", "clientapp": f"{name}:client"}
    app = {"publisher": "fedtta", "components": components, "config": dict(config)}
    project = {"name": f"fedtta-{folder.name}", "version": "1.0.0", "description": "Measured", "dependencies": []}
    folder.mkdir()
    shutil.copy(str(module.__file__), folder)
    content = {"project": project, "tool": {"flwr": {"app": app}}}
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
    return folder


def run_empty_app(home: Path, app: Path, timeout: float) -> list[float]:
    """Run the empty app and return the seconds of each round.

    Raises
    ------
    FlowerError
        Flower did not take it, or it did not complete; the message has its log.
    """
    nodes.run(home, {}, timeout, project=app)
    results = app.parent / "empty.json"
    seconds: list[float] = json.loads(results.read_text(encoding="utf-8"))
    return seconds


def read_events(path: Path) -> list[Event]:
    """Return the events of a run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def round_times(events: Sequence[Event]) -> list[RoundTime]:
    """Return the times of all rounds but the first; RunError if a client of one of them did not reply."""
    times = []
    for event in [event for event in events if event["event"] == "round"][1:]:
        if event["replied"] != event["sampled"]:
            raise RunError(f"round {event['round']}: only {len(event['replied'])} of {len(event['sampled'])} replied")
        times.append(RoundTime(event["round"], event["wall_seconds"], max(event["train_seconds"])))
    return times


def summarise(ours: Sequence[RoundTime], floor: Sequence[float]) -> Summary:
    """Return the medians."""
    seconds, training = (
        averages.median(getattr(time, name) for time in ours) for name in ("seconds", "training_seconds")
    )
    empty = averages.median(floor)
    return Summary(seconds, empty, training, seconds / empty, seconds - empty - training)
