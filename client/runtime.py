"""Building a `Device` for a message, and what one process keeps between messages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from client.compute import resolve_device
from client.device import Device
from client.spec import network_spec
from client.state import PrivateState
from data import Federation, Role, load, load_natural
from models import TwoHead, build
from settings import Settings, assignments

#: Fields that do not change which images a client has.
_DATA_FIELDS = (
    "dataset", "dataset_options", "data_dir", "download", "fraction", "image_size",
    "clients", "partition", "alpha", "step_ratio", "target_fraction", "domains",
    "target_domain", "unseen_domain", "split", "train_part", "test_part", "seed",
)  # fmt: skip
_MODEL_FIELDS = ("model", "model_options", "dataset", "image_size", "device")


def make_device(
    settings: Settings,
    partition: int,
    state: PrivateState,
    memory: PrivateState,
    role: str | None = None,
) -> Device:
    """Return the device of one client; data and network are shared by all clients of this process.

    `role` is what the node says of itself ("both", "source" or "target"); None: what the data make of it.

    One torch thread: equal results on 1 and 2 workers need it, since Ray sets the number from a client's CPUs.

    Raises
    ------
    ValueError
        An unknown name, data that cannot be read, a partition that does not exist, or a role that its data do not
        allow.
    """
    torch.set_num_threads(1)
    federation = federation_of(settings)
    if not 0 <= partition < federation.num_clients:
        raise ValueError(f"partition-id = {partition}: allowed are 0 to {federation.num_clients - 1}")
    device = resolve_device(settings.device)
    model = _network(federation, *(getattr(settings, name) for name in _MODEL_FIELDS))
    options = assignments(settings.dataset_options, "dataset-options")
    natural = load_natural(
        settings.dataset, settings.data_dir or None, settings.image_size, natural=options.get("natural", "")
    )
    own_role = _role(federation, partition, role)
    return Device(federation, partition, model, state, memory, settings, device, own_role, natural)


def _role(federation: Federation, partition: int, asked: str | None) -> Role:
    """Return the client's role: its data's, or a narrower one that its node asks for."""
    own = federation.roles[partition]
    narrower = own == "both" and not federation.resample_splits  # which is defined for clients that do both
    allowed: tuple[Role, ...] = ("both", "source", "target") if narrower else (own,)
    for role in allowed:
        if role == (asked or own):
            return role
    raise ValueError(f"role = {asked!r}: allowed for client {partition} are {', '.join(allowed)}")


def federation_of(settings: Settings) -> Federation:
    """Return who has what; the same settings give the same splits in every process."""
    return _deal(*(getattr(settings, name) for name in _DATA_FIELDS))


@lru_cache(maxsize=2)
def _deal(
    dataset: str,
    dataset_options: str,
    data_dir: str,
    download: bool,
    fraction: float,
    image_size: int,
    clients: int,
    partition: str,
    alpha: float,
    step_ratio: float,
    target_fraction: float,
    domains: str,
    target_domain: str,
    unseen_domain: str,
    split: str,
    train_part: float,
    test_part: float,
    seed: int,
) -> Federation:
    """Load the images and deal them out."""
    options: dict[str, Any] = dict(assignments(dataset_options, "dataset-options"))
    images = load(
        dataset,
        root=data_dir or None,
        image_size=image_size,
        download=download,
        fraction=fraction,
        seed=seed,
        **options,
    )
    return Federation.create(
        images,
        clients,
        scheme=partition,
        alpha=alpha,
        seed=seed,
        step_ratio=step_ratio,
        target_fraction=target_fraction,
        domains=domains,
        target_domain=target_domain,
        unseen_domain=unseen_domain,
        resample_splits=split == "published",
        train_part=train_part,
        test_part=test_part,
    )


@lru_cache(maxsize=2)
def _network(federation: Federation, model: str, options: str, dataset: str, image_size: int, device: str) -> TwoHead:
    """Build the network that this process uses for all clients; its weights are loaded for each call."""
    network = build(**{"seed": 0, **network_spec(federation.images, model, options, dataset, image_size)})
    # convolutions run faster in this memory format, on CPUs as on GPUs; values are the same
    return network.to(resolve_device(device)).to(memory_format=torch.channels_last)
