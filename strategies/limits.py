"""Limits on what one client does to a mean: on its weight, on its distance from most clients, and on its direction.

A client's number of samples and its arrays are its own word. Without limits one client of ten that claims 10⁸ samples,
or sends its step ten times as far in the opposite direction, decides the model.

- `capped`: a client's weight is at most a multiple of the median client's.
- `clip`: arrays further from the clients' median than a multiple of the median distance are pulled back to it. This is
  centered clipping (Karimireddy et al., "Learning from History for Byzantine Robust Optimization", ICML 2021, section
  5.2) with two deviations: the center is the median of each number in this round, since a mean, or a momentum from
  earlier rounds, has the attacker in it; and the radius follows the clients' own spread, since no fixed one fits two
  networks.
- `forward`: a step against the median step of the other clients counts as little as it is against it. A flipped sign
  is not far from the median where clients' data differ, but it points backwards. FLTrust (Cao et al., NDSS 2021) gives
  such a step no weight, by the step of the server's own data, which is not there here; and an honest client with rare
  classes, whose step is nearly at a right angle, keeps most of it.

What is within the limits keeps its bits, so that without an attack a mean is what it is without limits.

Clients' arrays are read in blocks (`named_blocks`), and what is changed is where the client's own arrays are, so memory
does not grow with the number of clients whose arrays are in a file (`fedtta.messages.store`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import layout_of
from fedtta.messages.store import blank, overlaid, part, put
from fedtta.settings import exactly
from fedtta.strategies.arrays import Arrays, Float, Named, named_blocks

#: Fewer clients have no median that one of them does not decide.
LEAST = 3
#: A step at this cosine against the others' median step counts as that. Of ten clients with a Dirichlet(0.5) split most
#: honest ones stay above 0, one reaches -0.26; a flipped sign has -0.08 or less at first, and later -0.13 to -0.4.
AGAINST = 0.1


def capped(counts: Sequence[int], share: float) -> list[int]:
    """Return numbers of samples, each at most `share` times the median (of two the lower one); 0: as they are."""
    if not share or not counts:
        return list(counts)
    most = max(1, int(exactly(share) * median_low(counts)))
    return [min(count, most) for count in counts]


@dataclass(frozen=True)
class Clipped:
    """Arrays of clients after `clip`.

    Parameters
    ----------
    arrays : list of mappings
        One a client; the same object where nothing was changed.
    distances : [N] float64
        Euclidean distance of each client from the center, before.
    radius : float
        The largest distance that is allowed; infinite where there is no limit.
    center : dict
        name → array in float64; empty where no client is far from it.
    middle : list of mappings
        See `middle_rows`.
    """

    arrays: list[Arrays]
    distances: Float
    radius: float
    center: Named = field(default_factory=dict)
    middle: list[Arrays] = field(default_factory=list)

    @property
    def far(self) -> list[int]:
        """Return the positions of the clients that were pulled back."""
        return [int(i) for i in np.flatnonzero(self.distances > self.radius)]


def clip(
    clients: Sequence[Arrays],
    names: Sequence[str],
    factor: float,
    past: Sequence[float] | Float = (),
    start: Arrays | None = None,
) -> Clipped:
    """Pull arrays that are far from the median back to `factor` times the median distance.

    Where most clients sent the same, the median distance is 0, and the others count as what most clients sent.

    Parameters
    ----------
    clients : sequence of mappings
        One mapping name → array a client; the same names, shapes and dtypes in each.
    names : sequence of str
        Float arrays whose numbers are one vector; the others are left alone.
    factor : float
        Positive.
    past : sequence of float
        Distances of earlier rounds, which count in the median distance: with few clients a round its own says little.
    start : mapping, optional
        The center with fewer than `LEAST` clients; without it they are left alone.

    Raises
    ------
    ValueError
        There is no client, or the arrays do not fit each other.
    """
    if not clients:
        raise ValueError("there is no client")
    few = len(clients) < LEAST
    if few and start is None:
        return Clipped(list(clients), np.zeros(len(clients)), np.inf)
    given, kept = start if few else None, _room(clients, names)
    squares = np.zeros(len(clients))
    with np.errstate(over="ignore"):  # an infinite distance is beyond any radius
        for name, where, block in named_blocks(clients, names):
            rows = middle_rows(block)
            _keep(kept, name, where, rows)
            off = block - (median(rows) if given is None else np.ravel(given[name])[where])
            squares += np.einsum("np,np->n", off, off, dtype=np.float64)
        distances = np.sqrt(squares)
        known = np.concatenate([np.asarray(past, np.float64), distances])
        radius = factor * float(np.median(known)) if len(known) >= LEAST else np.inf
    arrays, center = list(clients), dict[str, Float]()
    if (distances > radius).any():  # seldom: only then is there a center of all arrays in memory
        for name in names:
            shape = layout_of(clients[0])[name][0]
            whole = _stored(kept, name, slice(0, math.prod(shape)))
            center[name] = (median(whole) if given is None else given[name].astype(np.float64)).reshape(shape)
    for i in map(int, np.flatnonzero(distances > radius)):
        arrays[i] = overlaid(clients[i], _between(center, clients[i], radius / distances[i]))
    return Clipped(arrays, distances, radius, center, kept)


def middle_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the two or three rows in the middle of the sorted columns of [N, P]; fewer if there are fewer.

    The median of a column is theirs, and so is its median without one of its numbers.
    """
    others = len(rows) - 1
    return np.sort(rows, axis=0)[max(0, (others - 1) // 2) : others // 2 + 2]


def _room(clients: Sequence[Arrays], names: Sequence[str]) -> list[Arrays]:
    """Return room for the middle rows of clients' arrays, in the file that has these, or in memory."""
    return [blank(clients[-1], names) for _ in range(min(len(clients), 2 + len(clients) % 2))]


def _keep(middle: Sequence[Any], name: str, where: slice, rows: NDArray[Any]) -> None:
    for arrays, row in zip(middle, rows, strict=True):
        put(arrays, name, where, row)


def _stored(middle: Sequence[Arrays], name: str, where: slice) -> NDArray[Any]:
    return np.stack([part(arrays, name, where) for arrays in middle])


def median(rows: NDArray[Any]) -> Float:
    """Return the median of each column of [N, P]."""
    ordered = np.sort(rows, axis=0)
    low, high = (ordered[i].astype(np.float64) for i in ((len(rows) - 1) // 2, len(rows) // 2))
    return low + (high - low) / 2


def _between(center: Arrays, arrays: Arrays, share: float) -> Arrays:
    """Return the point between the center (0) and the arrays of its names (1), in their dtypes."""
    made = blank(arrays, center)
    for name, middle in center.items():
        # share 0 also stands for a difference that float64 does not hold
        found = middle if share == 0 else middle + share * (arrays[name].astype(np.float64) - middle)
        put(made, name, slice(0, middle.size), np.ravel(found))
    return made


def others_median(rows: NDArray[Any], middle: NDArray[Any], clients: int) -> Float:
    """Return for each row of [n, P] the median of each column without it; with it if fewer than `LEAST` are left.

    Parameters
    ----------
    middle : [2 or 3, P]
        The middle of the columns, see `middle_rows`.
    clients : int
        N, how many rows the columns have; those given may be some of them.
    """
    if clients - 1 < LEAST:
        return np.broadcast_to(median(middle), rows.shape)
    # without a number that is at most the k-th, the k-th of the others is the next one
    exact = middle.astype(np.float64)
    low, last = exact[0], exact[-1]
    if len(middle) == 2:
        return np.where(rows <= middle[0], last, low)
    lower = np.where(rows <= middle[0], exact[1], low)
    half = np.where(rows <= middle[1], last, exact[1])
    half -= lower  # in place: more arrays of this size cost more than the arithmetic
    half /= 2
    lower += half
    return lower


def forward(
    clients: Sequence[Arrays], names: Sequence[str], start: Arrays, middle: Sequence[Arrays] = ()
) -> list[Arrays]:
    """Return arrays whose step from `start` is not against the median step of the other clients.

    Of the others: in the median of all, ten clients' own steps have a cosine of about 0.2 with it, and a flipped sign
    seems to go along. A step with a negative cosine loses its component against that median, and what remains fades
    towards the median, which stands for it at a cosine of -`AGAINST` and below: what a flipped sign leaves at a right
    angle to the median step is still the opposite of what this client's classes need.

    Parameters
    ----------
    clients : sequence of mappings
        One mapping name → array a client; the same object is returned where nothing changes.
    names : sequence of str
        Float arrays whose numbers are one vector; the others are left alone.
    start : mapping
        name → array that was sent to the clients.
    middle : sequence of mappings, optional
        The middle rows of these clients, if `clip` has found them.

    Raises
    ------
    ValueError
        There is no client, or the arrays do not fit each other.
    """
    along, common, own = np.zeros((3, len(clients)))
    flat = {name: np.ravel(start[name]) for name in names}
    kept = list(middle) or _room(clients, names)
    for name, where, block in named_blocks(clients, names):
        begin = flat[name][where].astype(np.float64)
        if not middle:
            _keep(kept, name, where, middle_rows(block))
        others = others_median(block, _stored(kept, name, where), len(clients))
        median_step, step = others - begin, block - begin
        for total, (left, right) in ((along, (step, median_step)), (common, (median_step,) * 2), (own, (step,) * 2)):
            total += np.einsum("np,np->n", left, right)
    against = [int(i) for i in np.flatnonzero((along < 0) & (common > 0))]
    if not against:
        return list(clients)
    fade = np.maximum(0.0, 1 + along[against] / np.sqrt(common[against] * own[against]) / AGAINST)[:, None]
    back = (along[against] / common[against])[:, None]
    changed = [blank(clients[i], names) for i in against]
    for name, where, block in named_blocks([clients[i] for i in against], names):
        begin = flat[name][where].astype(np.float64)
        others = others_median(block, _stored(kept, name, where), len(clients))
        beside = block - back * (others - begin)
        for arrays, values in zip(changed, others + fade * (beside - others), strict=True):
            put(arrays, name, where, values)
    result = list(clients)
    for i, arrays in zip(against, changed, strict=True):
        result[i] = overlaid(clients[i], arrays)
    return result
