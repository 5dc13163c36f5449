"""One validator for every reply of every strategy: nothing that fails here reaches an average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from models.finite import array_finite
from server.report import WEIGHT_BINS
from tta.statistics import STATISTICS

#: Endings of names of variances, which are not negative.
VARIANCES = ("running_var", "variance")


@dataclass(frozen=True)
class Limits:
    """What a run lets clients claim and change.

    Parameters
    ----------
    norm : float
        How far (l2 norm over all numbers that are not whole) a reply may be from what was sent; 0: no limit.
    examples : sequence of int
        The largest `num-examples` of each reply, in their order; empty: no limit.
    """

    norm: float = 0.0
    examples: Sequence[int] = ()


NO_LIMITS = Limits()


class Expectation(Protocol):
    """What replies of a round are checked against."""

    def refusals(self, replies: Sequence[Message], limits: Limits = NO_LIMITS) -> list[str | None]:
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
    start : mapping
        What was sent; a reply's distance from it is limited. None: there is no such thing.
    """

    record: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    numbers: Sequence[str] = ()
    shares: Sequence[tuple[str, str]] = ()
    start: Mapping[str, NDArray[Any]] | None = None

    @classmethod
    def like(cls, record: str, arrays: Mapping[str, NDArray[Any]], **metrics: Any) -> Expected:
        """Expect what was sent, `arrays`, with other values, and `numbers` and `shares` as given."""
        shapes = {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}
        return cls(record, shapes, start=arrays, **metrics)

    def refusals(self, replies: Sequence[Message], limits: Limits = NO_LIMITS) -> list[str | None]:
        """Check replies one by one, on several threads: for large ones it is adding up; see `Expectation`."""
        most: Sequence[int | None] = limits.examples or [None] * len(replies)
        if len(most) != len(replies):
            raise ValueError(f"{len(most)} limits of examples for {len(replies)} replies")
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self.why_refused, replies, repeat(limits.norm), most))

    def why_refused(self, reply: Message, norm: float = 0.0, examples: int | None = None) -> str | None:
        """Check a reply and return the reason to refuse it, or None; see `Limits` for the limits.

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
            or metrics_refused(metrics, examples)
            or _numbers_refused(metrics, self.numbers, self.shares)
            or distance_refused(arrays, self.start, norm)
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
        if value.shape != shape or value.dtype != np.dtype(dtype):
            return f"{name}: {value.dtype}{list(value.shape)}, expected {dtype}{list(shape)}"
        if not array_finite(value):
            return f"{name}: values that are not finite"
        low, high = (0.0, STATISTICS[name].high) if name in STATISTICS else (-math.inf, math.inf)
        if name.endswith(VARIANCES):
            low = 0.0
        bounded = (low, high) != (-math.inf, math.inf)
        if ranges and bounded and value.size and (value.min() < low or value.max() > high):
            return f"{name}: values from {value.min()} to {value.max()}, allowed are {low} to {high}"
    return None


def distance_refused(
    arrays: Mapping[str, NDArray[Any]], start: Mapping[str, NDArray[Any]] | None, bound: float
) -> str | None:
    """Check ‖arrays - start‖₂ over all float arrays against a bound (0: none); return what is wrong, or None."""
    if not bound or start is None:
        return None
    floats = [name for name, value in start.items() if value.dtype.kind == "f"]
    differences = (arrays[name].astype(np.float64) - start[name] for name in floats)
    with np.errstate(over="ignore"):  # an infinite norm is beyond any bound
        norm = math.sqrt(sum(float(np.vdot(one, one)) for one in differences))
    return f"{norm:.6g} from what was sent (l2 norm), allowed is at most {bound:g}" if norm > bound else None


def metrics_refused(metrics: Mapping[str, object], most: int | None = None) -> str | None:
    """Check that metrics are finite and `num-examples` positive and at most `most`; return what is wrong, or None."""
    examples = metrics.get("num-examples")
    if isinstance(examples, bool) or not isinstance(examples, int | float):
        return f"num-examples = {examples!r}, expected a number"
    highest = math.inf if most is None else most
    if not (0 < examples <= highest and math.isfinite(examples)):
        return f"num-examples = {examples}, allowed is a finite number, more than 0, at most {highest}"
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
