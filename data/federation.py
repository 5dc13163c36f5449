"""A federated data set: the training, validation and test samples of every client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np

from .domains import Domain, Role, assign_roles, client_domains, draw_domains, hold_out, render_domains
from .images import Images
from .partition import partition
from .split import Split, split, subsample

#: Training and validation shares of a source client; ATP holds out 20 % to refine adaptation rates.
SOURCE = (0.8, 0.2, 0.0)


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients' splits of one data set. Every node computes the same one from the same settings.

    Parameters
    ----------
    images : Images
        The data set, with corrupted domains applied.
    splits : tuple of Split
        One per client, drawn once. Test samples are always those of these splits.
    seed : int
    roles : tuple of Role
        Default: all clients train and test.
    domains : tuple of Domain or None
        Corrupted domain of each client, if it has one.
    origins : tuple of str or None
        Domain of the data set that all of a client's images come from; None with several.
    unseen : ndarray
        Samples of the domain held out for testing (int64).
    fractions : (train, validation, test)
        Shares used to split a client's samples.
    resample_splits : bool
        Redraw the splits in every training round (`in_round`), as the published code of FedTHE and BTFL does.
    numbers : tuple of int
        Number of each client in seeds (`fedtta.data.rng.client_number`). Default: 0 to N-1.
    content : ndarray [len(images)], optional
        int64, equal for images of equal content. Default: every image has its own.
    divided : bool
        Whether one data set is divided among the clients. Otherwise this is one device with data of its own.
    """

    images: Images
    splits: tuple[Split, ...]
    seed: int
    roles: tuple[Role, ...] = ()
    domains: tuple[Domain | None, ...] = ()
    origins: tuple[str | None, ...] = ()
    unseen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2)
    resample_splits: bool = False
    numbers: tuple[int, ...] = ()
    content: np.ndarray | None = None
    divided: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", self.roles or ("both",) * len(self.splits))
        object.__setattr__(self, "domains", self.domains or (None,) * len(self.splits))
        object.__setattr__(self, "origins", self.origins or (None,) * len(self.splits))
        object.__setattr__(self, "numbers", self.numbers or tuple(range(len(self.splits))))

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
        resample_splits: bool = False,
        train_part: float = 1.0,
        test_part: float = 1.0,
    ) -> Federation:
        """Partition `images` (see `partition`) and split each client's samples (see `split`), all from `seed`.

        Targets (drawn with `target_fraction`, or the clients of `target_domain`) use all their samples for testing;
        sources split theirs 80/20 into training and validation. `domains` applies a corrupted domain to each client's
        images (`draw_domains`). The images of `unseen_domain` are held out for testing. With a `train_part` or
        `test_part` below 1, clients keep only that share of their training or test samples (`subsample`).

        Raises
        ------
        ValueError
            As `hold_out`, `partition`, `assign_roles`, `draw_domains`, `split` and `subsample`; or `resample_splits`
            with sources and targets or with partial splits.
        """
        included, unseen = hold_out(images, unseen_domain)
        domain = None if images.domain is None else images.domain[included]
        parts = partition(
            images.labels[included], num_clients, scheme, alpha, seed, min_size, step_ratio, domain, images.domains
        )
        clients = [included[own] for own in parts]
        origins = client_domains(images, clients)
        roles = assign_roles(images, origins, target_domain, target_fraction, seed)
        if resample_splits:
            _check_resampling(roles, train_part, test_part)
        drawn = draw_domains(roles, domains, seed)
        splits = tuple(
            subsample(_split(own, role, (seed, client), fractions), train_part, test_part, (seed, client))
            for client, (own, role) in enumerate(zip(clients, roles, strict=True))
        )
        rendered = render_domains(images, clients, drawn, seed)
        return cls(rendered, splits, seed, roles, drawn, origins, unseen, fractions, resample_splits)

    @classmethod
    def of_device(cls, images: Images, split: Split, role: Role, number: int, seed: int, content: np.ndarray) -> Self:
        """Return the federation of one device with data of its own, whose number in seeds is `number`."""
        return cls(images, (split,), seed, (role,), numbers=(number,), content=content, divided=False)

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.splits)

    def class_counts(self) -> np.ndarray:
        """Return the number of training samples per client and class, int64 [N, K]."""
        classes = self.images.num_classes
        return np.stack([np.bincount(self.images.labels[one.train], minlength=classes) for one in self.splits])

    @cached_property
    def train_indices(self) -> np.ndarray:
        """All samples of the training and validation splits, sorted."""
        return np.sort(np.concatenate([part for one in self.splits for part in (one.train, one.validation)]))

    def in_round(self, round: int) -> Federation:
        """Return the federation whose `splits` clients train, validate and tune on in a round, from 1.

        It is this one unless splits are resampled. Test streams always come from this one: with and without resampling,
        one seed tests the same samples, and the results differ only by the leak.
        """
        return _resampled(self, round) if self.resample_splits else self

    def trained_on(self, rounds: int) -> np.ndarray:
        """Return all samples that any client has trained or tuned on after a number of rounds, sorted.

        Without resampling these are `train_indices`. With resampling they are the training splits of all these rounds;
        validation samples, on which no weights are trained, do not count, because soon every sample has been one.
        """
        return _trained_on(self, rounds) if self.resample_splits else self.train_indices

    def among(self, samples: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Tell which of `samples` [n] are among `others` or have the content of one of them, bool [n]."""
        if self.content is None:
            return np.isin(samples, others)
        codes = np.append(self.content, -1)  # sample -1 is no image of this federation
        return np.isin(codes[samples], codes[others])

    def others_test(self, client: int) -> np.ndarray:
        """Return the pooled test samples of all clients but `client`, in the order of the clients."""
        parts = [one.test for number, one in enumerate(self.splits) if number != client]
        return np.concatenate([np.empty(0, np.int64), *parts])


def _check_resampling(roles: Sequence[Role], train_part: float, test_part: float) -> None:
    """Raise ValueError unless splits can be resampled."""
    if set(roles) != {"both"}:
        raise ValueError("resample_splits=True: allowed only if all clients train and test")
    if (train_part, test_part) != (1.0, 1.0):
        parts = f"train_part=1 and test_part=1, not {train_part} and {test_part}"
        raise ValueError(f"resample_splits=True: allowed with {parts}")


def _split(own: np.ndarray, role: Role, seed: tuple[int, int], fractions: tuple[float, float, float]) -> Split:
    """Split one client's samples by its role."""
    if role == "target":
        return Split(own[:0], own[:0], own)
    return split(own, seed, SOURCE if role == "source" else fractions)


@lru_cache(maxsize=2)
def _resampled(federation: Federation, round: int) -> Federation:
    """Return a federation with each client's samples split by (seed, client, round); sizes do not change."""
    if round < 1:
        raise ValueError(f"round={round} must be at least 1")  # 0 would be the split that is tested
    splits = tuple(
        split(one.samples, (federation.seed, client, round), federation.fractions)
        for client, one in enumerate(federation.splits)
    )
    return replace(federation, splits=splits, resample_splits=False)


@lru_cache(maxsize=2)
def _trained_on(federation: Federation, rounds: int) -> np.ndarray:
    """Return the samples in any client's training split of the first rounds, sorted."""
    trained = np.zeros(len(federation.images), dtype=bool)
    for round in range(1, rounds + 1):
        for one in federation.in_round(round).splits:
            trained[one.train] = True
    return np.flatnonzero(trained)
