"""A data set dealt out to clients: who has which samples, and which of them are for training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from .by_domain import BY_DOMAIN, by_domain, leave_out, origins_of, target_roles
from .domains import Domain, Role, draw_domains, draw_roles, render_domains
from .images import Images
from .partition import SCHEMES, partition
from .seeds import generator
from .split import Split, part_of, split

#: Train and validation shares of a client that only trains; ATP holds 20 % out to refine rates on.
SOURCE = (0.8, 0.2, 0.0)


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' splits of one data set. Every node computes the same one from the same settings.

    `splits` are drawn once, with `fractions`, and what is tested is always theirs; `anew` says that every training
    round draws its own beside them (`in_round`), as the published code of FedTHE and BTFL does.

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
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    anew: bool = False

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
        anew: bool = False,
        train_part: float = 1.0,
        test_part: float = 1.0,
    ) -> Federation:
        """Deal `images` out (`partition`) and split each client's samples (`split`), everything from `seed`.

        With a `target_fraction` some clients are targets, whose samples are all for testing, and the others sources,
        which split theirs 80/20 into training and validation; `domains` puts each client's pictures under a corruption
        of its own (see `domains`).

        Of images with domains, "domain" and "domain_step" deal each domain out to clients of its own (`by_domain`).
        Then the clients of `target_domain` may be the targets and all others the sources. The pictures of
        `unseen_domain` are dealt to nobody, by any scheme: they are `unseen`, for testing.

        With `anew` every training round has splits of its own (`in_round`). With a `train_part` or `test_part` below 1
        clients have only so much of their training or test samples (`part_of`); the others are nobody's.

        Raises
        ------
        ValueError
            As `partition`, `by_domain`, `leave_out`, `split`, `draw_roles`, `target_roles` and `draw_domains`; an
            unknown scheme; `target_domain` beside `target_fraction`; `anew` with clients that only train or only test.
        """
        if target_domain and target_fraction:
            both = f"target_domain={target_domain!r} and target_fraction={target_fraction}"
            raise ValueError(f"{both} exclude each other")
        dealt, unseen = leave_out(images, unseen_domain)
        clients = _deal(images, dealt, num_clients, scheme, alpha, seed, min_size, step_ratio)
        origins = origins_of(images, clients)
        if target_domain:
            roles = target_roles(images, origins, target_domain)
        else:
            roles = draw_roles(num_clients, target_fraction, seed)
        if anew and set(roles) != {"both"}:
            raise ValueError("anew=True: allowed where all clients train and test; a target has no split to draw")
        if anew and (train_part, test_part) != (1.0, 1.0):
            raise ValueError(f"anew=True: allowed with train_part=1 and test_part=1, not {train_part} and {test_part}")
        drawn = draw_domains(roles, domains, seed)
        splits = tuple(
            Split(own[:0], own[:0], own)
            if role == "target"
            else split(own, (seed, client), SOURCE if role == "source" else fractions)
            for client, (own, role) in enumerate(zip(clients, roles, strict=True))
        )
        splits = tuple(part_of(one, train_part, test_part, (seed, client)) for client, one in enumerate(splits))
        rendered = render_domains(images, clients, drawn, seed)
        return cls(rendered, splits, seed, roles, drawn, origins, unseen, fractions, anew)

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
        """All samples of the training and validation splits, sorted."""
        return np.sort(np.concatenate([part for one in self.splits for part in (one.train, one.validation)]))

    def in_round(self, round: int) -> Federation:
        """Return the federation whose `splits` clients train, validate and tune on in a round, from 1.

        It is this one, unless splits are drawn anew. Test streams come from this one in any case: so one seed tests the
        same samples either way, and what differs is the leak alone.
        """
        return _redrawn(self, round) if self.anew else self

    def trained_on(self, rounds: int) -> np.ndarray:
        """Return all samples that any client has trained or tuned on after so many rounds, sorted.

        Drawn once, these are `train_indices`. Drawn anew, they are the training splits of all these rounds; validation
        samples, which no weights are trained on, do not count then, since soon every sample has been one.
        """
        return _trained_on(self, rounds) if self.anew else self.train_indices

    def others_test(self, client: int) -> np.ndarray:
        """Return the pooled test samples of all clients but `client`, in the order of the clients."""
        parts = [one.test for number, one in enumerate(self.splits) if number != client]
        return np.concatenate([np.empty(0, np.int64), *parts])


@lru_cache(maxsize=2)
def _redrawn(federation: Federation, round: int) -> Federation:
    """Return a federation with each client's samples split by (seed, client, round); all sizes stay."""
    if round < 1:
        raise ValueError(f"round={round} must be at least 1")  # 0 would be the split that is tested
    splits = tuple(
        split(one.samples, (federation.seed, client, round), federation.fractions)
        for client, one in enumerate(federation.splits)
    )
    return replace(federation, splits=splits, anew=False)


@lru_cache(maxsize=2)
def _trained_on(federation: Federation, rounds: int) -> np.ndarray:
    """Return the samples in any client's training split of the first rounds, sorted."""
    trained = np.zeros(len(federation.images), dtype=bool)
    for round in range(1, rounds + 1):
        for one in federation.in_round(round).splits:
            trained[one.train] = True
    return np.flatnonzero(trained)


def _deal(
    images: Images,
    dealt: np.ndarray,
    num_clients: int,
    scheme: str,
    alpha: float,
    seed: int,
    min_size: int,
    step_ratio: float,
) -> list[np.ndarray]:
    """Return each client's samples of those that are dealt; raises as `Federation.create`."""
    if scheme in BY_DOMAIN:
        rng = generator("partition", scheme, seed)
        return by_domain(images, dealt, num_clients, scheme, step_ratio, rng, min_size)
    if scheme in SCHEMES:
        deal = partition(images.labels[dealt], num_clients, scheme, alpha, seed, min_size, step_ratio)
        return [dealt[own] for own in deal]
    raise ValueError(f"unknown partition scheme {scheme!r}; there are: {', '.join((*SCHEMES, *BY_DOMAIN))}")
