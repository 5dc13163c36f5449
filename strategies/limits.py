"""Limits on what one client does to a mean: on its weight, on its distance from most clients, and on its direction.

A client's number of samples and its arrays are its own word. Without limits one client of ten that claims 10⁸ samples,
or sends its step ten times as far in the opposite direction, decides the model.

- `capped`: a client's weight is at most a multiple of the median client's.
- `clip`: arrays further from the clients' median than a multiple of the median distance are pulled back to it. This is
  centered clipping (Karimireddy et al., "Learning from History for Byzantine Robust Optimization", ICML 2021, section
  5.2) with two deviations: the center is the median of each number in this round, since a mean, or a momentum from
  earlier rounds, has the attacker in it; and the radius follows the clients' own spread, since no fixed one fits two
  networks.
- `forward`: a step against the median step counts as little as it is against it. A flipped sign is not far from the
  median where clients' data differ, but it points backwards. FLTrust (Cao et al., NDSS 2021) gives such a step no
  weight, by the step of the server's own data, which is not there here; and an honest client with rare classes, whose
  step is nearly at a right angle, keeps most of it.

What is within the limits keeps its bits, so that without an attack a mean is what it is without limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.strategies.arrays import Arrays, Float, Named, named_blocks

#: Fewer clients have no median that one of them does not decide.
LEAST = 3
#: A step at this cosine against the median step counts as the median step. Honest clients with few classes reach -0.08.
AGAINST = 0.1


def capped(counts: Sequence[int], share: float) -> list[int]:
    """Return numbers of samples, each at most `share` times the median (of two the lower one); 0: as they are."""
    if not share or not counts:
        return list(counts)
    most = max(1, int(share * median_low(counts)))
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
        name → array in float64; empty where there is none.
    """

    arrays: list[Arrays]
    distances: Float
    radius: float
    center: Named = field(default_factory=dict)

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
    chosen = [{name: client[name] for name in names} for client in clients]
    center = {name: np.empty(value.shape, np.float64) for name, value in chosen[0].items()}
    squares = np.zeros(len(clients))
    with np.errstate(over="ignore"):  # an infinite distance is beyond any radius
        for name, where, block in named_blocks(chosen):
            middle = np.ravel(start[name])[where] if few and start is not None else median(block)
            center[name].reshape(-1)[where] = middle
            off = block - middle
            squares += np.einsum("np,np->n", off, off, dtype=np.float64)
        distances = np.sqrt(squares)
        known = np.concatenate([np.asarray(past, np.float64), distances])
        radius = factor * float(np.median(known)) if len(known) >= LEAST else np.inf
    arrays = list(clients)
    for i, distance in enumerate(distances):
        if distance > radius:
            arrays[i] = {**clients[i], **_between(center, chosen[i], radius / distance)}
    return Clipped(arrays, distances, radius, {} if few else center)


def median(rows: NDArray[Any]) -> Float:
    """Return the median of each column of [N, P]."""
    ordered = np.sort(rows, axis=0)
    low, high = (ordered[i].astype(np.float64) for i in ((len(rows) - 1) // 2, len(rows) // 2))
    return low + (high - low) / 2


def _between(center: Arrays, arrays: Arrays, part: float) -> Named:
    """Return the point between the center (0) and the arrays (1), in their dtypes."""
    if part == 0:  # also for a difference that float64 does not hold
        return {name: center[name].astype(value.dtype) for name, value in arrays.items()}
    return {
        name: (center[name] + part * (value.astype(np.float64) - center[name])).astype(value.dtype)
        for name, value in arrays.items()
    }


def forward(clients: Sequence[Arrays], center: Arrays, start: Arrays) -> list[Arrays]:
    """Return arrays whose step from `start` is not against the step to `center`.

    A step with a negative cosine loses its component against the other, and what remains fades towards the center,
    which stands for it at a cosine of -`AGAINST` and below: what a flipped sign leaves at a right angle to the median
    step is still the opposite of what this client's classes need.

    Parameters
    ----------
    clients : sequence of mappings
        One mapping name → array a client; the same object is returned where nothing changes.
    center, start : mapping
        The names of `center` are those that count.
    """
    common = {name: value - start[name].astype(np.float64) for name, value in center.items()}
    length = math.sqrt(sum(float(np.vdot(one, one)) for one in common.values()))
    result = list(clients)
    for i, client in enumerate(clients):
        step = {name: client[name] - start[name].astype(np.float64) for name in common}
        along = sum(float(np.vdot(step[name], one)) for name, one in common.items())
        if not along < 0 < length:
            continue
        cosine = along / (length * math.sqrt(sum(float(np.vdot(one, one)) for one in step.values())))
        beside = {name: client[name] - along / length**2 * one for name, one in common.items()}
        like = {name: client[name] for name in common}
        result[i] = {**client, **_as(like, _between(center, beside, max(0.0, 1 + cosine / AGAINST)))}
    return result


def _as(like: Arrays, values: Arrays) -> Named:
    """Return values in the dtypes of other arrays."""
    return {name: values[name].astype(value.dtype) for name, value in like.items()}
