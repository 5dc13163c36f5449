"""Server and clients on this machine: one function from settings to a run folder, whatever runs the clients."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flwr.clientapp import ClientApp

from client.app import app as default_client_app
from client.compute import resolve_device
from client.runtime import federation_of
from client.spec import network_spec
from data import resolve
from models import build
from models.vectorized import is_stochastic
from server.app import run_folder
from server.collaboration import check_collaborations
from server.events import Listener
from server.methods import plan
from settings import Settings, SettingsError

#: Bytes of a network up to which stacking many of them pays on a GPU: one alone leaves most of it idle.
SMALL = 8 * 2**20


def simulate(
    settings: Settings,
    folder: Path | None = None,
    listeners: Sequence[Listener] = (),
    client_app: ClientApp = default_client_app,
) -> Path:
    """Run server and clients on this machine and return the run folder.

    Parameters
    ----------
    settings : Settings
        `engine` says what runs the clients. With Ray, ours or Flower's: `workers` of them at the same time, each with
        one CPU and the share `num-gpus` of a GPU.
    folder : Path, optional
        Where results go; made from the settings when None.
    listeners : sequence of callable
        Called with every event, in this process.
    client_app : ClientApp
        What nodes run; Flower's own simulation (`engine = flower`) runs others than ours.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit.
    RunError
        The run could not go on; the folder holds what there is.
    """
    ours = client_app is default_client_app
    class_counts, name = check(settings), engine(settings, ours)
    if name != "flower" and not ours:
        raise SettingsError(f"engine = {name!r}: runs no other ClientApp than ours; allowed is engine = 'flower'")
    folder, on_disk = folder or run_folder(settings), bool(settings.state_dir)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with _private_state(settings) as settings:
        if name == "vectorised":
            from simulation.in_process import run_in_process

            run_in_process(settings, folder, listeners, class_counts, on_disk)
        elif name == "ray":
            from simulation.workers import run_on_workers  # and with it Ray

            run_on_workers(settings, folder, listeners, class_counts)
        else:
            from simulation.flower_ray import run_on_flower

            run_on_flower(settings, folder, listeners, class_counts, client_app)
    return folder


def engine(settings: Settings, our_app: bool = True) -> str:
    """Return the engine that a run gets: `auto` is "vectorised" on a GPU for small networks without dropout.

    Another ClientApp than ours gets Flower's.
    """
    if settings.engine != "auto":
        return settings.engine
    if not our_app:
        return "flower"
    if resolve_device(settings.device).type == "cpu":
        return "ray"
    images = federation_of(settings).images
    spec = network_spec(images, settings.model, settings.model_options, settings.dataset, settings.image_size)
    network = build(seed=0, **spec)
    size = sum(value.nbytes for value in network.global_state().values())
    return "vectorised" if size <= SMALL and not is_stochastic(network) else "ray"


def check(settings: Settings) -> list[list[int]]:
    """Refuse bad combinations and data that cannot be read before anything starts; return who has what.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit.
    """
    check_collaborations(settings, plan(settings))
    try:
        resolve(settings.shifts, has_natural=True)
    except ValueError as error:
        raise SettingsError(f"shifts = {settings.shifts!r}: {error}") from error
    try:
        return federation_of(settings).class_counts().tolist()
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error


@contextmanager
def _private_state(settings: Settings) -> Iterator[Settings]:
    """Give the clients a folder for their private state that lasts as long as the run, unless one is set."""
    if settings.state_dir:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="fedtta-") as folder:
        yield settings.replace(state_dir=folder)
