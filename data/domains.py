"""Who trains, who only tests, and the domain that each client's pictures are from (ATP, section 6, C.1).

A source client has labelled training and validation samples; a target client has test samples and no labels that any
method can see. With corrupted domains each client has one corruption at one severity on all of its pictures: source
clients one of the 15 common ones, target clients one of the 4 others, so that targets are new in kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from .corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from .images import Images
from .seeds import generator

#: "both" trains and tests, as in the two-head protocols.
Role = Literal["both", "source", "target"]
DOMAINS = ("none", "corruptions")
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Domain:
    """A corruption and its severity, 1 to 5."""

    corruption: str
    severity: int


def draw_roles(num_clients: int, target_fraction: float, seed: int) -> tuple[Role, ...]:
    """Draw which clients are targets: round(target_fraction · N); the others are sources, or all are "both" at 0.

    Raises
    ------
    ValueError
        The fraction is outside [0, 1), or leaves no source or no target.
    """
    if not 0 <= target_fraction < 1:
        raise ValueError(f"target_fraction={target_fraction} must be in [0, 1)")
    if target_fraction == 0:
        both: Role = "both"
        return (both,) * num_clients
    targets = round(target_fraction * num_clients)
    if not 0 < targets < num_clients:
        raise ValueError(f"target_fraction={target_fraction} of {num_clients} clients leaves no source or no target")
    chosen = set(generator("roles", seed).permutation(num_clients)[:targets].tolist())
    roles: list[Role] = ["target" if client in chosen else "source" for client in range(num_clients)]
    return tuple(roles)


def draw_domains(roles: Sequence[Role], kind: str, seed: int) -> tuple[Domain | None, ...]:
    """Draw each client's domain from (seed, client) alone; all None with `kind` "none".

    Raises
    ------
    ValueError
        An unknown kind (lists what there is).
    """
    if kind not in DOMAINS:
        raise ValueError(f"unknown domains {kind!r}; there are: {', '.join(DOMAINS)}")
    if kind == "none":
        return (None,) * len(roles)
    drawn: list[Domain | None] = []
    for client, role in enumerate(roles):
        rng = generator("domain", seed, client)
        names = EXTRA_CORRUPTIONS if role == "target" else CORRUPTIONS
        drawn.append(Domain(names[rng.integers(len(names))], int(rng.choice(SEVERITIES))))
    return tuple(drawn)


def render_domains(
    images: Images, clients: Sequence[np.ndarray], domains: Sequence[Domain | None], seed: int
) -> Images:
    """Return the data set with every client's pictures in the client's domain, rounded to bytes.

    A sample's noise depends on (seed, its number) alone; a domain of None leaves a client's pictures as they are.
    """
    if all(domain is None for domain in domains):
        return images
    pixels = images.pixels.copy()
    for indices, domain in zip(clients, domains, strict=True):
        if domain is None or not len(indices):
            continue
        seeds = [int(generator("domain sample", seed, int(index)).integers(2**31)) for index in indices]
        x = corrupt(images.batch(indices), domain.corruption, domain.severity, seeds)
        pixels[indices] = (x * 255).round().to(torch.uint8).numpy()
    return replace(images, pixels=pixels)
