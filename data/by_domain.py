"""Clients of one domain each, and one domain left out: the domain shift of FedICON and ATP.

FedICON (Y. Tan et al., "Taming the Test-Time Shift for Federated Learning", appendix A.2): each client owns training
data of a domain of its own; one domain in turn is what all clients are tested on. ATP (Bao et al., NeurIPS 2023, C.1.3,
C.1.4): each domain is divided into several clients by the step partition; one domain's clients are the targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .domains import Role
from .images import Images
from .step import step

#: Partitions that need several domains: "domain" with equal class mixes, "domain_step" by `step`.
BY_DOMAIN = ("domain", "domain_step")


def by_domain(
    images: Images,
    samples: np.ndarray,
    num_clients: int,
    scheme: str,
    step_ratio: float,
    rng: np.random.Generator,
    min_size: int = 1,
) -> list[np.ndarray]:
    """Deal each domain out to clients of its own: client c has domain c // m, with m clients a domain.

    Parameters
    ----------
    images : Images
        Pictures of several domains.
    samples : ndarray [n]
        Which of them are dealt out; a domain without any gets no client.
    num_clients : int
        m · D.
    scheme : str
        "domain": the m parts differ by at most one picture, in all and of each class. "domain_step": two major
        classes a client, see `step`.
    step_ratio : float
        Major over minor samples of "domain_step".
    rng : Generator
    min_size : int
        No client may have fewer samples.

    Returns
    -------
    list of ndarray
        Sorted indices (int64) of each client.

    Raises
    ------
    ValueError
        The images have no domains, `num_clients` is no multiple of D, or a client would have too little.
    """
    domain = _domain_numbers(images, scheme)[samples]
    present = np.unique(domain)
    names = [images.domains[one] for one in present]
    if not names or num_clients % len(names):
        raise ValueError(
            f"num_clients={num_clients} must be a multiple of the {len(names)} domains of {images.name}: "
            f"{', '.join(names)}"
        )
    each = num_clients // len(names)
    clients: list[np.ndarray] = []
    for number, name in zip(present, names, strict=True):
        members = samples[domain == number]
        labels = images.labels[members]
        parts = step(labels, each, step_ratio, rng) if scheme == "domain_step" else _even(labels, each, rng)
        smallest = min(len(part) for part in parts)
        if smallest < min_size:
            raise ValueError(
                f"domain {name} with {len(members)} pictures leaves one of its {each} clients with {smallest}, "
                f"fewer than min_size={min_size}"
            )
        clients.extend(np.sort(members[part]) for part in parts)
    return clients


def _domain_numbers(images: Images, scheme: str) -> np.ndarray:
    if images.domain is None:
        raise ValueError(f"partition {scheme!r}: {images.name} has no domains")
    return images.domain


def _even(labels: np.ndarray, parts: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal a deck that is shuffled and then sorted by class, one card to each in turn."""
    shuffled = rng.permutation(len(labels))
    deck = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return [deck[part::parts] for part in range(parts)]


def origins_of(images: Images, clients: Sequence[np.ndarray]) -> tuple[str | None, ...]:
    """Return the domain that all of a client's pictures come from; None with several, with none, or no pictures."""
    if images.domain is None:
        return (None,) * len(clients)
    found = [np.unique(images.domain[own]) for own in clients]
    return tuple(images.domains[one[0]] if len(one) == 1 else None for one in found)


def leave_out(images: Images, unseen_domain: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples to deal out and those of `unseen_domain`, which nobody gets; "" leaves nothing out.

    Raises
    ------
    ValueError
        The images have no such domain (lists what there is), or no other.
    """
    if not unseen_domain:
        return np.arange(len(images)), np.empty(0, np.int64)
    if images.domain is None or unseen_domain not in images.domains:
        raise ValueError(f"unseen_domain={unseen_domain!r}: {_domains(images)}")
    out = images.domain == images.domains.index(unseen_domain)
    if out.all() or not out.any():
        raise ValueError(f"unseen_domain={unseen_domain!r} has {out.sum()} of the {len(images)} pictures")
    return np.flatnonzero(~out), np.flatnonzero(out)


def target_roles(images: Images, origins: Sequence[str | None], target_domain: str) -> tuple[Role, ...]:
    """Return "target" for the clients of `target_domain`, "source" for those of the others.

    Raises
    ------
    ValueError
        A client has pictures of several domains, or no client or every client is of the target domain.
    """
    if None in origins:
        raise ValueError(f"target_domain={target_domain!r}: allowed with partition {' or '.join(BY_DOMAIN)} only")
    if target_domain not in origins:
        raise ValueError(f"target_domain={target_domain!r}: no client has it; {_domains(images)}")
    if set(origins) == {target_domain}:
        raise ValueError(f"target_domain={target_domain!r} leaves no source")
    return tuple("target" if one == target_domain else "source" for one in origins)


def _domains(images: Images) -> str:
    return f"{images.name} has the domains: {', '.join(images.domains) or 'none'}"
