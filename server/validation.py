"""One validator for every reply of every strategy: nothing that fails here reaches an average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from server.report import WEIGHT_BINS

#: Inclusive ranges of named arrays, where a range exists.
RANGES: dict[str, tuple[float, float]] = {
    "dle": (0.0, 1.0),
    "entropy_local": (0.0, math.inf),
    "label_prior": (0.0, 1.0),
    "confusion": (0.0, 1.0),
    "block_scores": (0.0, 1.0),
    "entropy_global": (0.0, math.inf),
}
#: Endings of names of variances, which are not negative.
VARIANCES = ("running_var", "variance")
#: A client that claims more examples than this is not believed.
MAX_EXAMPLES = 100_000_000


class Expectation(Protocol):
    """What replies of a round are checked against."""

    def refusals(self, replies: Sequence[Message]) -> list[str | None]:
        """Return for each reply the reason to refuse it, or None."""


@dataclass(frozen=True)
class Expected:
    """What the array record of a reply must look like.

    Parameters
    ----------
    record : str
        Name of the record; empty when there must be none.
    shapes : mapping
        name → (shape, dtype as numpy spells it).
    numbers : sequence of str
        Metrics that must be there: numbers, not negative.
    shares : sequence of (str, str)
        Pairs of `numbers` of which the first is at most the second, as what is right of a total.
    """

    record: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    numbers: Sequence[str] = ()
    shares: Sequence[tuple[str, str]] = ()

    @classmethod
    def like(cls, record: str, arrays: Mapping[str, NDArray[Any]], **metrics: Any) -> Expected:
        """Expect the names, shapes and dtypes of `arrays`, and `numbers` and `shares` as given."""
        return cls(record, {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}, **metrics)

    def refusals(self, replies: Sequence[Message]) -> list[str | None]:
        """Check replies one by one; see `Expectation`."""
        return [self.why_refused(reply) for reply in replies]

    def why_refused(self, reply: Message) -> str | None:
        """Check a reply and return the reason to refuse it, or None.

        A good reply has exactly one array record, with the expected name, names, shapes and dtypes and finite values in
        their ranges, and exactly one metric record with a positive, bounded `num-examples` and finite values.
        """
        content = reply.content
        wanted = [self.record] if self.record else []
        if list(content.array_records) != wanted:
            return f"array records {sorted(content.array_records)}, expected {wanted}"
        if len(content.metric_records) != 1:
            return f"metric records {sorted(content.metric_records)}, expected one"
        try:
            arrays = {name: array.numpy() for key in wanted for name, array in content.array_records[key].items()}
        except (ValueError, TypeError, EOFError, OSError) as error:
            return f"arrays cannot be read: {error}"
        metrics: dict[str, Any] = dict(next(iter(content.metric_records.values())))
        return (
            arrays_refused(arrays, self.shapes, ranges=self.record != "rates")
            or metrics_refused(metrics)
            or _numbers_refused(metrics, self.numbers, self.shares)
        )


def arrays_refused(
    arrays: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[tuple[int, ...], str]], ranges: bool = True
) -> str | None:
    """Check names, shapes, dtypes and values of arrays; return what is wrong, or None.

    Without `ranges` any finite number will do, as for rates, which have the names of what they move.
    """
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
        if ranges and value.size and (value.min() < low or value.max() > high):
            return f"{name}: values from {value.min()} to {value.max()}, allowed are {low} to {high}"
    return None


def metrics_refused(metrics: Mapping[str, object]) -> str | None:
    """Check that metrics are finite and `num-examples` positive; return what is wrong, or None."""
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


def _numbers_refused(
    metrics: Mapping[str, Any], numbers: Sequence[str], shares: Sequence[tuple[str, str]]
) -> str | None:
    """Check the metrics that the server counts with; a missing or an impossible one must not end the run."""
    for name in numbers:
        value = metrics.get(name)
        if isinstance(value, list) or value is None or value < 0:
            return f"metric {name} = {value!r}, expected a number, 0 or more"
    for part, whole in shares:
        if metrics[part] > metrics[whole]:
            return f"metric {part} = {metrics[part]}, more than {whole} = {metrics[whole]}"
    for name, value in metrics.items():
        if name.endswith("weight_mean") and (isinstance(value, list) or not 0 <= value <= 1):
            return f"metric {name} = {value!r}, expected a number from 0 to 1"
        if name.endswith("weight_histogram") and not (
            isinstance(value, list) and len(value) == WEIGHT_BINS and all(type(n) is int and n >= 0 for n in value)
        ):
            return f"metric {name}: expected {WEIGHT_BINS} counts"
    return None
