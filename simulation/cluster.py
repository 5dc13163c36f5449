"""A simulation on a Ray cluster: its address, the code and the resources of its workers, private state, and images.

Nodes need the dependencies only: the code travels as a runtime environment. Images that a node lacks travel through
Ray's object store, once a node. Private state is kept by an actor on the driver's node, in the files of a run on one
machine: this needs no shared folder, a client may be scheduled anywhere, and another machine can resume the run.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from numpy.typing import NDArray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import fedtta
from fedtta.client.state import DirectoryState
from fedtta.messages.arrays import Arrays
from fedtta.settings import Settings, SettingsError
from fedtta.simulation.gpus import amount, asked, check_room, check_share

ANSWER = 10.0  # seconds for the cluster's port to accept a connection
PLACED = 60.0  # seconds for resources that other jobs use to become free
#: The package without what workers do not import; Ray follows the links of a checkout.
CODE = {
    "py_modules": [str(Path(fedtta.__file__).parent)],
    "excludes": ["/benchmarks", "/watch", "__pycache__"],
}


@contextmanager
def own_signals() -> Iterator[None]:
    """Keep the process's handler of SIGTERM: the one that `ray.init` sets aborts, and nothing is cleaned up."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster, and disconnect at the end.

    A connection that this process has already made is used as it is, and stays.

    Raises
    ------
    SettingsError
        Nothing answers there, or it is no Ray of this version.
    """
    if ray.is_initialized():
        yield
        return
    try:
        address = _running() if address == "auto" else address
        host, _, port = address.removeprefix("ray://").rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER):
            pass  # Ray itself tries for minutes
        with warnings.catch_warnings(), own_signals():
            warnings.simplefilter("ignore", FutureWarning)  # about defaults of later versions of Ray
            ray.init(address=address, runtime_env=CODE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(f"ray-address = {address!r}: no Ray cluster answers: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _running() -> str:
    """Return the address of the cluster that was started on this machine; ConnectionError if there is none."""
    from ray._private.services import canonicalize_bootstrap_address_or_die  # has no public name

    return str(canonicalize_bootstrap_address_or_die("auto"))


def gpu_share(settings: Settings) -> tuple[str, float]:
    """Return the device of all workers of a cluster, and each one's share of a GPU.

    The driver may have other devices than the nodes, and workers with different ones would give different bits: GPUs
    are used if and only if `num-gpus` asks for them.

    Raises
    ------
    SettingsError
        `device` and `num-gpus` do not go together, or the share cannot be had.
    """
    device, gpus = settings.device, settings.num_gpus
    if device.startswith("cuda:"):
        raise SettingsError(f"device = {device!r}: Ray chooses the GPUs of a cluster; allowed are auto, cpu, cuda")
    if (device == "cuda" and not gpus) or (device == "cpu" and gpus):
        allowed = "more than 0" if device == "cuda" else "0"
        raise SettingsError(f"num-gpus = {gpus}: allowed on a cluster with device = {device!r} is {allowed}")
    check_share(gpus)
    return ("cuda" if gpus else "cpu"), gpus


@contextmanager
def reserved(shares: Sequence[float], name: str) -> Iterator[PlacementGroup]:
    """Reserve a bundle of resources for each worker, spread over the nodes, and give them back at the end.

    Parameters
    ----------
    shares : sequence of float
        Each worker's share of a GPU.
    name : str
        Of the placement group.

    Raises
    ------
    SettingsError
        Ray has too few, or other jobs use them and do not end.
    """
    check_room(ray.nodes(), shares)
    bundles = [{"CPU": 1.0, "GPU": share} if share else {"CPU": 1.0} for share in shares]
    group = placement_group(bundles, strategy="SPREAD", name=name)
    try:
        if not group.wait(PLACED):
            free = ray.available_resources()
            there = amount(free.get("CPU", 0), free.get("GPU", 0))
            raise SettingsError(f"{asked(shares)}; other jobs left {there} for {PLACED:g} s")
        yield group
    finally:
        remove_placement_group(group)


class Keeper:
    """An actor with the private state of all clients, in a folder of the driver's node.

    A worker that is lost takes no state with it. Every method can be repeated.

    Parameters
    ----------
    folder : str
        As the setting `state-dir` of a run on one machine.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def load(self, run: str, name: str, key: str, round: int) -> Arrays | None:
        """See `DirectoryState.load`."""
        return DirectoryState(self._folder, run, name).load(key, round)

    def save(self, run: str, name: str, key: str, round: int, arrays: Arrays, keep: Collection[int]) -> None:
        """See `DirectoryState.save`."""
        DirectoryState(self._folder, run, name).save(key, round, arrays, keep)

    def tags(self, run: str, name: str) -> dict[str, list[int]]:
        """See `DirectoryState.tags`."""
        return DirectoryState(self._folder, run, name).tags()

    def remove(self) -> None:
        """Remove the folder; behind `ray://` it is on another machine than the driver."""
        shutil.rmtree(self._folder, ignore_errors=True)


class KeptState:
    """Private state of one client in one run, with a `Keeper`.

    Parameters
    ----------
    keeper : str
        Its name.
    run, name : str
        As of `DirectoryState`.
    """

    def __init__(self, keeper: str, run: str, name: str) -> None:
        self._keeper, self._owner = ray.get_actor(keeper), (run, name)

    def load(self, key: str, round: int) -> Arrays | None:
        """See `PrivateState.load`; raises as `DirectoryState.load`."""
        arrays = self._call(self._keeper.load, key, round)
        return None if arrays is None else {name: value.copy() for name, value in arrays.items()}

    def save(self, key: str, round: int, arrays: Mapping[str, NDArray[Any]], keep: Collection[int] = ()) -> None:
        """See `PrivateState.save`; raises as `DirectoryState.save`."""
        self._call(self._keeper.save, key, round, dict(arrays), sorted(keep))

    def tags(self) -> dict[str, list[int]]:
        """See `PrivateState.tags`."""
        return self._call(self._keeper.tags)

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return ray.get(method.remote(*self._owner, *arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None


@contextmanager
def keeper(folder: str, temporary: bool, name: str) -> Iterator[None]:
    """Keep a `Keeper` on the driver's node (behind `ray://`: the head).

    Parameters
    ----------
    temporary : bool
        Remove the folder at the end.
    """
    kind: Any = ray.remote(Keeper)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    handle = kind.options(
        name=name, num_cpus=0, max_concurrency=8, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
    ).remote(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ray.exceptions.RayError):  # a cluster that is gone
            if temporary:
                ray.get(handle.remove.remote(), timeout=ANSWER)
            ray.kill(handle)
