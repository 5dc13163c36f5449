"""Simulations: one function from settings to a run folder, and the choice of the engine that runs the clients."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.clientapp import ClientApp

from fedtta.client.algorithms import find_algorithm
from fedtta.client.app import app as default_client_app
from fedtta.client.node import Node
from fedtta.client.own import scan, settings_alone
from fedtta.client.resources import federation_of, network_spec
from fedtta.client.sites import simulated_nodes
from fedtta.data import resolve
from fedtta.data.sources import OwnData
from fedtta.messages.flower import allow_messages
from fedtta.models import build
from fedtta.models.vectorized import is_stackable
from fedtta.server.adaptation import check_collaborations
from fedtta.server.app import run_folder, serve
from fedtta.server.events import Listener
from fedtta.server.methods import plan
from fedtta.server.trackers import tracker_names
from fedtta.settings import Settings, SettingsError, from_config
from fedtta.settings.files import make_folder
from fedtta.simulation.gpus import chosen_gpus
from fedtta.simulation.vectorized import VectorizedTransport, at_once

#: Bytes of a network up to which a GPU trains many at once faster: one alone leaves most of the GPU idle.
SMALL = 8 * 2**20


def simulate(
    settings: Settings,
    folder: Path | None = None,
    listeners: Sequence[Listener] = (),
    client_app: ClientApp = default_client_app,
) -> Path:
    """Run the server on this machine and the clients here or on a Ray cluster; return the run folder.

    Parameters
    ----------
    settings : Settings
        `engine` selects what runs the clients. With Ray (our own workers, or Flower's simulation), `workers` clients
        run at the same time, each with one CPU and the share `num-gpus` of a GPU; `ray-address` has our own workers run
        on a cluster.
    folder : Path, optional
        Folder of the results; derived from the settings when None.
    listeners : sequence of callable
        Called with every event, in this process.
    client_app : ClientApp
        App of the nodes; only Flower's simulation (`engine = flower`) runs apps other than ours.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit.
    RunError
        The run could not go on; the folder holds the results so far.
    """
    ours, settings, address = client_app is default_client_app, with_devices(settings), cluster_address(settings)
    on_disk = bool(settings.state_dir)
    with _private_state(settings) as settings:
        class_counts, name = check(settings), engine(settings, ours)
        if name != "flower" and not ours:
            raise SettingsError(f"engine = {name!r}: runs our own ClientApp only; allowed is engine = 'flower'")
        folder = folder or run_folder(settings)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        if name != "flower":
            allow_messages()  # strategies configure their rounds in Flower's messages
        if name == "vectorised":
            transport = VectorizedTransport(simulated_nodes(settings), at_once(settings), on_disk)
            serve(transport, settings, folder, listeners, class_counts)
        elif name == "ray":
            from fedtta.simulation.workers import ray_transport  # imports Ray

            with ray_transport(settings, folder.name, address, not on_disk) as (settings, workers):
                serve(workers, settings, folder, listeners, class_counts)
        else:
            from fedtta.simulation.flower import run_on_flower

            run_on_flower(settings, folder, listeners, class_counts, client_app)
    return folder


def engine(settings: Settings, our_app: bool = True) -> str:
    """Return the engine of a run.

    `auto` is "vectorised" on a GPU if all training rounds of all methods can be stacked and the network is small, else
    "ray". Apps other than ours run in Flower's simulation.
    """
    if settings.ray_address not in ("", "local") and (settings.engine not in ("auto", "ray") or not our_app):
        raise SettingsError(
            f"ray-address = {settings.ray_address!r}: allowed with engine = 'ray' and our own ClientApp"
        )
    if settings.engine != "auto":
        return settings.engine
    if not our_app:
        return "flower"
    if cluster_address(settings):
        return "ray"
    if not chosen_gpus(settings.device) or settings.devices or not _stacks(settings):
        return "ray"
    images = federation_of(settings).images
    network = build(seed=0, **network_spec(images, settings))
    size = sum(value.nbytes for value in network.global_state().values())
    return "vectorised" if size <= SMALL and is_stackable(network) else "ray"


def _stacks(settings: Settings) -> bool:
    """Return whether a run trains, and every round of it can train many clients at once."""
    stages = [stage for training in plan(settings) for stage in training.recipe.stages]
    algorithms = [find_algorithm(stage.algorithm) for stage in stages if getattr(settings, stage.rounds)]
    return at_once(settings) > 1 and bool(algorithms) and all(one.stackable for one in algorithms)


def cluster_address(settings: Settings) -> str:
    """Return the address of the Ray cluster that a run goes to; empty: it stays on this machine.

    The setting `ray-address` comes first, then the environment variable RAY_ADDRESS; "auto" is the cluster of this
    variable, or one that was started on this machine.

    Raises
    ------
    SettingsError
        RAY_ADDRESS is none of what `ray-address` may be.
    """
    address = settings.ray_address
    if address in ("", "auto"):
        address = os.environ.get("RAY_ADDRESS", "") or address
        try:
            settings.replace(ray_address=address)
        except SettingsError as error:
            raise SettingsError(f"of the environment variable RAY_ADDRESS: {error}") from error
    return "" if address == "local" else address


def with_devices(settings: Settings) -> Settings:
    """Return settings whose `clients` is the number of device files, if there are any.

    Raises
    ------
    SettingsError
        As `fedtta.client.sites.simulated_nodes` and `Settings.check_clients`.
    """
    if not settings.devices:
        return settings
    pattern = str(Path(settings.devices).expanduser().absolute())  # workers may run in another folder
    settings = settings.replace(devices=pattern, clients=len(simulated_nodes(settings)))
    settings.check_clients()
    return settings


def check(settings: Settings) -> list[list[int]]:
    """Check settings and data before anything starts; return the class counts of each client.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit.
    """
    check_collaborations(settings, plan(settings))
    tracker_names(settings)
    try:
        resolve(settings.shifts, has_natural=True)
    except ValueError as error:
        raise SettingsError(f"shifts = {settings.shifts!r}: {error}") from error
    if settings.devices:
        return _class_counts(settings)
    try:
        return federation_of(settings).class_counts().tolist()
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error


def _class_counts(settings: Settings) -> list[list[int]]:
    """Return the training samples per class of each device with data of its own, after a scan of all of them."""
    counts = []
    for node in simulated_nodes(settings):
        data = scanned(node, settings)
        labels = data.images.labels[data.split.train]
        counts.append(np.bincount(labels, minlength=data.images.num_classes).tolist())
    return counts


def scanned(node: Node, settings: Settings) -> OwnData:
    """Scan the data of a device's own; `state-dir` gets an index of them.

    Raises
    ------
    SettingsError
        The run has no class names, or the data do not fit; the message names the device.
    """
    own = settings_alone(from_config({**settings.flat(), **node.settings}))
    try:
        return scan(node.source, node.name, node.role, node.class_map, own)
    except (ValueError, OSError) as error:
        raise SettingsError(f"device {node.name}: {error}") from error


@contextmanager
def _private_state(settings: Settings) -> Iterator[Settings]:
    """Set a temporary `state-dir` for the length of the run, unless one is set; SettingsError if that cannot be made.

    Clients would find out after their first training.
    """
    if settings.state_dir:
        chosen = Path(settings.state_dir).expanduser()
        try:
            make_folder(chosen)
            tempfile.TemporaryFile(dir=chosen).close()
        except OSError as error:
            raise SettingsError(
                f"state-dir = {settings.state_dir!r}: allowed is a folder to write in: {error}"
            ) from error
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="fedtta-") as folder:
        yield settings.replace(state_dir=folder)
