"""Partition schemes: assignment of samples to clients, decided by (labels, settings, seed).

- "equal": clients of one size with class mixes from a Dirichlet distribution (FedTHE, BTFL). Clients in turn take one
  sample, of a class drawn from their mix over the classes still in stock; N mod num_clients samples are unused.
- "dirichlet": each class is divided by shares from Dir(α) over the clients (T.-M. H. Hsu, H. Qi, M. Brown, "Measuring
  the Effects of Non-Identical Data Distribution", 2019), with the fair-share rule of M. Yurochkin et al., "Bayesian
  Nonparametric Federated Learning", ICML 2019: a client with N / num_clients samples gets none of the next classes.
- "iid": a random permutation in parts that differ by at most one sample.
- "step": two major classes per client and few samples of all others (H.-Y. Chen, W.-L. Chao, "On Bridging Generic and
  Personalized Federated Learning", ICLR 2022), as ATP uses it (W. Bao et al., NeurIPS 2023, section 6, C.1): CIFAR-10's
  60,000 images to 300 clients of 200, with two major classes of 80 and eight minor ones of 5; CIFAR-100 with 51 and 1.
- "domain": each client has images of one domain; the clients of a domain have equal class mixes (FedICON: Y. Tan et
  al., "Taming the Test-Time Shift for Federated Learning", appendix A.2).
- "domain_step": each client has images of one domain, partitioned by "step" within the domain (ATP, C.1.3, C.1.4).

A new scheme is a function with the signature of `Scheme.assign` and a line in `SCHEMES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .rng import generator

#: How often "dirichlet" is redrawn before it gives up on `min_size`.
ATTEMPTS = 1000


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be partitioned, and how; the fields are those of `partition`."""

    labels: np.ndarray
    num_clients: int
    alpha: float
    min_size: int
    step_ratio: float
    domain: np.ndarray | None = None
    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scheme:
    """A partition scheme.

    Parameters
    ----------
    assign : callable
        (task, rng) → indices of each client, disjoint.
    by_domain : bool
        Whether every client has one domain; such a scheme needs images with domains.
    """

    assign: Callable[[Task, np.random.Generator], list[np.ndarray]]
    by_domain: bool = False


def partition(
    labels: np.ndarray,
    num_clients: int,
    scheme: str = "equal",
    alpha: float = 0.1,
    seed: int = 0,
    min_size: int = 1,
    step_ratio: float = 16.0,
    domain: np.ndarray | None = None,
    domains: tuple[str, ...] = (),
) -> list[np.ndarray]:
    """Assign samples to clients.

    Parameters
    ----------
    labels : ndarray [N]
        Class of each sample, integers from 0.
    num_clients : int
        Number of clients. With a scheme by domain a multiple m · D of the D domains that occur: client c has images of
        domain c // m.
    scheme : str
        A name in `SCHEMES`; see the module.
    alpha : float
        α > 0 of "equal" and "dirichlet"; a small value means few classes per client.
    seed : int
        Seed of all draws.
    min_size : int
        Smallest number of samples of a client.
    step_ratio : float
        Major over minor samples of "step" and "domain_step", at least 1; 1 gives all clients the same class mix.
    domain : ndarray [N], optional
        Domain of each sample, for schemes by domain.
    domains : tuple of str
        Names of the domains.

    Returns
    -------
    list of ndarray
        Sorted, disjoint indices (int64) of each client.

    Raises
    ------
    ValueError
        Unknown scheme (lists the known ones), a bad value, no domains, or sizes that cannot be met ("dirichlet" gives
        up after `ATTEMPTS` draws).
    """
    if scheme not in SCHEMES:
        raise ValueError(f"unknown partition scheme {scheme!r}; there are: {', '.join(SCHEMES)}")
    task = Task(np.asarray(labels), num_clients, alpha, min_size, step_ratio, domain, domains)
    _check(task)
    if SCHEMES[scheme].by_domain and domain is None:
        raise ValueError(f"partition {scheme!r} needs images with domains")
    clients = SCHEMES[scheme].assign(task, generator("partition", scheme, seed))
    if (smallest := min(map(len, clients))) < min_size:  # of few samples, "step" rounds some shares down to none
        raise ValueError(
            f"partition {scheme!r} leaves one of {num_clients} clients with {smallest} samples, fewer than "
            f"min_size={min_size}; use fewer clients"
        )
    return [np.sort(np.asarray(own, dtype=np.int64)) for own in clients]


def _check(task: Task) -> None:
    """Raise ValueError for values that no scheme accepts."""
    labels, num_clients, min_size = task.labels, task.num_clients, task.min_size
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or (len(labels) and labels.min() < 0):
        raise ValueError(f"labels must be non-negative integers [N], got {labels.dtype} {labels.shape}")
    if num_clients < 1 or min_size < 0:
        raise ValueError(f"num_clients={num_clients} must be at least 1 and min_size={min_size} at least 0")
    if not (task.alpha > 0 and np.isfinite(task.alpha)):
        raise ValueError(f"alpha={task.alpha} must be positive and finite")
    if not (task.step_ratio >= 1 and np.isfinite(task.step_ratio)):
        raise ValueError(f"step_ratio={task.step_ratio} must be finite and at least 1")
    if len(labels) // num_clients < min_size:
        raise ValueError(f"{len(labels)} samples cannot give {num_clients} clients min_size={min_size} samples each")


# equal and iid ------------------------------------------------------------------------------------------------------


def _shuffled_classes(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the sample indices of each class, shuffled."""
    classes = int(labels.max()) + 1 if len(labels) else 0
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]


def equal(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
    """Let clients in turn take one sample each, of a class drawn from their mix over the classes in stock."""
    size = len(task.labels) // task.num_clients
    if size == 0:
        return [np.empty(0, np.int64) for _ in range(task.num_clients)]
    stock = _shuffled_classes(task.labels, rng)
    left = [len(members) for members in stock]
    mixes = rng.dirichlet(np.full(len(stock), task.alpha), size=task.num_clients)  # π [N, K]
    draws = rng.random((size, task.num_clients)).tolist()
    cumulative = _cumulative(mixes, left)
    samples: list[list[int]] = [[] for _ in range(task.num_clients)]
    for turn in draws:
        for client, draw in enumerate(turn):
            # An empty class is a flat step of the cumulative mix, which the bisection never selects.
            label = bisect_right(cumulative[client], draw * cumulative[client][-1])
            left[label] -= 1
            samples[client].append(int(stock[label][left[label]]))
            if left[label] == 0 and any(left):
                cumulative = _cumulative(mixes, left)
    return [np.array(own) for own in samples]


def _cumulative(mixes: np.ndarray, left: list[int]) -> list[list[float]]:
    """Return each client's cumulative mix over the classes in stock; uniform if none of its classes is left."""
    in_stock = np.asarray(left) > 0
    wanted = mixes * in_stock
    total = wanted.sum(axis=1, keepdims=True)
    # A small α gives shares of exactly 0, or too small to divide by.
    wanted = np.where(total > np.finfo(float).tiny, wanted, in_stock)
    return (wanted / wanted.sum(axis=1, keepdims=True)).cumsum(axis=1).tolist()


def iid(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
    """Cut a random permutation into parts that differ by at most one sample."""
    return np.array_split(rng.permutation(len(task.labels)), task.num_clients)


# dirichlet ----------------------------------------------------------------------------------------------------------


def dirichlet(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide each class by shares from Dir(α) over the clients; redraw until all clients have `min_size` samples."""
    num_clients, min_size = task.num_clients, task.min_size
    stock = _shuffled_classes(task.labels, rng)
    smallest = 0
    for _ in range(ATTEMPTS):
        counts = _draw_counts([len(members) for members in stock], num_clients, task.alpha, rng)  # [K, N]
        sizes = counts.sum(axis=0)
        if sizes.min() >= min_size:
            pieces = [np.split(members, row.cumsum()[:-1]) for members, row in zip(stock, counts, strict=True)]
            return [
                np.concatenate([np.empty(0, np.int64), *(own[client] for own in pieces)])
                for client in range(num_clients)
            ]
        smallest = max(smallest, int(sizes.min()))
    raise ValueError(
        f"{ATTEMPTS} draws with alpha={task.alpha} and num_clients={num_clients} never gave every client "
        f"min_size={min_size} samples (the smallest client of the best draw had {smallest}); "
        "use a larger alpha, fewer clients or a smaller min_size"
    )


def _draw_counts(available: list[int], num_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of samples of each class per client, [K, N]; rows sum to `available`."""
    fair_share = sum(available) / num_clients
    counts = np.zeros((len(available), num_clients), np.int64)
    for label, stock in enumerate(available):
        shares = rng.dirichlet(np.full(num_clients, alpha))
        below_fair_share = counts.sum(axis=0) < fair_share
        shares = shares * below_fair_share
        if shares.sum() <= np.finfo(float).tiny:  # all clients below the fair share drew 0: equal shares
            shares = below_fair_share if below_fair_share.any() else np.ones(num_clients)
        edges = np.floor(np.cumsum(shares / shares.sum()) * stock + 1e-9).astype(np.int64)
        edges[-1] = stock
        counts[label] = np.diff(np.minimum(edges, stock), prepend=0)
    return counts


# step ---------------------------------------------------------------------------------------------------------------


def major_pairs(num_clients: int, classes: int) -> np.ndarray:
    """Return each client's ordered pair of major classes, int64 [N, 2].

    Client i of block r = i // K has (i mod K, (i + 1 + r) mod K): K² clients have every ordered pair once, pairs of one
    label last, and each block of K clients has every class twice.
    """
    client = np.arange(num_clients)
    first = client % classes
    return np.stack([first, (first + 1 + client // classes) % classes], axis=1)


def step_weights(num_clients: int, classes: int, ratio: float) -> np.ndarray:
    """Return the weight of each class at each client, float64 [N, K].

    A minor class has weight 1, a major class `ratio`; a pair of one label has 2 · ratio - 1 on it, so that the weights
    of all clients have one sum. A ratio of 1 gives all clients the same class mix.
    """
    weights = np.ones((num_clients, classes))
    for major in major_pairs(num_clients, classes).T:
        weights[np.arange(num_clients), major] += ratio - 1
    return weights


def step(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide each class by the clients' weights (`step_weights`); all samples are used, the pairs are permuted.

    With K classes of one size and a multiple of K clients that divides them without remainder, all clients have one
    size (CIFAR-10, 300 clients, ratio 16: 80 + 80 + 8 · 5, or 155 + 9 · 5).
    """
    labels, num_clients = task.labels, task.num_clients
    classes = int(labels.max()) + 1 if len(labels) else 1
    weights = step_weights(num_clients, classes, task.step_ratio)[rng.permutation(num_clients)]  # [N, K]
    clients: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(num_clients)]
    for label in range(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        edges = np.round(np.cumsum(weights[:, label]) / weights[:, label].sum() * len(members), 6)
        for client, piece in enumerate(np.split(members, np.floor(edges[:-1]).astype(np.int64))):
            clients[client].append(piece)
    return [np.concatenate(own) for own in clients]


# by domain ----------------------------------------------------------------------------------------------------------


def within_domains(
    assign: Callable[[Task, np.random.Generator], list[np.ndarray]],
) -> Callable[[Task, np.random.Generator], list[np.ndarray]]:
    """Return a scheme that applies `assign` to the samples of each domain that occurs, m clients per domain."""

    def by_domain(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
        assert task.domain is not None
        present = np.unique(task.domain)
        names = [task.domains[one] for one in present]
        if not names or task.num_clients % len(names):
            raise ValueError(
                f"num_clients={task.num_clients} must be a multiple of the {len(names)} domains: {', '.join(names)}"
            )
        each = task.num_clients // len(names)
        clients: list[np.ndarray] = []
        for number, name in zip(present, names, strict=True):
            members = np.flatnonzero(task.domain == number)
            parts = assign(replace(task, labels=task.labels[members], num_clients=each), rng)
            smallest = min(len(part) for part in parts)
            if smallest < task.min_size:
                raise ValueError(
                    f"domain {name} with {len(members)} images leaves one of its {each} clients with {smallest}, "
                    f"fewer than min_size={task.min_size}"
                )
            clients.extend(members[part] for part in parts)
        return clients

    return by_domain


def even(task: Task, rng: np.random.Generator) -> list[np.ndarray]:
    """Assign a permutation sorted by class to the clients in turn: sizes differ by at most 1, in all and per class."""
    shuffled = rng.permutation(len(task.labels))
    ordered = shuffled[np.argsort(task.labels[shuffled], kind="stable")]
    return [ordered[client :: task.num_clients] for client in range(task.num_clients)]


SCHEMES: dict[str, Scheme] = {
    "equal": Scheme(equal),
    "dirichlet": Scheme(dirichlet),
    "iid": Scheme(iid),
    "step": Scheme(step),
    "domain": Scheme(within_domains(even), by_domain=True),
    "domain_step": Scheme(within_domains(step), by_domain=True),
}


# natural shifts -----------------------------------------------------------------------------------------------------


def match_class_mixes(counts: np.ndarray, labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Partition a natural shift (CIFAR-10.1) by the class mixes of the clients' training splits.

    FedTHE, appendix D: "split CIFAR10.1 into subsets where each subset's class distribution is consistent with the
    corresponding client's local training set class distribution". Client i gets s · c_ik images of class k, with the
    largest s for which no class runs out. Mixes are exact up to rounding by largest remainder within a class (equal
    remainders: the lower client number); every number is less than one image off, and some images stay unused.

    Parameters
    ----------
    counts : ndarray [N, K]
        c_ik, training samples per client and class.
    labels : ndarray [M]
        Classes of the images to partition.
    seed : int
        Decides which images of a class a client gets.

    Returns
    -------
    list of ndarray
        Sorted, disjoint indices (int64) into `labels` of each client.
    """
    clients, classes = counts.shape
    stock = np.bincount(labels, minlength=classes)
    demand = counts.sum(axis=0)
    asked = demand > 0
    scale = float((stock[asked] / demand[asked]).min()) if asked.any() else 0.0  # s
    assigned: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label in range(classes):
        members = generator("natural", seed, label).permutation(np.flatnonzero(labels == label))
        shares = largest_remainder(scale * counts[:, label])
        for client, part in enumerate(np.split(members[: shares.sum()], shares.cumsum()[:-1])):
            assigned[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in assigned]


def largest_remainder(quotas: np.ndarray) -> np.ndarray:
    """Round non-negative quotas [n] to integers less than one off that sum to floor(sum of the quotas)."""
    quotas = np.round(quotas, 9)  # 3 · (1/3) must not lose a sample to floating point
    given = np.floor(quotas).astype(np.int64)
    missing = int(np.floor(round(float(quotas.sum()), 6))) - int(given.sum())
    given[np.argsort(-np.round(quotas - given, 9), kind="stable")[:missing]] += 1
    return given
