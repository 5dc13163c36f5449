"""A data set dealt out to clients: who has which samples, and which of them are for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .by_domain import BY_DOMAIN, by_domain, leave_out, origins_of, target_roles
from .domains import Domain, Role, draw_domains, draw_roles, render_domains
from .images import Images
from .partition import SCHEMES, partition
from .seeds import generator
from .split import Split, split

#: Train and validation shares of a client that only trains; ATP holds 20 % out to refine rates on.
SOURCE = (0.8, 0.2, 0.0)


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' splits of one data set. Every node computes the same one from the same settings.

    `domains` are corruptions of clients' pictures; `origins` the domains of the data set that clients' pictures come
    from, None where they come from several; `unseen` the samples of the domain that no client has.
    """

    images: Images
    splits: tuple[Split, ...]
    seed: int
    roles: tuple[Role, ...] = ()
    domains: tuple[Domain | None, ...] = ()
    origins: tuple[str | None, ...] = ()
    unseen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", self.roles or ("both",) * len(self.splits))
        object.__setattr__(self, "domains", self.domains or (None,) * len(self.splits))
        object.__setattr__(self, "origins", self.origins or (None,) * len(self.splits))

    @classmethod
    def create(
        cls,
        images: Images,
        num_clients: int,
        scheme: str = "equal",
        alpha: float = 0.1,
        seed: int = 0,
        min_size: int = 1,
        fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
        step_ratio: float = 16.0,
        target_fraction: float = 0.0,
        domains: str = "none",
        target_domain: str = "",
        unseen_domain: str = "",
    ) -> Federation:
        """Deal `images` out (`partition`) and split each client's samples (`split`), everything from `seed`.

        With a `target_fraction` some clients are targets, whose samples are all for testing, and the others sources,
        which split theirs 80/20 into training and validation; `domains` puts each client's pictures under a corruption
        of its own (see `domains`).

        Of images with domains, "domain" and "domain_step" deal each domain out to clients of its own (`by_domain`).
        Then the clients of `target_domain` may be the targets and all others the sources. The pictures of
        `unseen_domain` are dealt to nobody, by any scheme: they are `unseen`, for testing.

        Raises
        ------
        ValueError
            As `partition`, `by_domain`, `leave_out`, `split`, `draw_roles`, `target_roles` and `draw_domains`; an
            unknown scheme; `target_domain` beside `target_fraction`.
        """
        if target_domain and target_fraction:
            raise ValueError(
                f"target_domain={target_domain!r} and target_fraction={target_fraction} exclude each other"
            )
        dealt, unseen = leave_out(images, unseen_domain)
        if scheme in BY_DOMAIN:
            rng = generator("partition", scheme, seed)
            clients = by_domain(images, dealt, num_clients, scheme, step_ratio, rng, min_size)
        elif scheme in SCHEMES:
            deal = partition(images.labels[dealt], num_clients, scheme, alpha, seed, min_size, step_ratio)
            clients = [dealt[own] for own in deal]
        else:
            raise ValueError(f"unknown partition scheme {scheme!r}; there are: {', '.join((*SCHEMES, *BY_DOMAIN))}")
        origins = origins_of(images, clients)
        if target_domain:
            roles = target_roles(images, origins, target_domain)
        else:
            roles = draw_roles(num_clients, target_fraction, seed)
        drawn = draw_domains(roles, domains, seed)
        splits = tuple(
            Split(own[:0], own[:0], own)
            if role == "target"
            else split(own, (seed, client), SOURCE if role == "source" else fractions)
            for client, (own, role) in enumerate(zip(clients, roles, strict=True))
        )
        return cls(render_domains(images, clients, drawn, seed), splits, seed, roles, drawn, origins, unseen)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.splits)

    def class_counts(self) -> np.ndarray:
        """Return how many training samples of each class each client has, int64 [N, K]."""
        classes = self.images.num_classes
        return np.stack([np.bincount(self.images.labels[one.train], minlength=classes) for one in self.splits])

    @cached_property
    def train_indices(self) -> np.ndarray:
        """All samples that any client trains or tunes on: training and validation splits, sorted."""
        return np.sort(np.concatenate([part for one in self.splits for part in (one.train, one.validation)]))

    def others_test(self, client: int) -> np.ndarray:
        """Return the pooled test samples of all clients but `client`, in the order of the clients."""
        parts = [one.test for number, one in enumerate(self.splits) if number != client]
        return np.concatenate([np.empty(0, np.int64), *parts])
