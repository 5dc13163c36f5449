"""A node: its own facts, and the device that answers a request there.

Neither Flower nor the transport matters here: the ClientApp, the simulation's workers and the resident agent all call
`perform`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedtta.client.device import Device
from fedtta.client.resources import federation_of, resolve_device, shared_network
from fedtta.client.state import DirectoryState, NetworkStore, PrivateState, ResumableState, private_folder
from fedtta.data import Federation, Role, load_natural
from fedtta.messages.replies import Reply
from fedtta.messages.requests import Adapt, Evaluate, Identify, RefineRates, Request, Summarize, Train
from fedtta.settings import Scalar, Settings, SettingsError, assignments, from_config, from_json


@dataclass(frozen=True)
class Node:
    """A node's own facts, independent of any run.

    Parameters
    ----------
    partition, num_partitions : int
        Which client it is, of how many.
    state : PrivateState
        Where private state lives when neither node nor run sets `state-dir`.
    role : "both", "source", "target" or None
        None: what its data allow.
    settings : mapping
        Key → value of the settings that the node overrides (group "node").
    memory : PrivateState, optional
        Where the states of adapters live; if it is given, `state` is used regardless of `state-dir`.
    lends : bool
        Reply with the network's own memory: the reply is read before this node, or another one that shares the network,
        is asked for anything else.
    """

    partition: int
    num_partitions: int
    state: PrivateState
    role: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory: PrivateState | None = None
    lends: bool = False


def perform(request: Request, node: Node) -> Reply:
    """Answer a request.

    Raises
    ------
    SettingsError
        A setting is unknown or impossible, or the run has another number of clients.
    ValueError, FloatingPointError
        As the methods of `Device`.
    """
    device = make_device(request, node)
    methods: dict[type[Request], Callable[[Any], Reply]] = {
        Identify: device.identify,
        Train: device.train,
        Summarize: device.summarize,
        RefineRates: device.refine_rates,
        Adapt: device.adapt,
        Evaluate: device.evaluate,
    }
    return methods[type(request)](request)


def make_device(request: Request, node: Node) -> Device:
    """Return the device that a request is for; data and network are shared by all clients of this process.

    One torch thread: equal bits with 1 and 2 workers need it, since Ray sets the number from a client's CPUs.

    Raises
    ------
    SettingsError
        A setting is unknown or impossible, or the run has another number of clients.
    ValueError
        Data that cannot be read, a partition that does not exist, or a role that its data do not allow.
    """
    torch.set_num_threads(1)
    settings = _settings_of(request.settings, tuple(node.settings.items()))
    if node.num_partitions != settings.clients:
        raise SettingsError(f"clients = {settings.clients}: this node is one of {node.num_partitions}")
    federation = federation_of(settings)
    if not 0 <= node.partition < federation.num_clients:
        raise ValueError(f"partition-id = {node.partition}: allowed are 0 to {federation.num_clients - 1}")
    folder = Path(settings.state_dir).expanduser() if settings.state_dir and node.memory is None else None
    state = DirectoryState(folder, request.run, node.partition) if folder else node.state
    # on disk unless the node lives as long as the run: Flower would ship its context with every message
    memory = node.memory or DirectoryState(private_folder(settings), request.run, node.partition)
    network_settings = from_config(settings.select("model", "data", "execution"))
    options = assignments(settings.dataset_options, "dataset-options")
    natural: Any = options.get("natural", "")
    return Device(
        federation,
        node.partition,
        shared_network(federation, network_settings),
        ResumableState(state, request.checkpoint_rounds),
        ResumableState(memory, request.checkpoint_rounds),
        settings,
        resolve_device(settings.device),
        _role(federation, node.partition, node.role),
        NetworkStore(private_folder(settings) / "networks"),
        load_natural(settings.dataset, settings.data_dir or None, settings.image_size, natural=natural),
        node.lends,
    )


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
