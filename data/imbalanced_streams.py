"""Class-imbalanced corruption streams: N clients meet one corruption after another, each with few classes.

"pFedBBN: A Personalized Federated Test-Time Adaptation with Balanced Batch Normalization for Class-Imbalanced Data"
(anonymous, under review, 2025), section 4, C.3 and C.9: 10 clients, 15 corruptions at severity 5, batches of 200 per
client and round, 5 rounds per corruption, 75 in all; a client's class mix is Dirichlet(δ), δ in {0.005, 0.01, 0.1}, or
iid.

Decisions where the paper is silent, and deviations:

- Tables 4 and 5 repeat every 5 rounds: a client has one list of 1,000 images in the order of their classes, and meets
  it under every corruption. `PUBLISHED` holds lists that reproduce these tables exactly. (C.9 mentions 100 clients, but
  2,000 images per round are 10 clients of 200.)
- The published lists hold 2,326 images of class 8, and the test set of CIFAR-10 has 1,000: clients draw independently,
  each without repetition. Two clients may have the same image.
- The order of the corruptions is not given: it is drawn per client (or per group of clients; `orders`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from .images import Images
from .partition import largest_remainder
from .rng import generator

ORDERS = ("sorted", "shuffled")

#: Class: images, one list of 1,000 per client, that sum up to Tables 4 and 5 of the paper (δ = 0.01).
PUBLISHED: tuple[dict[int, int], ...] = (
    {0: 1000},
    {0: 266, 4: 2, 5: 447, 8: 285},
    {0: 96, 8: 904},
    {4: 853, 5: 10, 8: 136, 9: 1},
    {6: 1000},
    {2: 399, 8: 1, 9: 600},
    {7: 1000},
    {8: 1000},
    {9: 1000},
    {1: 5, 2: 68, 6: 927},
)


# Class mixes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MixTask:
    """Arguments of a class mix; see `class_counts`. `stock` int64 [K] limits the images of each class."""

    clients: int
    size: int
    classes: int
    seed: int
    concentration: float
    stock: np.ndarray


def class_counts(
    mix: str,
    clients: int,
    size: int,
    classes: int,
    seed: int,
    concentration: float,
    available: np.ndarray | None = None,
) -> np.ndarray:
    """Draw the number of images of each class per client.

    Parameters
    ----------
    mix : str
        "dirichlet": a client's shares are Dirichlet(δ 1_K), rounded by largest remainder. "iid": size / K of every
        class; if K does not divide the size, the remaining images go to one class each, clients starting at different
        classes. "published": the lists of `PUBLISHED`, for 10 clients, size 1000 and 10 classes.
    clients, size, classes : int
        N, images per client, K.
    seed : int
        Seed of the Dirichlet draws, which are independent between clients.
    concentration : float
        δ, positive and finite; a small value means few classes per client. Used by "dirichlet" only.
    available : ndarray [K], optional
        Number of images of each class, for every client separately. Images that a class cannot supply are drawn from
        the client's other classes in proportion to their shares (for small δ, from the class with the next largest
        share, then the next). Default: no limit.

    Returns
    -------
    ndarray [N, K]
        int64; rows sum to `size`.

    Raises
    ------
    ValueError
        Unknown mix (lists the known ones), a bad value, "published" in another set-up, or too few images.
    """
    if mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}; there are: {', '.join(MIXES)}")
    for key, value in (("clients", clients), ("size", size), ("classes", classes)):
        if value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    if not (concentration > 0 and np.isfinite(concentration)):
        raise ValueError(f"concentration={concentration} must be positive and finite")
    stock = np.full(classes, size) if available is None else np.asarray(available, dtype=np.int64)
    if stock.shape != (classes,) or stock.min() < 0:
        raise ValueError(f"available={stock.tolist()} must be {classes} numbers >= 0, one per class")
    return MIXES[mix](MixTask(clients, size, classes, seed, concentration, stock))


def dirichlet_mix(task: MixTask) -> np.ndarray:
    """Draw each client's shares from Dirichlet(δ 1_K)."""
    _require_stock(task)
    shares = [_log_shares(task.classes, task.concentration, task.seed, client) for client in range(task.clients)]
    return np.stack([_fill(task.size, own, task.stock) for own in shares])


def iid_mix(task: MixTask) -> np.ndarray:
    """Give each client the same number of every class; remainders start at different classes."""
    _require_stock(task)
    extra = task.size % task.classes
    counts = np.empty((task.clients, task.classes), np.int64)
    for client, own in enumerate(counts):
        turn = (np.arange(task.classes) + client * extra) % task.classes  # equal remainders are served in this order
        own[turn] = _fill(task.size, np.zeros(task.classes), task.stock[turn])
    return counts


def published_mix(task: MixTask) -> np.ndarray:
    """Return the published lists as counts [10, 10]."""
    for key, value, needed in (("clients", task.clients, 10), ("size", task.size, 1000), ("classes", task.classes, 10)):
        if value != needed:
            raise ValueError(f'{key}={value} must be {needed} for mix="published"')
    counts = np.array([[own.get(label, 0) for label in range(task.classes)] for own in PUBLISHED], dtype=np.int64)
    needs = enumerate(counts.max(axis=0))
    short = [f"class {k}: {task.stock[k]} of {need}" for k, need in needs if task.stock[k] < need]
    if short:
        raise ValueError(f'mix="published" needs more images than there are ({", ".join(short)})')
    return counts


MIXES: dict[str, Callable[[MixTask], np.ndarray]] = {
    "dirichlet": dirichlet_mix,
    "iid": iid_mix,
    "published": published_mix,
}


def _require_stock(task: MixTask) -> None:
    if task.stock.sum() < task.size:
        raise ValueError(f"size={task.size} images per client are not available: there are {task.stock.sum()}")


def _log_shares(classes: int, concentration: float, seed: int, client: int) -> np.ndarray:
    """Draw log-shares [K], up to a constant, of Dirichlet(δ 1_K).

    A gamma variate of shape δ is one of shape 1 + δ times U^(1/δ), U uniform (G. Marsaglia and W. Tsang, "A Simple
    Method for Generating Gamma Variables", 2000). Logarithms avoid underflow: at small δ all shares but one would be 0,
    or all of them and their mix not a number.
    """
    rng = generator("imbalanced mix", seed, client)
    gamma, log_uniform = rng.standard_gamma(1.0 + concentration, classes), np.log(1.0 - rng.random(classes))
    with np.errstate(over="ignore"):  # δ below 1e-306
        power = np.maximum((log_uniform - log_uniform.max()) / concentration, -1e300)
    return np.log(np.maximum(gamma, np.finfo(float).tiny)) + power


def _fill(size: int, log_shares: np.ndarray, stock: np.ndarray) -> np.ndarray:
    """Divide `size` in proportion to the shares, limited by `stock` [K]; the excess goes to the other classes."""
    counts = np.zeros(len(stock), np.int64)
    while missing := size - int(counts.sum()):  # each pass ends the loop or exhausts a class
        left = counts < stock
        shares = np.exp(log_shares[left] - log_shares[left].max())
        counts[left] += largest_remainder(missing * shares / shares.sum())
        counts = np.minimum(counts, stock)
    return counts


# Streams ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """The test batch of one client in one round.

    x float32 [B, C, H, W] in [0, 1]; y int64 [B] on the same device, for evaluation, never for adaptation; index int64
    [B] into the clean images.
    """

    x: Tensor
    y: Tensor
    index: np.ndarray
    corruption: str

    def __len__(self) -> int:
        return int(self.y.shape[0])


@dataclass(frozen=True, eq=False)
class CorruptionStream:
    """All clients' streams; see `corruption_streams`. Rounds are numbered from 0.

    Parameters
    ----------
    images : Images
        The clean images.
    lists : ndarray [N, size]
        int64 indices into `images`: each client's images under every corruption, in this order. Read-only.
    domains : tuple of N tuples of D names
        Each client's corruptions, in order.
    batch_size : int
        B, images per client and round; divides `size`.
    severity : int
        1 to 5.
    seed : int
        Seed of the corruptions.
    """

    images: Images
    lists: np.ndarray
    domains: tuple[tuple[str, ...], ...]
    batch_size: int
    severity: int
    seed: int

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.lists)

    @property
    def rounds_per_corruption(self) -> int:
        """Batches in a client's list."""
        return self.lists.shape[1] // self.batch_size

    @property
    def rounds(self) -> int:
        """R = D · size / B."""
        return len(self.domains[0]) * self.rounds_per_corruption

    @cached_property
    def counts(self) -> np.ndarray:
        """Images of each class in each client's list, int64 [N, K]."""
        return self.round_counts[: self.rounds_per_corruption].sum(axis=0)

    @cached_property
    def round_counts(self) -> np.ndarray:
        """Images of each class per round and client, int64 [R, N, K]; `.sum(axis=1)` is Tables 4 and 5."""
        labels = self.images.labels[self.lists].reshape(self.num_clients, self.rounds_per_corruption, self.batch_size)
        one_hot = labels[..., None] == np.arange(self.images.num_classes)  # (N, R / D, B, K)
        table = one_hot.sum(axis=2).swapaxes(0, 1)  # (R / D, N, K)
        return np.tile(table, (len(self.domains[0]), 1, 1))

    def corruption(self, client: int, round: int) -> str:
        """Return a client's corruption in a round."""
        self._check(client, round)
        return self.domains[client][round // self.rounds_per_corruption]

    def indices(self, client: int, round: int) -> np.ndarray:
        """Return the indices of a client's images in a round, int64 [B].

        Raises
        ------
        ValueError
            `client` is not in 0..N-1 or `round` not in 0..R-1.
        """
        self._check(client, round)
        start = round % self.rounds_per_corruption * self.batch_size
        return self.lists[client, start : start + self.batch_size]

    def batch(self, client: int, round: int, device: torch.device | str = "cpu") -> Batch:
        """Return a client's batch of a round, corrupted on `device`.

        An image's noise depends on (seed, image number, corruption) only: the corrupted image is the same for every
        client, in every batch and after any other calls (up to rounding, on a device where the batch size changes the
        order of sums).

        Raises
        ------
        ValueError
            As `indices`.
        """
        index, name = self.indices(client, round), self.corruption(client, round)
        seeds = [int(generator("imbalanced noise", self.seed, name, int(one)).integers(2**31)) for one in index]
        x = corrupt(self.images.batch(index, device), name, self.severity, seeds)
        return Batch(x, torch.from_numpy(self.images.labels[index]).to(device), index, name)

    def _check(self, client: int, round: int) -> None:
        """Raise ValueError for clients and rounds that do not exist, including negative ones."""
        for key, value, count in (("client", client, self.num_clients), ("round", round, self.rounds)):
            if not 0 <= value < count:
                raise ValueError(f"{key}={value} is not in 0..{count - 1}")


def corruption_streams(
    images: Images,
    clients: int = 10,
    size: int = 1000,
    mix: str = "dirichlet",
    concentration: float = 0.01,
    order: str | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    severity: int = 5,
    batch: int = 200,
    orders: int = 0,
    seed: int = 0,
) -> CorruptionStream:
    """Return all clients' streams. Images are corrupted when a batch is requested.

    Parameters
    ----------
    images : Images
        Clean images not used for training; in the paper the test set of CIFAR-10 or CIFAR-100.
    clients : int
        N >= 1.
    size : int
        Images per client, a multiple of `batch`.
    mix, concentration
        As in `class_counts`.
    order : str, optional
        "sorted": a client's images in the order of their classes, in a seeded order within a class. "shuffled": in one
        seeded order. Every corruption has the same list. Default: "shuffled" for "iid", else "sorted".
    corruptions : sequence of str
        D >= 1 different names.
    severity : int
        1 to 5.
    batch : int
        B, images per client and round.
    orders : int
        Number of orders of the corruptions: client i has order i mod `orders`. 0: one order per client.
    seed : int
        Seed of all draws, >= 0. A client's list and order do not depend on the number of clients.

    Raises
    ------
    ValueError
        Unknown name (lists the known ones), a bad value, or too few images (as `class_counts`).
    """
    _check_stream(clients, size, corruptions, severity, batch, orders, order)
    labels, classes = images.labels, images.num_classes
    available = np.bincount(labels, minlength=classes)
    counts = class_counts(mix, clients, size, classes, seed, concentration, available)
    in_order = order == "sorted" if order else mix != "iid"
    lists = np.stack([_draw(labels, own, client, seed, in_order) for client, own in enumerate(counts)])
    lists.setflags(write=False)
    drawn = [generator("imbalanced domains", seed, group).permutation(len(corruptions)) for group in range(clients)]
    domains = tuple(tuple(corruptions[i] for i in drawn[client % (orders or clients)]) for client in range(clients))
    return CorruptionStream(images, lists, domains, batch, severity, seed)


def _draw(labels: np.ndarray, counts: np.ndarray, client: int, seed: int, in_order: bool) -> np.ndarray:
    """Draw a client's list, int64 [size]: counts [K] images of each class, without repetition."""
    parts = [
        generator("imbalanced pictures", seed, client, label).permutation(np.flatnonzero(labels == label))[:count]
        for label, count in enumerate(counts)
    ]
    together = np.concatenate(parts)
    return together if in_order else generator("imbalanced order", seed, client).permutation(together)


def _check_stream(
    clients: int, size: int, corruptions: Sequence[str], severity: int, batch: int, orders: int, order: str | None
) -> None:
    """Raise ValueError for arguments of `corruption_streams` that `class_counts` does not check."""
    all_corruptions = CORRUPTIONS + EXTRA_CORRUPTIONS
    if unknown := [name for name in corruptions if name not in all_corruptions]:
        raise ValueError(f"unknown corruption {unknown[0]!r}; there are: {', '.join(all_corruptions)}")
    if not corruptions or len(set(corruptions)) != len(corruptions):
        raise ValueError(f"corruptions={tuple(corruptions)} must be at least one, and different")
    if severity not in range(1, 6):
        raise ValueError(f"severity={severity} must be an integer from 1 to 5")
    if order is not None and order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; there are: {', '.join(ORDERS)}")
    if batch < 1 or size % batch:
        raise ValueError(f"batch={batch} must be at least 1 and divide size={size}")
    if not 0 <= orders <= clients:
        raise ValueError(f"orders={orders} must be from 0 to clients={clients}")
