"""A reply as the vector that is summed under masks, and the mean reply of a sum.

The vector holds the aggregated arrays by name, each times the client's weight, then the weight, the number of samples,
the loss times the samples, and counts. All of it is masked: of a single client the server learns nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import digest
from fedtta.messages.replies import RefinedRates, Reply, Summarized, Trained
from fedtta.messages.requests import RefineRates, Summarize, Train

#: name → (shape, dtype as numpy spells it).
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
Float = NDArray[np.float64]
#: Requests whose replies can be masked.
Masked = Train | Summarize | RefineRates


@dataclass(frozen=True)
class Aggregated:
    """What of a reply is aggregated.

    Parameters
    ----------
    releases : str
        What a mechanism of differential privacy calls it.
    arrays : str
        Field of the arrays.
    loss : str
        Field of the loss; empty: none.
    counts : tuple of str
        Fields of counts.
    """

    releases: str
    arrays: str
    loss: str
    counts: tuple[str, ...]


_VALIDATED = ("validation_total", "validation_correct", "personal_validation_correct")
AGGREGATED: dict[type[Reply], Aggregated] = {
    Trained: Aggregated("model", "arrays", "train_loss", _VALIDATED),
    Summarized: Aggregated("statistics", "statistics", "", _VALIDATED),
    RefinedRates: Aggregated("rates", "rates", "loss", ("correct",)),
}


def common_part(request: Masked) -> str:
    """Return the session of a masked request, and a digest of what all clients of the sum must have been sent.

    It is in the masks of pairs, which cancel only where it is the same: otherwise a server could read one client's
    update in the sum by sending all others a network that nothing is learned from.
    """
    assert request.masking is not None, "a request without masking has no sum"
    own = ("masking", "checkpoint_rounds", "arrays", "rates")
    told = {one.name: getattr(request, one.name) for one in fields(request) if one.name not in own}
    if isinstance(request, RefineRates):
        sent = request.rates  # the network is told by its digest, which a client checks
    else:
        names = request.aggregated
        sent = {name: value for name, value in request.arrays.items() if names is None or name in names}
    asked = request.masking
    parts = [request.kind, told, digest(sent), asked.clients, asked.most, asked.weighting]
    text = json.dumps(parts, sort_keys=True, default=asdict)
    return f"{asked.session} {hashlib.sha256(text.encode()).hexdigest()}"


def length(kind: type[Reply], shapes: Shapes) -> int:
    """Return how many numbers the vector of a reply has."""
    return sum(math.prod(shape) for shape, _ in shapes.values()) + 3 + len(AGGREGATED[kind].counts)


def to_vector(reply: Reply, arrays: Mapping[str, Float], weight: int) -> Float:
    """Return a reply as the vector that is summed.

    Parameters
    ----------
    reply : Reply
        Of which all but the arrays is used.
    arrays : mapping
        What takes the place of its arrays, float64.
    weight : int
        Of the client in means of arrays.
    """
    how, samples = AGGREGATED[type(reply)], reply.num_examples
    loss = getattr(reply, how.loss) if how.loss else 0.0
    counts = [getattr(reply, name) or 0 for name in how.counts]
    parts = [weight * arrays[name].reshape(-1) for name in sorted(arrays)]
    return np.concatenate([*parts, np.array([weight, samples, loss * samples, *counts], np.float64)])


def to_mean(sent: Reply, total: Float, shapes: Shapes) -> Reply:
    """Return the mean reply of several clients; samples and counts are their sums, so that no accuracy is rounded.

    Parameters
    ----------
    sent : Reply
        What one of them sent; its time is kept.
    total : [length]
        The sum of their vectors.
    shapes : mapping
        Of the arrays, in their order.

    Raises
    ------
    ValueError
        The weights do not sum to a positive number, or a count is negative: a client sent something else.
    """
    how, position, means = AGGREGATED[type(sent)], 0, {}
    start = length(type(sent), shapes) - 3 - len(how.counts)
    weight, samples, loss, *counts = (float(value) for value in total[start:])
    if not (weight > 0 and samples > 0 and loss >= 0 and min(counts) >= 0):
        raise ValueError("the sum over the clients is none of replies")
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        size = math.prod(shape)
        means[name] = (total[position : position + size] / weight).reshape(shape).astype(dtype)
        position += size
    arrays = {name: means[name] for name in shapes}
    fields: dict[str, Any] = {how.arrays: arrays, "num_examples": max(1, round(samples)), "masked": None}
    if how.loss:
        fields[how.loss] = loss / samples
    for name, count in zip(how.counts, counts, strict=True):
        # None says that the algorithm has no such count
        fields[name] = None if getattr(sent, name) is None else round(count)
    return replace(sent, **fields)
