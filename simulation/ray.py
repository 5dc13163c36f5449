"""Flower's Ray simulation: one function from settings to a run folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from client.app import app as client_app
from client.compute import resolve_device
from client.runtime import federation_of
from server.app import make_app, run_folder
from server.events import Listener
from server.methods import plan
from settings import Settings


def simulate(settings: Settings, folder: Path | None = None, listeners: Sequence[Listener] = ()) -> Path:
    """Run server and clients on this machine and return the run folder.

    Parameters
    ----------
    settings : Settings
        `workers` clients run at the same time, each with one CPU and the share `num-gpus` of a GPU.
    folder : Path, optional
        Where results go; made from the settings when None.
    listeners : sequence of callable
        Called with every event, in this process.

    Raises
    ------
    SettingsError
        Something asked for does not exist or does not fit.
    RunError
        The run could not go on; the folder holds what there is.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.simulation import run_simulation  # reads the variable when imported

    plan(settings)  # refuse a bad combination, and data that cannot be read, before Ray starts
    class_counts = federation_of(settings).class_counts().tolist()
    settings, gpus = _share_gpu(settings)
    folder = folder or run_folder(settings)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app=make_app(settings, folder, listeners, class_counts),
        client_app=client_app,
        num_supernodes=settings.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
            "init_args": {"num_cpus": settings.workers, "log_to_driver": False},
        },
    )
    return folder


def _share_gpu(settings: Settings) -> tuple[Settings, float]:
    """Resolve the device once for all workers, and each worker's share of the GPU."""
    device = resolve_device(settings.device)
    if device.type == "cpu":
        return settings.replace(device="cpu"), 0.0
    # Ray shows each worker only its own GPU, which then has the index 0
    return settings.replace(device="cuda"), settings.num_gpus or 1 / settings.workers
