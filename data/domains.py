"""Clients' roles (train, test, or both), domains held out, and corrupted domains (ATP, section 6, C.1; FedICON, A.2).

A source client has labelled training and validation samples; a target client has test samples whose labels no method
sees. Targets are a random share of the clients, or the clients of one domain of the data set.

Apart from the domains of the data set, each client may have a corrupted domain: one corruption at one severity on all
of its images, one of the 15 common ones for source clients and one of the 4 extra ones for target clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from .corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from .images import Images
from .partition import SCHEMES
from .rng import generator

#: "both" trains and tests, as in the two-head protocols.
Role = Literal["both", "source", "target"]
DOMAINS = ("none", "corruptions")
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Domain:
    """A corruption and its severity, 1 to 5."""

    corruption: str
    severity: int


def hold_out(images: Images, unseen_domain: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples to partition and those of `unseen_domain`, held out for testing; "" holds out none.

    Raises
    ------
    ValueError
        The images have no such domain (lists the known ones), or no other.
    """
    if not unseen_domain:
        return np.arange(len(images)), np.empty(0, np.int64)
    if images.domain is None or unseen_domain not in images.domains:
        raise ValueError(f"unseen_domain={unseen_domain!r}: {_domains(images)}")
    out = images.domain == images.domains.index(unseen_domain)
    if out.all() or not out.any():
        raise ValueError(f"unseen_domain={unseen_domain!r} has {out.sum()} of the {len(images)} images")
    return np.flatnonzero(~out), np.flatnonzero(out)


def client_domains(images: Images, clients: Sequence[np.ndarray]) -> tuple[str | None, ...]:
    """Return the common domain of each client's images; None with several domains or none, or without images."""
    if images.domain is None:
        return (None,) * len(clients)
    found = [np.unique(images.domain[own]) for own in clients]
    return tuple(images.domains[one[0]] if len(one) == 1 else None for one in found)


def assign_roles(
    images: Images, origins: Sequence[str | None], target_domain: str, target_fraction: float, seed: int
) -> tuple[Role, ...]:
    """Return each client's role: by `target_domain` if it is given, else drawn with `target_fraction`.

    Raises
    ------
    ValueError
        Both are given, or as `target_roles` and `draw_roles`.
    """
    if target_domain and target_fraction:
        both = f"target_domain={target_domain!r} and target_fraction={target_fraction}"
        raise ValueError(f"{both} exclude each other")
    if target_domain:
        return target_roles(images, origins, target_domain)
    return draw_roles(len(origins), target_fraction, seed)


def target_roles(images: Images, origins: Sequence[str | None], target_domain: str) -> tuple[Role, ...]:
    """Return "target" for the clients of `target_domain`, "source" for all others.

    Raises
    ------
    ValueError
        A client has images of several domains, or no client or every client has the target domain.
    """
    if None in origins:
        allowed = " or ".join(name for name, scheme in SCHEMES.items() if scheme.by_domain)
        raise ValueError(f"target_domain={target_domain!r}: allowed with partition {allowed} only")
    if target_domain not in origins:
        raise ValueError(f"target_domain={target_domain!r}: no client has it; {_domains(images)}")
    if set(origins) == {target_domain}:
        raise ValueError(f"target_domain={target_domain!r} leaves no source")
    return tuple("target" if one == target_domain else "source" for one in origins)


def draw_roles(num_clients: int, target_fraction: float, seed: int) -> tuple[Role, ...]:
    """Draw round(target_fraction · N) clients as targets, the others are sources; all are "both" for a fraction of 0.

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
    """Draw each client's corrupted domain from (seed, client) only; all None with `kind` "none".

    Raises
    ------
    ValueError
        Unknown kind (lists the known ones).
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
    """Return the data set with each client's images in the client's corrupted domain, rounded to bytes.

    A sample's noise depends on (seed, sample number) only; a domain of None leaves a client's images unchanged.
    """
    if all(domain is None for domain in domains):
        return images
    pixels = np.array(images.pixels[:])
    for indices, domain in zip(clients, domains, strict=True):
        if domain is None or not len(indices):
            continue
        seeds = [int(generator("domain sample", seed, int(index)).integers(2**31)) for index in indices]
        x = corrupt(images.batch(indices), domain.corruption, domain.severity, seeds)
        pixels[indices] = (x * 255).round().to(torch.uint8).numpy()
    return replace(images, pixels=pixels)


def _domains(images: Images) -> str:
    return f"{images.name} has the domains: {', '.join(images.domains) or 'none'}"
