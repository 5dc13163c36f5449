"""Flower's own simulation, also on Ray: clients in worker processes, messages through Flower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.simulation import run_simulation

from server.app import make_app
from server.events import Listener
from settings import Settings
from simulation.ray_options import REVIVE, share_gpu
from simulation.windowed import WindowedGrid

#: Messages under way for each worker: enough that none waits for the server to look.
WINDOW = 8


def run_on_flower(
    settings: Settings,
    folder: Path,
    listeners: Sequence[Listener],
    class_counts: list[list[int]],
    client_app: ClientApp,
) -> None:
    """Run server and clients under Flower's simulation; see `simulation.engine.simulate`."""
    settings, gpus = share_gpu(settings)

    def windowed(grid: Grid) -> Grid:
        return WindowedGrid(grid, WINDOW * settings.workers)

    run_simulation(
        server_app=make_app(settings, folder, listeners, class_counts, windowed),
        client_app=client_app,
        num_supernodes=settings.clients,
        backend_config={
            # without REVIVE Flower keeps handing messages to a worker that is dead, and each fails at once
            "client_resources": {"num_cpus": 1, "num_gpus": gpus, **REVIVE},
            "init_args": {"num_cpus": settings.workers, "log_to_driver": False},
        },
    )
