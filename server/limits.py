"""Limits on what one client does to the means of a round (`fedtta.strategies.limits`), by kind of round.

They come after validation, which refuses single replies, and before any strategy: a reply is changed as little as the
limits need, and counts. Rules that are Byzantine-robust themselves get replies as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, ClassVar, Self

import numpy as np

from fedtta.messages.arrays import Arrays, layout_of
from fedtta.messages.replies import Evaluated, Identity
from fedtta.messages.store import overlaid
from fedtta.server.checkpoints import STRATEGY, Records
from fedtta.settings import Settings, exactly
from fedtta.strategies import AGGREGATIONS
from fedtta.strategies.arrays import RUNNING_STATISTICS, Float
from fedtta.strategies.limits import LEAST, capped, clip, forward
from fedtta.tta.statistics import STATISTICS

#: Rounds whose distances count in the median distance of training, this one included.
WINDOW = 5
#: Record of a checkpoint with the distances of earlier rounds; it belongs to a stage, as the state of its strategy.
RECORD = f"{STRATEGY}-distances"


@dataclass(frozen=True)
class Limited:
    """A reply as it counts, and in what that differs from what was sent; empty if it does not."""

    reply: Any
    reason: str = ""

    def changed(self, reason: str, **fields: Any) -> Limited:
        """Return it with other fields of the reply, for one more reason."""
        return Limited(replace(self.reply, **fields), "; ".join(filter(None, (self.reason, reason))))


@dataclass
class Limits(ABC):
    """The limits of one kind of round.

    Parameters
    ----------
    share : float
        See `capped`; 0: none.
    factor : float
        See `clip`; 0: none.

    Attributes
    ----------
    arrays : str
        The field of the replies that is clipped.
    """

    arrays: ClassVar[str]

    share: float
    factor: float

    @classmethod
    def of(cls, settings: Settings, **more: Any) -> Self:
        """Return the limits that the settings ask for; none where the aggregation is robust, or replies are hidden."""
        off = AGGREGATIONS[settings.aggregation].byzantine_robust or settings.secure_aggregation
        return cls(0.0 if off else settings.max_share, 0.0 if off else settings.clip_factor, **more)

    def __call__(self, replies: Sequence[Any]) -> list[Limited]:
        """Return the replies of a round within the limits, in the order given."""
        limited = [Limited(reply) for reply in replies]
        for i, count in enumerate(capped([one.num_examples for one in replies], self.share)):
            if count < (claimed := replies[i].num_examples):
                words = f"{claimed:,} samples count as {count:,}, {self.share:g} times those of the median client"
                limited[i] = limited[i].changed(words, num_examples=count)
        return self.clipped(limited) if self.factor and replies else limited

    def refused(self, replies: Sequence[Any], identities: Sequence[Identity | None]) -> list[str | None]:
        """Return for each valid reply why it does not count at all, or None."""
        return [None] * len(replies)

    def clipped(self, replies: list[Limited]) -> list[Limited]:
        """Return the replies with their arrays within the limits."""
        for names in self.groups(getattr(replies[0].reply, self.arrays)):
            found = clip(arrays_of(replies, self.arrays), names, self.factor)
            for i in found.far:
                reason = f"{words_of(names, found.distances[i], found.radius)}, pulled back"
                replies[i] = replies[i].changed(reason, **{self.arrays: self.repaired(found.arrays[i], names)})
        return replies

    def repaired(self, arrays: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        """Return arrays of which some were pulled back, with what all such arrays have in common."""
        return arrays

    @abstractmethod
    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """Return the names of the arrays that are clipped, those of one vector together."""


def arrays_of(replies: Sequence[Limited], name: str) -> list[Arrays]:
    """Return the arrays of one field of replies."""
    return [getattr(one.reply, name) for one in replies]


def words_of(names: Sequence[str], distance: float, radius: float) -> str:
    """Return how far a client was from the median, and what is allowed."""
    what = names[0] if len(names) == 1 else f"{len(names)} arrays"
    return f"{what}: {distance:.3g} from the clients' median (l2 norm), allowed is {radius:.3g}"


class Distances:
    """Distances of the clients of a stage's last rounds from their centers.

    With few clients a round, or several attackers among them, the median distance of one round says little.
    """

    def __init__(self, rounds: Iterable[Float] = ()) -> None:
        self._rounds = list(rounds)

    @property
    def all(self) -> Float:
        """Return the distances that count in the next round's median distance."""
        return np.concatenate([np.empty(0), *self._rounds])

    def add(self, distances: Float) -> None:
        """Add those of a round, and forget those that are too old."""
        self._rounds = [*self._rounds, distances][1 - WINDOW :]

    def records(self) -> Records:
        """Return them as a record of a checkpoint; none before the first round."""
        return {RECORD: {str(i): one for i, one in enumerate(self._rounds)}} if self._rounds else {}

    @classmethod
    def load(cls, records: Mapping[str, Arrays]) -> Self:
        """Return what `records` returned; a checkpoint of an earlier version has none."""
        return cls(records.get(RECORD, {}).values())


@dataclass
class TrainLimits(Limits):
    """Limits of trained models.

    What has a gradient is one vector. One that is too far from the median counts as the median, a step against that of
    the other clients as `forward` says, and both with at most the weight of the median client. Each running statistic
    is a vector of its own, and pulled back: honest clients with few classes are far from the others there.

    Parameters
    ----------
    sent : dict
        The arrays that were sent.
    past : Distances
        Of what has a gradient, in the stage's earlier rounds.
    """

    arrays = "arrays"

    sent: Arrays = field(default_factory=dict)
    past: Distances = field(default_factory=Distances)

    def clipped(self, replies: list[Limited]) -> list[Limited]:
        """See `Limits.clipped`."""
        learned = [name for name in _floats(self.sent) if not name.endswith(RUNNING_STATISTICS)]
        return super().clipped(self._steps(replies, learned) if learned else replies)

    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """See `Limits.groups`."""
        return ([name] for name in _floats(self.sent) if name.endswith(RUNNING_STATISTICS))

    def _steps(self, replies: list[Limited], names: Sequence[str]) -> list[Limited]:
        usual = median_low([one.reply.num_examples for one in replies])
        sent = arrays_of(replies, "arrays")
        found = clip(sent, names, self.factor, self.past.all, self.sent)
        self.past.add(found.distances)
        far = {i: words_of(names, found.distances[i], found.radius) for i in found.far}
        near = final = found.arrays
        if len(sent) >= LEAST:
            # pulled back only, one flipped sign times ten of ten clients with a Dirichlet split costs 22 points
            layout = layout_of(sent[0])
            middle = {name: value.astype(layout[name][1]) for name, value in found.center.items()}
            near = [overlaid(one, middle) if i in far else one for i, one in enumerate(sent)]
            final = forward(near, names, self.sent, () if far else found.middle)
            far = {i: f"{reason}, counts as the median" for i, reason in far.items()}
        else:
            far = {i: f"{reason}, pulled back" for i, reason in far.items()}
        for i, (one, now) in enumerate(zip(near, final, strict=True)):
            reasons = [far[i]] if i in far else []
            reasons += ["a step against the other clients'"] if now is not one else []
            if reasons:
                count = min(replies[i].reply.num_examples, usual)
                replies[i] = replies[i].changed("; ".join(reasons), num_examples=count, arrays=now)
        return replies


@dataclass
class StatisticsLimits(Limits):
    """Limits of the statistics that adapters use the mean of, each for itself.

    Parameters
    ----------
    noisy : bool
        Whether clients add noise: what they send of a distribution then has any sum, also one near 0.
    """

    arrays = "statistics"

    noisy: bool = False

    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """See `Limits.groups`."""
        return ([name] for name in arrays if STATISTICS[name].mean)

    def repaired(self, arrays: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        """Scale distributions to sum to one again, which the clients' median of each number does not.

        With noise only their mean is made to sum to one (`feasible_statistics`).
        """
        if self.noisy:
            return arrays
        scaled = {name: arrays[name] / arrays[name].sum() for name in names if STATISTICS[name].distribution}
        return {**arrays, **scaled}


@dataclass
class RatesLimits(Limits):
    """Limits of adaptation rates, which are one vector.

    Of a client whose samples count as fewer, as large a share of these is right.
    """

    arrays = "rates"

    def __call__(self, replies: Sequence[Any]) -> list[Limited]:
        """See `Limits.__call__`."""
        limited = []
        for one, sent in zip(super().__call__(replies), replies, strict=True):
            if (count := one.reply.num_examples) < sent.num_examples:
                one = replace(one, reply=replace(one.reply, correct=sent.correct * count // sent.num_examples))
            limited.append(one)
        return limited

    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """See `Limits.groups`."""
        return [list(arrays)]


@dataclass
class SharedLimits(Limits):
    """Limits of what clients share in test-time rounds.

    The arrays of all layers that are called the same, such as "weight" or "class_mean", are one vector: weights and
    statistics differ in scale, and a single layer may have few numbers.
    """

    arrays = "shared"

    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """See `Limits.groups`."""
        kinds: dict[str, list[str]] = {}
        for name in _floats(arrays):
            kinds.setdefault(name.rpartition(".")[2], []).append(name)
        return kinds.values()


def _floats(arrays: Arrays) -> list[str]:
    return [name for name, (_, dtype) in layout_of(arrays).items() if dtype.kind == "f"]


@dataclass
class EvaluationLimits(Limits):
    """Limits of results: counts are on at most as many samples as a client has for testing.

    On distributions of other images than its own they are on at most `share` times those of the median client. One that
    claims 10¹⁸ right of 10¹⁸ would decide every sum over samples.
    """

    arrays = ""

    @classmethod
    def of(cls, settings: Settings, **more: Any) -> Self:
        """Return the limits that the settings ask for, whatever the aggregation: it has no part in results."""
        return cls(settings.max_share, 0.0, **more)

    def __call__(self, replies: Sequence[Any]) -> list[Limited]:
        """Return the replies as they are: nothing of them is averaged before the tables."""
        return [Limited(reply) for reply in replies]

    def groups(self, arrays: Arrays) -> Iterable[Sequence[str]]:
        """See `Limits.groups`."""
        return []

    def refused(self, replies: Sequence[Any], identities: Sequence[Identity | None]) -> list[str | None]:
        """See `Limits.refused`."""
        totals: dict[tuple[str, str], list[int]] = {}
        for reply in replies:
            for one in reply.results:
                totals.setdefault((one.label, one.shift), []).append(one.total)
        usual = {cell: exactly(self.share) * median_low(found) for cell, found in totals.items()}

        def reason(reply: Evaluated, identity: Identity | None) -> str | None:
            for one in reply.results if identity and self.share else ():
                assert identity is not None
                own = identity.sizes[2]
                if one.total > own and one.total > usual[one.label, one.shift]:
                    return f"{one.label}, {one.shift}: total = {one.total}, the client has {own} test samples"
            return None

        return [reason(reply, identity) for reply, identity in zip(replies, identities, strict=True)]
