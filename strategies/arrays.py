"""Named arrays of clients: checks, weighted means, mixtures, and the conversion from and to Flower's records.

All sums are in float64. What is summed over many clients goes block by block, so that memory does not grow with the
size of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedtta.messages.arrays import LazyArrays, layout_of
from fedtta.messages.flower import lazy_arrays
from fedtta.messages.store import part

Float: TypeAlias = NDArray[np.float64]
#: Name → array, as a result and as an argument.
Named: TypeAlias = dict[str, NDArray[Any]]
Arrays: TypeAlias = Mapping[str, NDArray[Any]]

#: Endings of the names of arrays that have no gradient: BatchNorm's running statistics.
RUNNING_STATISTICS = ("running_mean", "running_var")
#: Numbers (float64) in one block: 8 MiB.
BLOCK = 1 << 20
#: Blocks that are read at once: of many clients a block has few numbers of each.
READ = 4
#: How far the sum of a row of W may be from one.
TOLERANCE = 1e-6


def as_numpy(record: ArrayRecord) -> Named:
    """Return an array record as numpy arrays."""
    return {name: array.numpy() for name, array in record.items()}


def reply_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a reply; those that are not in memory are read at each access."""
    return lazy_arrays(record) or as_numpy(record)


def as_record(arrays: Arrays) -> ArrayRecord:
    """Return numpy arrays as an array record."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def require_alike(arrays: Sequence[Arrays]) -> None:
    """Raise ValueError unless all clients have the same names, shapes and dtypes; it names the first that differs."""
    first = layout_of(arrays[0])
    for index, client in enumerate(arrays[1:], start=1):
        other = layout_of(client)
        if set(other) != set(first):
            raise ValueError(f"client {index} has the names {sorted(other)}, the first {sorted(first)}")
        for name, (shape, dtype) in other.items():
            if (shape, dtype) != first[name]:
                raise ValueError(
                    f"{name} of client {index}: {dtype}{shape} does not fit {first[name][1]}{first[name][0]}"
                )


def weighted_mean(arrays: Sequence[Arrays], weights: Sequence[float] | None = None) -> Named:
    """Return the weighted mean of the clients' arrays, summed in the given order, in the dtypes of the arrays.

    Integers are rounded to the nearest.

    Parameters
    ----------
    arrays : sequence of mappings
        One mapping name → array a client; the same names, shapes and dtypes in each.
    weights : sequence of float, optional
        Non-negative, not all zero; uniform when None.

    Raises
    ------
    ValueError
        There is no client, names, shapes or dtypes differ, or the weights are unusable.
    """
    if not arrays:
        raise ValueError("nothing to average")
    factors = np.ones(len(arrays)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(factors) != len(arrays) or not np.isfinite(factors).all() or (factors < 0).any():
        raise ValueError(f"weights {list(factors)} do not fit {len(arrays)} clients")
    if factors.sum() == 0:
        raise ValueError("all weights are zero")
    require_alike(arrays)
    factors = factors / factors.sum()
    means = {}
    for name, (shape, dtype) in layout_of(arrays[0]).items():
        total = np.zeros(shape, dtype=np.float64)
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        for factor, client in zip(factors, arrays, strict=True):
            term = client[name].astype(np.float64)
            total += factor * term
            low, high = np.minimum(low, term), np.maximum(high, term)
        # rounding must not push a mean out of the range of its terms: a mean of ones is one, a DLE stays in [0, 1]
        mean = np.clip(total, low, high)
        means[name] = (np.rint(mean) if dtype.kind in "biu" else mean).astype(dtype)
    return means


def mix(weights: NDArray[Any], arrays: Sequence[Arrays]) -> list[Named]:
    """Return each client's mixture Σ_j W_ij θ_j, in the dtypes of the arrays.

    Mixtures are clipped into the range of their terms: rounding must not make a variance negative or change arrays
    that are equal everywhere. Integers are rounded to the nearest.

    Parameters
    ----------
    weights : [N, N]
        W: non-negative, rows that sum to one.
    arrays : sequence of mappings
        One mapping name → array a client; the same names, shapes and dtypes in each. The mappings may be empty.

    Raises
    ------
    ValueError
        W is not row-stochastic or does not fit the clients, or names, shapes or dtypes differ.
    """
    factors = require_stochastic(weights, len(arrays))
    mixtures: list[Named] = [
        {name: np.empty(*layout) for name, layout in layout_of(client).items()} for client in arrays
    ]
    targets = {name: [mixture[name].reshape(-1) for mixture in mixtures] for name in arrays[0]}  # views
    for name, where, block in named_blocks(arrays):
        terms = block.astype(np.float64)
        mixed = np.clip(factors @ terms, terms.min(axis=0), terms.max(axis=0))
        if block.dtype.kind in "biu":
            mixed = np.rint(mixed)
        for target, row in zip(targets[name], mixed, strict=True):
            target[where] = row
    return mixtures


def require_stochastic(weights: NDArray[Any], clients: int) -> Float:
    """Return W as float64, or raise ValueError unless it is [N, N], non-negative, with rows that sum to one."""
    factors = np.asarray(weights, np.float64)
    if not clients or factors.shape != (clients, clients):
        raise ValueError(f"weights of shape {factors.shape} do not fit {clients} clients")
    if not np.isfinite(factors).all() or (factors < 0).any():
        raise ValueError("weights must be finite and not negative")
    if (off := np.abs(factors.sum(axis=1) - 1)).max() > TOLERANCE:
        row = int(off.argmax())
        raise ValueError(f"weights of client {row} sum to {factors[row].sum():.9g}, not to one")
    return factors


def named_blocks(
    clients: Sequence[Arrays], names: Sequence[str] | None = None
) -> Iterator[tuple[str, slice, NDArray[Any]]]:
    """Yield (name, positions in the flattened array, numbers [N, at most `BLOCK` / N] in their own dtype).

    Parameters
    ----------
    clients : sequence of mappings
        One mapping name → array a client; the same names, shapes and dtypes in each.
    names : sequence of str, optional
        Of the arrays, in this order; None: all, in the first client's order.

    Raises
    ------
    ValueError
        There is no client, or names, shapes or dtypes differ.
    """
    if not clients:
        raise ValueError("there is no client")
    require_alike(clients)
    width, layout = max(1, BLOCK // len(clients)), layout_of(clients[0])
    for name in layout if names is None else names:
        rows = [one if isinstance(one, LazyArrays) else {name: np.ravel(one[name])} for one in clients]
        size = math.prod(layout[name][0])
        for left in range(0, size, READ * width):
            right = min(left + READ * width, size)
            wide = np.empty((len(clients), right - left), layout[name][1])
            for row, target in zip(rows, wide, strict=True):
                target[:] = part(row, name, slice(left, right))
            for start in range(left, right, width):
                where = slice(start, min(start + width, right))
                yield name, where, wide[:, start - left : where.stop - left]


def blocks(clients: Sequence[Arrays]) -> Iterator[Float]:
    """Yield all numbers of all clients as float64 blocks [N, at most `BLOCK` / N].

    Raises
    ------
    ValueError
        As `named_blocks`, or a value is not finite.
    """
    for name, _, block in named_blocks(clients):
        numbers = block.astype(np.float64)
        if not np.isfinite(numbers).all():
            bad = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
            raise ValueError(f"{name} of clients {bad.tolist()}: values that are not finite")
        yield numbers
