"""A node: its own facts, and the device that answers a request there.

Neither Flower nor the transport matters here: the ClientApp, the simulation's workers and the resident agent all call
`perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fedtta.client.device import Device
from fedtta.client.names import SOFTWARE, check_name
from fedtta.client.own import ignored, own_of_run, settings_alone
from fedtta.client.privacy import share_keys, unmask
from fedtta.client.resources import (
    federation_of,
    natural_of,
    network_spec,
    resolve_device,
    set_up_torch,
    shared_network,
)
from fedtta.client.state import LOG, DirectoryState, NetworkStore, PrivateState, ResumableState, private_folder
from fedtta.client.updates import outgoing
from fedtta.data import Federation, Role, client_number
from fedtta.messages.replies import Reply, Telemetry
from fedtta.messages.requests import (
    Adapt,
    Evaluate,
    Identify,
    Observe,
    RefineRates,
    Request,
    ShareKeys,
    Summarize,
    Train,
    Unmask,
)
from fedtta.settings import Scalar, Settings, SettingsError, from_config, from_json
from fedtta.settings.versions import versions


@dataclass(frozen=True)
class Node:
    """A node's own facts, independent of any run.

    Parameters
    ----------
    name : str
        The client's name. Without `source` it is "0" to "N-1": a client of the run's divided data set.
    state : PrivateState
        Where private state lives when neither node nor run sets `state-dir`.
    source : str
        The node's own data (`fedtta.data.sources.open_source`); all of them are this client's.
    role : "both", "source", "target" or None
        None: what its data allow.
    settings : mapping
        Key → value of the settings that the node overrides (group "node").
    memory : PrivateState, optional
        Where the states of adapters live; if it is given, `state` is used regardless of `state-dir`.
    lends : bool
        Reply with the network's own memory: the reply is read before this node, or another one that shares the network,
        is asked for anything else.
    class_map : mapping
        Class name in the node's own data → what the run calls it.
    index : Path, optional
        File that remembers the scans of its own data; default: `fedtta.client.own.index_path` in `state-dir`.
    note : callable, optional
        Called with a line of text about a damaged file of the private state; default: a warning in the log.
    least_batch : int
        Least samples of a training batch; smaller last ones are left out.
    durable : bool
        Whether private state on disk must outlive a power cut: not in a simulation that removes it at its end.

    Raises
    ------
    SettingsError
        The name is not allowed.
    """

    name: str
    state: PrivateState
    source: str = ""
    role: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory: PrivateState | None = None
    lends: bool = False
    class_map: Mapping[str, str] = field(default_factory=dict)
    index: Path | None = None
    note: Callable[[str], None] = LOG.warning
    least_batch: int = 1
    durable: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)


def perform(request: Request, node: Node, admit: Callable[[Request, Device], None] | None = None) -> Reply:
    """Answer a request.

    Parameters
    ----------
    admit : callable, optional
        Called before anything is computed; what it raises refuses the request.

    Raises
    ------
    SettingsError
        A setting is unknown or impossible, or the run has no client of this name.
    ValueError, FloatingPointError
        As the methods of `Device`.
    """
    if isinstance(request, Observe):
        return Telemetry(name=node.name, software=versions(*SOFTWARE))
    device = make_device(request, node)
    if admit is not None:
        admit(request, device)
    methods: dict[type[Request], Callable[[Any], Reply]] = {
        Identify: device.identify,
        Train: device.train,
        Summarize: device.summarize,
        RefineRates: device.refine_rates,
        Adapt: device.adapt,
        Evaluate: device.evaluate,
        ShareKeys: partial(share_keys, device),
        Unmask: partial(unmask, device),
    }
    return outgoing(device, request, methods[type(request)](request))


def make_device(request: Request, node: Node) -> Device:
    """Return the device that a request is for; data and network are shared by all clients of this process.

    Raises
    ------
    SettingsError
        A setting is unknown or impossible, or the run has no client of this name.
    ValueError
        Data that cannot be read, or a role that they do not allow.
    """
    settings = settings_of(request, node)
    device = resolve_device(settings.device)
    set_up_torch(device, settings.deterministic, settings.num_gpus or 1.0)
    folder = Path(settings.state_dir).expanduser() if settings.state_dir and node.memory is None else None
    state = DirectoryState(folder, request.run, node.name, node.note, node.durable) if folder else node.state
    # on disk unless the node lives as long as the run: Flower would ship its context with every message
    memory = node.memory or DirectoryState(private_folder(settings), request.run, node.name, node.note, node.durable)
    given, own, natural = settings, None, None
    if node.source:
        settings = settings_alone(settings)
        about = (node.source, node.name, node.role, node.class_map)
        own = own_of_run(*about, settings, request.run, memory, node.index)
        federation, partition = own.federation, 0
        own = replace(own, notes=tuple(filter(None, (ignored(given), *own.notes))))
    else:
        federation, partition = federation_of(settings), _partition(node.name, settings)
        natural = natural_of(settings)
    return Device(
        federation,
        partition,
        shared_network(network_spec(federation.images, settings), settings.device),
        ResumableState(state, request.checkpoint_rounds),
        ResumableState(memory, request.checkpoint_rounds),
        settings,
        device,
        own.data.role if own else _role(federation, partition, node.role),
        NetworkStore(private_folder(settings) / "networks"),
        natural,
        node.lends,
        node.name,
        own,
        node.least_batch,
    )


def settings_of(request: Request, node: Node) -> Settings:
    """Return a request's settings, with those that the node overrides; SettingsError if they are none."""
    return _settings_of(request.settings, tuple(node.settings.items()))


def _partition(name: str, settings: Settings) -> int:
    """Return the position of a client in the run's divided data set."""
    partition = client_number(name)
    if partition >= settings.clients:
        allowed = f"'0' to '{settings.clients - 1}', for the run divides one data set; other names need data"
        raise SettingsError(f"name = {name!r}: allowed are {allowed}")
    return partition


@lru_cache(maxsize=64)
def _settings_of(text: str, own: tuple[tuple[str, Scalar], ...]) -> Settings:
    """Return a request's settings, with those that the node overrides."""
    return from_config({**from_json(text).flat(), **dict(own)})


def _role(federation: Federation, partition: int, asked: str | None) -> Role:
    """Return the client's role: that of its data, or a narrower one that its node asks for."""
    own = federation.roles[partition]
    narrower = own == "both" and not federation.resample_splits  # which is defined for clients that do both
    allowed: tuple[Role, ...] = ("both", "source", "target") if narrower else (own,)
    for role in allowed:
        if role == (asked or own):
            return role
    raise ValueError(f"role = {asked!r}: allowed for client {partition} are {', '.join(allowed)}")
