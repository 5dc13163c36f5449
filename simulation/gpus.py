"""The GPUs of this machine: which ones a simulation uses, each worker's share of one, and whether all workers fit.

Ray shows a worker the GPU that it gave it as the only one, so the device of every worker is `cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedtta.settings import Settings, SettingsError

MASK = "CUDA_VISIBLE_DEVICES"
UNITS = 10_000  # in which Ray counts a GPU; it rounds a share down


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: indices, GPU-... or MIG-..."""
    import torch  # slow, and nothing to the keeper of a cluster's private state, which needs the rest of this module

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if MASK not in os.environ or not count:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in os.environ[MASK].split(",") if name.strip()]
    # CUDA shows one MIG instance to a process, however many the mask names; of others it stops at a wrong name
    return names if names[0].startswith("MIG-") else names[:count]


def chosen_gpus(device: str) -> list[str]:
    """Return the GPUs that the setting `device` stands for, as `visible_gpus` does: all, one of them, or none on a CPU.

    Raises
    ------
    SettingsError
        A GPU is asked for by name and is not there.
    """
    names = [] if device == "cpu" else visible_gpus()
    index = device.partition(":")[2]
    if index and int(index) < len(names):
        return [names[int(index)]]
    if index or (device == "cuda" and not names):
        from fedtta.client.resources import missing_gpu

        raise SettingsError(missing_gpu(device, len(names)))
    return names


def check_share(gpus: float) -> None:
    """Refuse a share of GPUs that Ray cannot give; SettingsError."""
    if gpus > 1 and gpus != int(gpus):
        raise SettingsError(f"num-gpus = {gpus}: allowed is at most 1, or a whole number")
    if gpus and int(gpus * UNITS) < 1:
        raise SettingsError(f"num-gpus = {gpus}: allowed is 0, or at least {1 / UNITS}")


@dataclass(frozen=True)
class Allocation:
    """What the workers of a simulation on this machine compute on.

    Parameters
    ----------
    settings : Settings
        For the workers: with their device, and the smallest share.
    gpus : list of str
        The GPUs that they have, as `visible_gpus`; none: they compute on the CPU.
    shares : list of float
        Each worker's share of a GPU, largest first.
    """

    settings: Settings
    gpus: list[str]
    shares: list[float]


def allocate(settings: Settings, nodes: Sequence[Mapping[str, Any]] | None = None) -> Allocation:
    """Divide this machine's GPUs among the workers of a run, before anything starts.

    Parameters
    ----------
    settings : Settings
        `num-gpus` is each worker's share; by default the workers are spread evenly over the GPUs.
    nodes : sequence of mapping, optional
        Of a Ray that was started before, which knows its own GPUs (`ray.nodes`); default: it is still to be started.

    Raises
    ------
    SettingsError
        A GPU, or a share, is asked for that cannot be had, or not all workers fit.
    """
    gpus, device = chosen_gpus(settings.device), settings.device
    if gpus and nodes is not None and ":" in device:
        raise SettingsError(
            f"device = {device!r}: a Ray that was started before chooses the GPUs; allowed are auto, cpu, cuda"
        )
    if nodes is None:
        nodes = [{"Alive": True, "Resources": {"CPU": settings.workers, "GPU": len(gpus)}}]
    count = int(sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])) if gpus else 0
    if gpus and not count:
        raise SettingsError(
            f"device = {device!r}: this process sees {len(gpus)} GPUs, and the Ray that was started before has 0; "
            "allowed is cpu"
        )
    share = settings.num_gpus
    if share and not gpus:
        raise SettingsError(f"num-gpus = {share}: with device = {device!r} workers have 0 GPUs here; allowed is 0")
    check_share(share)
    shares = [share] * settings.workers if share or not gpus else spread(settings.workers, count)
    check_room(nodes, shares)
    return Allocation(settings.replace(device="cuda", num_gpus=min(shares)) if gpus else settings, gpus, shares)


def spread(workers: int, gpus: int) -> list[float]:
    """Return the shares of workers, largest first, that are spread evenly over GPUs: those of one GPU have equal ones.

    Ray fills the GPUs with them in this order.
    """
    together = [len(range(gpu, workers, gpus)) for gpu in range(min(gpus, workers))]  # workers on each GPU
    return [UNITS // count / UNITS for count in reversed(together) for _ in range(count)]


def room(nodes: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> int:
    """Return how many workers fit on nodes: each takes one CPU, and a share of one GPU or several whole ones.

    Parameters
    ----------
    nodes : sequence of mapping
        As `ray.nodes` describes them.
    shares : sequence of float
        Each worker's share.
    """
    free = [
        (int(node["Resources"].get("CPU", 0)), [UNITS] * int(node["Resources"].get("GPU", 0)))
        for node in nodes
        if node["Alive"]
    ]
    fit = 0
    for share in sorted(shares, reverse=True):
        units, whole = (UNITS, int(share)) if share > 1 else (int(share * UNITS), 1 if share else 0)
        for position, (cpus, left) in enumerate(free):
            taken = [gpu for gpu, own in enumerate(left) if own >= units][:whole]
            if cpus and len(taken) == whole:
                free[position] = cpus - 1, [own - units * (gpu in taken) for gpu, own in enumerate(left)]
                fit += 1
                break
    return fit


def check_room(nodes: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> None:
    """Refuse workers that do not fit, since those that Ray never starts would be waited for.

    Parameters
    ----------
    nodes, shares
        As of `room`.

    Raises
    ------
    SettingsError
        With what is asked, what there is, and how many workers fit.
    """
    if (fit := room(nodes, shares)) < len(shares):
        living = [node["Resources"] for node in nodes if node["Alive"]]
        there = amount(*(sum(one.get(kind, 0) for one in living) for kind in ("CPU", "GPU")))
        has = f"Ray has {there} on {len(living)} nodes"
        raise SettingsError(f"{asked(shares)}; {has}; allowed with this share are at most {fit} workers")


def asked(shares: Sequence[float]) -> str:
    """Return in words what workers with these shares ask for."""
    return f"workers = {len(shares)}, num-gpus = {min(shares):g}: asked are {amount(len(shares), sum(shares))}"


def amount(cpus: float, gpus: float) -> str:
    """Return numbers of processors in words."""
    return f"{cpus:g} CPUs and {gpus:g} GPUs"


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started meanwhile, and restore them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def mask(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variable by which processes see these GPUs only; none if they are given no GPU."""
    return {MASK: ",".join(gpus)} if gpus else {}
