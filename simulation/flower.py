"""Flower's own simulation: clients in Ray processes, messages through Flower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from fedtta.server.app import make_app
from fedtta.server.events import Listener
from fedtta.settings import Settings
from fedtta.simulation.gpus import allocate, environment_with, mask
from fedtta.simulation.workers import running

#: Messages in progress for each worker: enough that none of them waits for the server.
WINDOW = 8
#: Options of a worker: one that dies is started again and repeats what it was doing, with the same bits. Without them
#: Flower goes on handing messages to a dead worker, and all of them fail.
REVIVE = {"max_restarts": -1, "max_task_retries": 1}


def run_on_flower(
    settings: Settings,
    folder: Path,
    listeners: Sequence[Listener],
    class_counts: list[list[int]],
    client_app: ClientApp,
) -> None:
    """Run server and clients in Flower's simulation; see `fedtta.simulation.engine.simulate`.

    Raises
    ------
    SettingsError
        As `allocate`; a Ray that this process has already started, which Flower uses as it is, is asked.
    """
    allocation = allocate(settings, running())
    settings = allocation.settings
    app = make_app(settings, folder, listeners, class_counts, WINDOW * settings.workers)
    with environment_with(mask(allocation.gpus)):
        start(app, client_app, settings, len(allocation.gpus))


def start(server_app: ServerApp, client_app: ClientApp, settings: Settings, gpus: int = 0) -> None:
    """Run two apps in Flower's simulation; all workers have the share `num-gpus` of one of `gpus` GPUs."""
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=settings.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": settings.num_gpus, **REVIVE},
            "init_args": {"num_cpus": settings.workers, "num_gpus": gpus, "log_to_driver": False},
        },
    )
