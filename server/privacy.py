"""Privacy settings of a run: what they can be combined with, the ε that is spent, and the ranges of noisy means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Reply, Summarized, Trained
from fedtta.messages.requests import RefineRates, Request, Summarize, Train
from fedtta.privacy.gaussian import Privacy, epsilon
from fedtta.server.events import Event
from fedtta.server.nodes import cohorts
from fedtta.server.report.journal import read_lines
from fedtta.server.validation import VARIANCES
from fedtta.settings import Settings, SettingsError, exactly
from fedtta.strategies import AGGREGATIONS
from fedtta.tta.statistics import STATISTICS

LEAST = 3  # clients of a secure sum: with two each learns the other's reply
#: Event that ends a round of replies with noise → what it releases.
RELEASES = {"round": "model", "statistics": "statistics", "rates_round": "rates"}
#: Request → what its reply releases.
RELEASED_BY: dict[type[Request], str] = {Train: "model", Summarize: "statistics", RefineRates: "rates"}


def check_privacy(settings: Settings, trainings: Sequence[Settings], sources: int) -> None:
    """Refuse what cannot be combined with secure aggregation or differential privacy.

    Parameters
    ----------
    trainings : sequence of Settings
        Those of the run's trainings.
    sources : int
        Clients that train.

    Raises
    ------
    SettingsError
        The message says what, and why.
    """
    privacy = Privacy.parse(settings.differential_privacy)
    if not (settings.secure_aggregation or privacy.mechanisms):
        return
    key = "secure-aggregation" if settings.secure_aggregation else "differential-privacy"
    if settings.collaborations:
        raise SettingsError(f"{key}: allowed without collaborations, since each client gets a mixture of its own")
    for one in trainings:
        rule = AGGREGATIONS[one.aggregation]
        if settings.secure_aggregation and not rule.from_mean:
            fitting = ", ".join(name for name, other in AGGREGATIONS.items() if other.from_mean)
            raise SettingsError(
                f"{key}: aggregation = {one.aggregation!r} needs each client's reply, and only their mean is known; "
                f"allowed are {fitting}"
            )
        if rule.client_metrics:
            raise SettingsError(f"{key}: aggregation = {one.aggregation!r} needs each client's loss, which is hidden")
    if settings.secure_aggregation and settings.update_format != "float32":
        raise SettingsError(
            f"{key}: update-format = {settings.update_format!r}; allowed is 'float32', since each number takes 64 bits "
            "under masks"
        )
    noisy = [what for what in ("model", "rates") if what in privacy.mechanisms]
    if settings.update_norm_bound and noisy and not settings.secure_aggregation:
        what = " and ".join(noisy)
        raise SettingsError(
            f"update-norm-bound: not with noise on the {what}, which exceeds it; the clip bounds updates"
        )
    if settings.secure_aggregation:
        asked = {f"clients = {settings.clients}, of which train": sources, **cohorts(settings, sources)}
        for what, number in asked.items():
            if number < LEAST:
                raise SettingsError(f"{key}: {what} {number}; allowed is {LEAST} or more, else a sum tells each reply")


def threshold(settings: Settings, members: int) -> int:
    """Return how many shares give a secret back: the part `secure-threshold` of the members, more than half."""
    return max(math.ceil(exactly(settings.secure_threshold) * members), members // 2 + 1)


def least_replies(settings: Settings, asked: int) -> int:
    """Return how many usable replies a secure sum over `asked` clients needs."""
    return max(LEAST, threshold(settings, asked))


def feasible(reply: Reply) -> Reply:
    """Return a mean reply whose values noise and rounding have not left out of range; what is sent is not changed."""
    if isinstance(reply, Summarized):
        return replace(reply, statistics=feasible_statistics(reply.statistics))
    if isinstance(reply, Trained):
        arrays = {n: np.maximum(value, 0) if n.endswith(VARIANCES) else value for n, value in reply.arrays.items()}
        return replace(reply, arrays=arrays)
    return reply


def feasible_statistics(means: Arrays) -> Arrays:
    """Return means of statistics in their ranges; distributions sum to one."""
    found = {}
    for name, value in means.items():
        found[name] = np.clip(value, STATISTICS[name].low, STATISTICS[name].high)
        if STATISTICS[name].distribution:
            total = found[name].sum()
            found[name] = found[name] / total if total > 0 else np.full_like(value, 1 / value.size)
    return found


class Ledger:
    """A listener that counts what each client has released with noise.

    What a client is asked for counts, whether or not it replied: each attempt at a round has an event `attempt` before
    its requests are sent. Earlier versions wrote none: there the end of a round counts, once.

    Parameters
    ----------
    settings : Settings
    folder : Path, optional
        Of a run that is resumed: what it released before counts, also in rounds that are repeated or were cut short.
    """

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        self.privacy = Privacy.parse(settings.differential_privacy)
        self.releases: dict[int, Counter[str]] = {}
        self._attempted: set[str] = set()
        for events in _earlier(folder) if folder and self.privacy.mechanisms else ():
            self._attempted.clear()
            for event in events:
                self(event)

    def __call__(self, event: Event) -> None:
        """Count an attempt, or the end of a round without any."""
        if event["event"] == "attempt":
            self._attempted.add(event["releases"])
            self._count(event["releases"], event["asked"])
        elif what := RELEASES.get(event["event"]):
            if what not in self._attempted:
                self._count(what, {*event.get("sampled", ()), *event["replied"]})
            self._attempted.discard(what)

    def _count(self, what: str, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self.releases.setdefault(partition, Counter())[what] += 1

    def spent(self) -> dict[str, Any] | None:
        """Return ε of the client that has released most, and what any client has released without noise.

        None without differential privacy.
        """
        found = self.privacy.mechanisms
        if not found:
            return None
        most: tuple[float, Counter[str]] = (0.0, Counter())
        for counts in self.releases.values():
            noises = [found[what].noise for what, times in counts.items() if what in found for _ in range(times)]
            most = max(most, (epsilon(noises, self.privacy.delta), counts), key=lambda one: one[0])
        counts = most[1]
        return {
            "epsilon": most[0],
            "delta": self.privacy.delta,
            "releases": {what: counts[what] for what in found},
            "without_noise": sorted({what for one in self.releases.values() for what in one} - set(found)),
        }


def journals(folder: Path) -> list[Path]:
    """Return the metrics files of a run: its journal and tails that were cut off, then damaged copies."""
    return sorted(folder.glob("metrics*.jsonl"), key=lambda path: (path.match("*.damaged.jsonl"), path))


def spoilers(folder: Path) -> set[str]:
    """Return the names of the clients that have spoilt a secure sum of a run, also of a round that was cut off."""
    return {name for events in _earlier(folder) for event in events for name in event.get("suspects", ())}


def _earlier(folder: Path) -> Iterator[list[Event]]:
    """Yield the events of each metrics file of a run, each event once: a damaged file has copies of what was restored.

    Tails that were cut off are among the files; faulty lines are left out.
    """
    seen: set[str] = set()
    for path in journals(folder):
        new = [line for line in read_lines(path.read_bytes(), None) if not line.fault and line.digest not in seen]
        seen.update(line.digest for line in new)
        yield [line.event for line in new]


def spent_note(spent: dict[str, Any]) -> str:
    """Return a line about what was spent, for the report."""
    releases = ", ".join(f"{what} {times} times" for what, times in spent["releases"].items())
    rest = f"; without noise: {', '.join(spent['without_noise'])}" if spent["without_noise"] else ""
    return (
        f"differential privacy: ε = {spent['epsilon']:.2f} at δ = {spent['delta']:g} for each client ({releases}"
        f"{rest}); accuracies that clients report are not covered"
    )
