"""What a reply of a test-time round must look like.

The server does not know what an adapter shares, so the first replies of a cell settle it: they are taken as most of
them are, and whoever sends something else is refused, then and later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from server.validation import NO_LIMITS, Limits, arrays_refused, metrics_refused

#: record → name → (shape, dtype).
Signature = dict[str, dict[str, tuple[tuple[int, ...], str]]]
#: Metrics that must be there: numbers, not negative.
NUMBERS = ("seconds", "context-bytes", "corruption")


@dataclass
class AdaptReplies:
    """Checks replies of one cell: method and collaboration.

    Parameters
    ----------
    classes, corruptions : int
        How many there are.
    records : sequence of str
        Array records that a reply of the next round must have, and no others.
    signature : dict
        What is agreed on so far.
    """

    classes: int
    corruptions: int
    records: Sequence[str] = ("shared",)
    signature: Signature = field(default_factory=dict)

    def why_refused(self, reply: Message, examples: int | None = None) -> str | None:
        """Return the reason to refuse a reply, or None; it may not claim more `examples` than these."""
        found = set(reply.content.array_records)
        if found != set(self.records):
            return f"array records {sorted(found)}, expected {sorted(self.records)}"
        if len(reply.content.metric_records) != 1:
            return f"metric records {sorted(reply.content.metric_records)}, expected one"
        try:
            records = unpack(reply)
        except (ValueError, TypeError, EOFError, OSError) as error:
            return f"arrays cannot be read: {error}"
        for record, arrays in records.items():
            shapes = self.signature.get(record, signature_of({record: arrays})[record])
            if reason := arrays_refused(arrays, shapes):
                return f"{record}: {reason}"
        if "start" in records and signature_of(records)["start"] != signature_of(records)["shared"]:
            return "start: other names, shapes or dtypes than shared"
        metrics: dict[str, Any] = dict(next(iter(reply.content.metric_records.values())))
        return metrics_refused(metrics, examples) or self._counts_refused(metrics)

    def refusals(self, replies: Sequence[Message], limits: Limits = NO_LIMITS) -> list[str | None]:
        """Check replies one by one, then against each other where nothing is agreed on yet (of a tie, the first).

        What clients share at test time has no norm to be held against: they adapt to streams of their own.
        """
        most: Sequence[int | None] = limits.examples or [None] * len(replies)
        reasons = [self.why_refused(reply, one) for reply, one in zip(replies, most, strict=True)]
        self._agree([reply for reply, reason in zip(replies, reasons, strict=True) if reason is None])
        return [
            reason or self._odd(signature_of(unpack(reply))) for reply, reason in zip(replies, reasons, strict=True)
        ]

    def _agree(self, replies: Sequence[Message]) -> None:
        """Settle what is not agreed on yet, as most replies have it."""
        found = [signature_of(unpack(reply)) for reply in replies]
        for record in self.records:
            kinds = Counter(repr(one[record]) for one in found if record in one)
            if kinds and record not in self.signature:
                usual = kinds.most_common(1)[0][0]
                self.signature[record] = next(one[record] for one in found if repr(one.get(record)) == usual)

    def _odd(self, found: Signature) -> str | None:
        odd = [record for record, shapes in found.items() if shapes != self.signature[record]]
        return f"{', '.join(odd)}: other names, shapes or dtypes than most clients sent" if odd else None

    def _counts_refused(self, metrics: dict[str, Any]) -> str | None:
        """Check what right and wrong predictions are counted with."""
        for name in NUMBERS:
            value = metrics.get(name)
            if isinstance(value, list) or value is None or value < 0:
                return f"metric {name} = {value!r}, expected a number, 0 or more"
        if metrics["corruption"] >= self.corruptions:
            return f"metric corruption = {metrics['corruption']}, there are {self.corruptions}"
        counts = {name: metrics.get(name) for name in ("correct", "total")}
        for name, value in counts.items():
            if not (isinstance(value, list) and len(value) == self.classes and all(type(n) is int for n in value)):
                return f"metric {name}: expected {self.classes} counts"
        right, total = np.array(counts["correct"]), np.array(counts["total"])
        if (right < 0).any() or (right > total).any() or total.sum() != metrics["num-examples"]:
            return "metrics correct, total and num-examples do not fit each other"
        return None


def unpack(reply: Message) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the array records of a reply as numpy arrays."""
    records = reply.content.array_records
    return {name: {key: array.numpy() for key, array in record.items()} for name, record in records.items()}


def signature_of(records: dict[str, dict[str, NDArray[Any]]]) -> Signature:
    """Return names, shapes and dtypes of records, in name order."""
    return {
        record: {name: (arrays[name].shape, str(arrays[name].dtype)) for name in sorted(arrays)}
        for record, arrays in records.items()
    }
