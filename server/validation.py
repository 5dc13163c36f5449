"""One validator for every reply of every strategy: nothing that fails here reaches an average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

#: Inclusive ranges of named arrays, where a range exists.
RANGES: dict[str, tuple[float, float]] = {
    "dle": (0.0, 1.0),
    "entropy_local": (0.0, math.inf),
    "entropy_global": (0.0, math.inf),
}
#: Endings of names of variances, which are not negative.
VARIANCES = ("running_var",)
#: A client that claims more examples than this is not believed.
MAX_EXAMPLES = 100_000_000


@dataclass(frozen=True)
class Expected:
    """What the array record of a reply must look like.

    Parameters
    ----------
    record : str
        Name of the record; empty when there must be none.
    shapes : mapping
        name → (shape, dtype as numpy spells it).
    """

    record: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]

    @classmethod
    def like(cls, record: str, arrays: Mapping[str, NDArray[Any]]) -> Expected:
        """Expect the names, shapes and dtypes of `arrays`."""
        return cls(record, {name: (value.shape, str(value.dtype)) for name, value in arrays.items()})


def why_refused(reply: Message, expected: Expected) -> str | None:
    """Check a reply and return the reason to refuse it, or None.

    A good reply has exactly one array record, with the expected name, names, shapes and dtypes and finite values in
    their ranges, and exactly one metric record with a positive, bounded `num-examples` and finite values.
    """
    content = reply.content
    wanted = [expected.record] if expected.record else []
    if list(content.array_records) != wanted:
        return f"array records {sorted(content.array_records)}, expected {wanted}"
    if len(content.metric_records) != 1:
        return f"metric records {sorted(content.metric_records)}, expected one"
    try:
        arrays = {name: array.numpy() for key in wanted for name, array in content.array_records[key].items()}
    except (ValueError, TypeError, EOFError, OSError) as error:
        return f"arrays cannot be read: {error}"
    return _arrays_refused(arrays, expected.shapes) or _metrics_refused(
        dict(next(iter(content.metric_records.values())))
    )


def _arrays_refused(
    arrays: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> str | None:
    missing, unknown = sorted(set(shapes) - set(arrays)), sorted(set(arrays) - set(shapes))
    if missing or unknown:
        return f"missing arrays {missing}, unknown arrays {unknown}"
    for name, value in arrays.items():
        shape, dtype = shapes[name]
        if value.shape != shape or str(value.dtype) != dtype:
            return f"{name}: {value.dtype}{list(value.shape)}, expected {dtype}{list(shape)}"
        if not np.isfinite(value).all():
            return f"{name}: values that are not finite"
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if name.endswith(VARIANCES):
            low = 0.0
        if value.size and (value.min() < low or value.max() > high):
            return f"{name}: values from {value.min()} to {value.max()}, allowed are {low} to {high}"
    return None


def _metrics_refused(metrics: Mapping[str, object]) -> str | None:
    examples = metrics.get("num-examples")
    if isinstance(examples, bool) or not isinstance(examples, int | float):
        return f"num-examples = {examples!r}, expected a number"
    if not 0 < examples <= MAX_EXAMPLES:  # also refuses NaN
        return f"num-examples = {examples}, allowed is more than 0, at most {MAX_EXAMPLES}"
    for name, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            return f"metric {name} is not finite"
    return None
