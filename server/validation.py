"""Validation of replies: one that fails here is refused by node and reason, and reaches no average.

The types and ranges of single fields are part of the replies (`fedtta.messages.replies`) and have been checked when a
reply was read. What remains are the arrays, which fields fit together, and what the run lets a client claim and change.
Each kind of round has a check, for every strategy: of each reply alone when it comes, and of all together at the end.
Whatever a check raises refuses the reply that made it do so.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedtta.messages.arrays import Arrays, layout_of
from fedtta.messages.record import MOST, printable
from fedtta.messages.replies import (
    Adapted,
    Evaluated,
    EvaluationResult,
    RefinedRates,
    Reply,
    Summarized,
    Trained,
    Validated,
)
from fedtta.messages.transport import unreadable
from fedtta.models.arrays import array_finite
from fedtta.server.report.events import Evaluation
from fedtta.tta.estimates import ESTIMATES
from fedtta.tta.statistics import STATISTICS

#: name → (shape, dtype as numpy spells it).
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
#: Name → the least and the largest value that an array may have.
Bounds = Mapping[str, tuple[float, float]]
#: Endings of names of variances, which are not negative.
VARIANCES = ("running_var", "variance")
#: A number of a reply may be so many times the largest of the median reply, or of 1. One reply with weights of 1e30
#: would make every client diverge; what honest clients send differs by far less, also when they learn fast.
SCALE = 1000.0
#: A metric becomes a field of the event of its evaluation, and must be none of those that it has.
RESERVED = frozenset(field.name for field in fields(Evaluation))


class Check(ABC):
    """What the replies of a round are checked against.

    Attributes
    ----------
    reply : type of Reply
        The kind of reply that is expected.
    """

    reply: ClassVar[type[Reply]]

    def alone(self, reply: Reply, examples: int, norm: float = 0.0, labelled: bool = True) -> tuple[str | None, float]:
        """Return the reason to refuse a reply, whatever the others are, or None; and its largest number.

        Parameters
        ----------
        examples : int
            The largest `num_examples` of the client.
        norm : float
            How far (l2 norm over all float arrays) a reply may be from what was sent; 0: no bound.
        labelled : bool
            Whether the client has labels.
        """
        try:
            reason = self._why_refused(reply, examples, norm, labelled)
            return (printable(reason), 0.0) if reason else (None, largest_number(reply))
        except Exception as error:
            return printable(unreadable(f"a reply of kind {self.reply.kind}", error)), 0.0

    def among(self, replies: Sequence[Reply], largest: Sequence[float]) -> list[str | None]:
        """Return for each reply that is good alone the reason to refuse it among the others, or None.

        Parameters
        ----------
        largest : sequence of float
            The largest number of each reply, from `alone`; compared with those of the others (`SCALE`).
        """
        usual = sorted(largest)
        limit = SCALE * max(1.0, usual[(len(usual) - 1) // 2] if usual else 0.0)
        return [_too_large(one, limit) for one in largest]

    def _why_refused(self, reply: Reply, examples: int, norm: float, labelled: bool) -> str | None:
        if type(reply) is not self.reply:
            return f"a reply of kind {reply.kind!r}, expected {self.reply.kind!r}"
        if reply.num_examples > examples:
            return f"num-examples = {reply.num_examples}, allowed is at most {examples}"
        return self.why_refused(reply, norm) if labelled else self.why_refused_unlabelled(reply)

    @abstractmethod
    def why_refused(self, reply: Any, norm: float = 0.0) -> str | None:
        """Return the reason to refuse a reply of the expected kind, or None."""

    def why_refused_unlabelled(self, reply: Any) -> str | None:
        """Return the reason to refuse a reply of a client without labels, or None."""
        return f"a reply of kind {reply.kind!r} needs labels, which this client does not have"


@dataclass(frozen=True)
class TrainCheck(Check):
    """Checks a round of local training.

    Parameters
    ----------
    sent : dict
        The arrays that were sent and come back trained.
    personal_head : bool
        Whether clients train a personal head, and report its validation accuracy.
    metrics : sequence of str
        Optional metrics that the aggregation needs, e.g. "global-loss".
    """

    reply = Trained

    sent: Arrays
    personal_head: bool = False
    metrics: Sequence[str] = ()

    def why_refused(self, reply: Trained, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`."""
        needed = [*self.metrics, *(["personal-validation-correct"] if self.personal_head else [])]
        return (
            arrays_refused(reply.arrays, shapes_of(self.sent))
            or _missing(reply, needed)
            or _validation_refused(reply)
            or _rounding_refused(reply)
            or distance_refused(reply.arrays, self.sent, norm)
        )


@dataclass(frozen=True)
class SummarizeCheck(Check):
    """Checks the statistics round.

    Parameters
    ----------
    shapes : mapping
        Of the statistics that are asked for.
    bounds : mapping
        Ranges that are narrower than those of `fedtta.tta.statistics.STATISTICS`.
    """

    reply = Summarized

    shapes: Shapes
    bounds: Bounds = field(default_factory=dict)

    def why_refused(self, reply: Summarized, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`; statistics have no distance from what was sent."""
        return arrays_refused(reply.statistics, self.shapes, self.bounds) or _validation_refused(reply)


@dataclass(frozen=True)
class RatesCheck(Check):
    """Checks a round that refines rates; `sent` are the rates that were sent."""

    reply = RefinedRates

    sent: Arrays

    def why_refused(self, reply: RefinedRates, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`; a rate may have any sign, also that of a variance."""
        return (
            arrays_refused(reply.rates, shapes_of(self.sent), dict.fromkeys(self.sent, ANY))
            or _share_refused("correct", reply.correct, "num-examples", reply.num_examples)
            or distance_refused(reply.rates, self.sent, norm)
        )


@dataclass(frozen=True)
class EvaluateCheck(Check):
    """Checks an evaluation.

    Parameters
    ----------
    cells : sequence of (str, str)
        Label and test distribution of every result that is asked for.
    leaks : bool
        Whether test samples that were trained on are no error, as with splits that are redrawn in every round.
        Otherwise a reply that reports some is refused, unless most replies do: splits are drawn by the same code
        everywhere, so a leak is either at most clients or a single client's mistake or lie.
    """

    reply = Evaluated

    cells: Sequence[tuple[str, str]]
    leaks: bool = True

    def among(self, replies: Sequence[Reply], largest: Sequence[float]) -> list[str | None]:
        """See `Check.among`."""
        reasons = super().among(replies, largest)
        usable = [one for one, reason in zip(replies, reasons, strict=True) if reason is None]
        checked = [one for one in usable if isinstance(one, Evaluated) and one.checked]
        if self.leaks or 2 * sum(one.leaked > 0 for one in checked) > len(checked):
            return reasons
        return [reason or _leak_refused(reply) for reason, reply in zip(reasons, replies, strict=True)]

    def why_refused(self, reply: Evaluated, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`."""
        found = Counter((result.label, result.shift) for result in reply.results)
        if found != Counter(self.cells):
            missing, unknown = sorted(set(self.cells) - set(found)), sorted(set(found) - set(self.cells))
            return f"missing results {missing}, unknown results {unknown}" if missing or unknown else "doubled results"
        reasons = (_result_refused(result) for result in reply.results)
        return _share_refused("leaked", reply.leaked, "checked", reply.checked) or next(filter(None, reasons), None)

    def why_refused_unlabelled(self, reply: Evaluated) -> str | None:
        """See `Check.why_refused_unlabelled`: there is nothing to count right predictions with."""
        found = sorted((result.label, result.shift) for result in reply.results)
        return f"unknown results {found}" if found else None


@dataclass
class AdaptCheck(Check):
    """Checks the test-time rounds of one cell: a method under a collaboration.

    The server does not know what an adapter shares. The majority of a cell's first replies decides names, shapes and
    dtypes (the first of a tie); a reply that differs is refused, then and later.

    Parameters
    ----------
    classes, corruptions : int
        How many there are.
    records : sequence of str
        Fields of `Adapted` that hold the arrays of the next round's replies; all others must be empty.
    signature : dict
        Field → name → (shape, dtype), as agreed so far.
    """

    reply = Adapted

    classes: int
    corruptions: int
    records: Sequence[str] = ("shared",)
    signature: dict[str, dict[str, tuple[tuple[int, ...], str]]] = field(default_factory=dict)

    def among(self, replies: Sequence[Reply], largest: Sequence[float]) -> list[str | None]:
        """See `Check.among`."""
        reasons = super().among(replies, largest)
        self._agree([reply for reply, reason in zip(replies, reasons, strict=True) if reason is None])
        return [reason or self._odd(reply) for reply, reason in zip(replies, reasons, strict=True)]

    def why_refused(self, reply: Adapted, norm: float = 0.0) -> str | None:
        """See `Check.why_refused`; there is no bound on the norm, since clients adapt to streams of their own."""
        return self._arrays_refused(reply) or self._counts_refused(reply)

    def why_refused_unlabelled(self, reply: Adapted) -> str | None:
        """See `Check.why_refused_unlabelled`: without labels nothing is counted by class."""
        if reason := self._arrays_refused(reply) or self._lengths_refused(reply):
            return reason
        return "correct or total is not 0, which needs labels" if any(reply.total) or any(reply.correct) else None

    def _arrays_refused(self, reply: Adapted) -> str | None:
        arrays = arrays_of(reply)
        if set(arrays) != set(self.records):
            return f"arrays {sorted(arrays)}, expected {sorted(self.records)}"
        for record, named in arrays.items():
            if reason := arrays_refused(named, self.signature.get(record, shapes_of(named))):
                return f"{record}: {reason}"
        if "start" in arrays and shapes_of(arrays["start"]) != shapes_of(arrays["shared"]):
            return "start: other names, shapes or dtypes than shared"
        return None

    def _agree(self, replies: Sequence[Reply]) -> None:
        """Decide what is not agreed on yet, by the majority of these replies."""
        for record in self.records:
            if record in self.signature or not replies:
                continue
            kinds = [shapes_of(arrays_of(reply)[record]) for reply in replies]
            votes = Counter(map(repr, kinds))
            self.signature[record] = kinds[list(map(repr, kinds)).index(votes.most_common(1)[0][0])]

    def _odd(self, reply: Reply) -> str | None:
        odd = [name for name, arrays in arrays_of(reply).items() if shapes_of(arrays) != self.signature[name]]
        return f"{', '.join(odd)}: other names, shapes or dtypes than most clients sent" if odd else None

    def _lengths_refused(self, reply: Adapted) -> str | None:
        if reply.corruption >= self.corruptions:
            return f"corruption = {reply.corruption}, there are {self.corruptions}"
        for name, counts in (("correct", reply.correct), ("total", reply.total)):
            if len(counts) != self.classes:
                return f"{name}: expected {self.classes} counts"
        return None

    def _counts_refused(self, reply: Adapted) -> str | None:
        if reason := self._lengths_refused(reply):
            return reason
        pairs = zip(reply.correct, reply.total, strict=True)
        if any(correct > total for correct, total in pairs) or sum(reply.total) != reply.num_examples:
            return "correct, total and num-examples do not fit each other"
        return None


def arrays_of(reply: Reply) -> dict[str, Arrays]:
    """Return all arrays of a reply by field, without fields that are empty."""
    return reply.to_record().arrays


def shapes_of(arrays: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return names, shapes and dtypes of arrays, in name order."""
    return {name: (shape, str(dtype)) for name, (shape, dtype) in sorted(layout_of(arrays).items())}


#: Any finite number.
ANY = (-math.inf, math.inf)


def arrays_refused(arrays: Arrays, shapes: Shapes, bounds: Bounds | None = None) -> str | None:
    """Check names, shapes, dtypes and values of arrays; return what is wrong, or None.

    Parameters
    ----------
    bounds : mapping, optional
        Name → range, in place of the one that follows from the name.
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
        low, high = (bounds or {}).get(name) or _range(name, value)
        if (low, high) != ANY and value.size and (value.min() < low or value.max() > high):
            return f"{name}: values from {value.min()} to {value.max()}, allowed are {low} to {high}"
    return None


def _range(name: str, value: NDArray[Any]) -> tuple[float, float]:
    """Return the range of an array: of the statistic of its name, not negative for a variance, exact for integers."""
    if name in STATISTICS:
        return STATISTICS[name].low, STATISTICS[name].high
    if value.dtype.kind in "iu":
        return -MOST, MOST
    return (0.0, math.inf) if name.endswith(VARIANCES) else ANY


def largest_number(reply: Reply) -> float:
    """Return the largest magnitude in the float arrays of a reply."""
    values = (value for arrays in arrays_of(reply).values() for value in arrays.values())
    floats = (value for value in values if value.size and value.dtype.kind == "f")
    return max((max(float(value.max()), -float(value.min())) for value in floats), default=0.0)


def _too_large(largest: float, limit: float) -> str | None:
    if largest <= limit:
        return None
    return f"numbers up to {largest:.3g}, allowed are {limit:.3g}: {SCALE:g} times those of the median reply"


def _leak_refused(reply: Reply) -> str | None:
    if not isinstance(reply, Evaluated) or not reply.leaked:
        return None
    return f"leaked = {reply.leaked} of {reply.checked} test samples had been trained on; most clients report none"


def distance_refused(arrays: Arrays, sent: Arrays, bound: float) -> str | None:
    """Check ‖arrays - sent‖₂ over all float arrays against a bound (0: none); return what is wrong, or None."""
    if not bound:
        return None
    floats = [name for name, value in sent.items() if value.dtype.kind == "f"]
    differences = (arrays[name].astype(np.float64) - sent[name] for name in floats)
    with np.errstate(over="ignore"):  # an infinite norm is beyond any bound
        norm = math.sqrt(sum(float(np.vdot(one, one)) for one in differences))
    return f"{norm:.6g} from what was sent (l2 norm), allowed is at most {bound:g}" if norm > bound else None


def _missing(reply: Reply, needed: Iterable[str]) -> str | None:
    absent = [key for key in needed if getattr(reply, key.replace("-", "_")) is None]
    return f"{', '.join(absent)} is missing" if absent else None


def _share_refused(part: str, count: int | None, whole: str, total: int) -> str | None:
    return f"{part} = {count}, more than {whole} = {total}" if count is not None and count > total else None


def _validation_refused(reply: Validated) -> str | None:
    """Check how many validation samples are classified correctly, by either head."""
    total = ("validation-total", reply.validation_total)
    return _share_refused("validation-correct", reply.validation_correct, *total) or _share_refused(
        "personal-validation-correct", reply.personal_validation_correct, *total
    )


def _rounding_refused(reply: Trained) -> str | None:
    """Check how many validation samples are classified correctly after training, before and after rounding."""
    if (reply.trained_correct is None) != (reply.decoded_correct is None):
        return "trained-correct and decoded-correct: allowed are both, or neither"
    total = ("validation-total", reply.validation_total)
    return _share_refused("trained-correct", reply.trained_correct, *total) or _share_refused(
        "decoded-correct", reply.decoded_correct, *total
    )


def _result_refused(result: EvaluationResult) -> str | None:
    """Check the counts of one result, and the names of what else it has."""
    weighted = sum(result.weight_histogram or ())
    reason = _share_refused("correct", result.correct, "total", result.total) or _share_refused(
        "weights in the histogram", weighted, "total", result.total
    )
    if unknown := sorted(set(result.estimates) - set(ESTIMATES)):
        reason = reason or f"unknown estimates {unknown}"
    wrong = result.total - result.correct
    if not 0 <= (count := result.metrics.get("not_finite", 0)) <= wrong:
        reason = reason or f"not_finite = {count:g}, and {wrong} are wrong"
    if odd := sorted(RESERVED & set(result.metrics)):
        reason = reason or f"a metric cannot be called {odd[0]}"
    return f"{result.label}, {result.shift}: {reason}" if reason else None
