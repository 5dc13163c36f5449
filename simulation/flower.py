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
from fedtta.simulation.workers import share_gpu

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
    """Run server and clients in Flower's simulation; see `fedtta.simulation.engine.simulate`."""
    settings, gpus = share_gpu(settings)
    app = make_app(settings, folder, listeners, class_counts, WINDOW * settings.workers)
    start(app, client_app, settings, gpus)


def start(server_app: ServerApp, client_app: ClientApp, settings: Settings, gpus: float = 0.0) -> None:
    """Run two apps in Flower's simulation.

    Parameters
    ----------
    gpus : float
        Share of a GPU for each worker.
    """
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=settings.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": gpus, **REVIVE},
            "init_args": {"num_cpus": settings.workers, "log_to_driver": False},
        },
    )
