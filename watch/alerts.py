"""Alerts by rule: which devices need attention, since when, and the moments at which that begins and ends.

The rules are those of `alerts.toml`, read by `fedtta.watch.rules`. `evaluate` is a pure function of the fleet;
`AlertLog` remembers what has been announced.

Images held by the guard are counted from the telemetry's history: a reading says how many images a device has predicted
and whether its guard holds, so what was predicted between two readings that both say so counts as held. Images before
the first such reading and after the last do not count.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from typing import Any

from prometheus_client.core import Metric

from fedtta.messages.exposition import Named
from fedtta.messages.record import NAME_LENGTH, printable
from fedtta.messages.replies import Telemetry
from fedtta.server.report.markup import counted, data_table, instant
from fedtta.server.report.markup import section as page_section
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.rules import Rules

MODEL_REFUSED, CERTIFICATE = "model-refused-by", "certificate-days"
MEGABYTE = 1_000_000
DAY = 86_400  # seconds


@dataclass(frozen=True)
class Alert:
    """A rule that does not hold.

    Parameters
    ----------
    rule : str
        Its key in `alerts.toml`.
    device : str
        Name; empty for a rule about a model or the SuperLink.
    value, limit : float or bool
        What was found, and the rule's limit.
    since : float
        Seconds since 1970.
    words : str
        What was found, for people.
    model : str
        Version of the model that the alert is about; empty: none.
    """

    rule: str
    device: str
    value: float
    limit: float
    since: float
    words: str
    model: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what makes two alerts the same one at different moments."""
        return self.rule, self.device, self.model

    @property
    def line(self) -> str:
        """Return the alert as a line of text."""
        about = self.device or (f"model {self.model}" if self.model else "SuperLink")
        return f"{about}: {self.rule}: {self.words}, since {instant(_iso(self.since))}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {
            "rule": self.rule, "device": self.device, "model": self.model, "value": self.value, "limit": self.limit,
            "since": _iso(self.since), "text": self.line,
        }  # fmt: skip


@dataclass(frozen=True)
class Held:
    """Images predicted in an unbroken series of readings in which the guard holds.

    Parameters
    ----------
    samples : int
        At least so many.
    since : float
        Time of the first reading, in seconds since 1970.
    """

    samples: int
    since: float


class HeldSamples:
    """Images that were predicted while a device's guard held, from the readings of its telemetry."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Held] = {}
        self._last: dict[Hashable, tuple[float, int]] = {}  # time of the last reading, and its predictions

    def note(self, key: Hashable, telemetry: Telemetry, at: float) -> None:
        """Take note of a device's reading; one may come twice, and one that is older than the last changes nothing.

        Parameters
        ----------
        key : hashable
            `FleetDevice.key` of the device.
        telemetry : Telemetry
        at : float
            Seconds since 1970.
        """
        before = self._held.get(key)
        latest, last = self._last.get(key, (at, 0))
        if at < latest:  # not a device that has started again: the history was read later than the fleet
            return
        self._last[key] = at, telemetry.predictions
        if not telemetry.holding:
            self._held.pop(key, None)
        elif before is None:
            self._held[key] = Held(0, at)
        else:  # a device that has started again counts from 0
            new = telemetry.predictions - last if telemetry.predictions >= last else telemetry.predictions
            self._held[key] = replace(before, samples=before.samples + new)

    def get(self, key: Hashable) -> Held | None:
        """Return what is known of a device; None if its guard does not hold."""
        return self._held.get(key)


@dataclass(frozen=True)
class _Subject:
    """A device at a moment."""

    device: FleetDevice
    now: float
    held: Held | None

    def of_telemetry(self, read: Callable[[Telemetry], float | None]) -> float | None:
        return None if self.device.telemetry is None else read(self.device.telemetry)

    @property
    def silent_minutes(self) -> float | None:
        return None if self.device.last_seen is None else (self.now - self.device.last_seen) / 60


@dataclass(frozen=True)
class _Rule:
    """A rule about one device.

    Parameters
    ----------
    key : str
    value : callable
        What is compared with the limit; None: unknown.
    breaks : callable
        Value, limit → whether the rule does not hold.
    words : str
        With "{value}" and "{limit}".
    since : callable
        When it began, as far as a single look can tell.
    """

    key: str
    value: Callable[[_Subject], float | None]
    breaks: Callable[[float, float], bool]
    words: str
    since: Callable[[_Subject], float | None] = lambda one: one.device.telemetry_at

    def alert(self, one: _Subject, limit: float) -> Alert | None:
        """Return the alert of a device, if there is one; a limit of 0 or false switches the rule off."""
        value = self.value(one) if limit else None
        if value is None or not self.breaks(value, limit):
            return None
        words = self.words.format(value=value, limit=limit)
        name = printable(one.device.name, NAME_LENGTH)
        return Alert(self.key, name, value, limit, _first(self.since(one), one.now), words)


def _free_megabytes(telemetry: Telemetry) -> float | None:
    """Return the free space; None where a device does not know its disk."""
    return telemetry.disk_free / MEGABYTE if telemetry.knows_disk else None


RULES = (
    _Rule(
        "silent-minutes", lambda one: one.silent_minutes, operator.ge,
        "silent for {value:.0f} minutes (limit {limit:g})", lambda one: one.device.last_seen,
    ),
    _Rule(
        "guard-holding-samples", lambda one: None if one.held is None else one.held.samples, operator.ge,
        "the guard has held for {value:,} images or more (limit {limit:,})",
        lambda one: None if one.held is None else one.held.since,
    ),
    _Rule(
        "least-estimated-accuracy", lambda one: one.of_telemetry(lambda told: told.estimated_accuracy), operator.lt,
        "estimated accuracy {value:.3f} (at least {limit:g})",
    ),
    _Rule(
        "most-drift", lambda one: one.of_telemetry(lambda told: told.drift), operator.gt,
        "drift {value:.3f} (at most {limit:g})",
    ),
    _Rule(
        "least-disk-mb", lambda one: one.of_telemetry(_free_megabytes), operator.lt,
        "{value:,.0f} MB free (at least {limit:,})",
    ),
    _Rule(
        "saving-fails", lambda one: one.of_telemetry(lambda told: told.saving_fails), operator.and_,
        "the adapter's state cannot be saved",
    ),
)  # fmt: skip


def evaluate(
    rules: Rules,
    fleet: Iterable[FleetDevice],
    now: float,
    held: HeldSamples | None = None,
    certificate_ends: float | None = None,
) -> list[Alert]:
    """Return the alerts of a fleet, in the order of its devices; those about models and the SuperLink come last.

    Parameters
    ----------
    rules : Rules
    fleet : iterable of FleetDevice
        Telemetry counts until there is newer one; a device that has never connected is not silent.
    now : float
        Seconds since 1970.
    held : HeldSamples, optional
        Images held by the guards; without it, that rule finds nothing.
    certificate_ends : float, optional
        When the SuperLink's certificate ends, in seconds since 1970; None: not known.
    """
    devices = list(fleet)
    found = []
    for device in devices:
        subject, limits = _Subject(device, now, held.get(device.key) if held else None), rules.limits_of(device.name)
        found += [rule.alert(subject, limits[rule.key]) for rule in RULES]
    found += [*_refused_models(rules.model_refused_by, devices, now), _ending(rules, certificate_ends, now)]
    return [one for one in found if one is not None]


def _ending(rules: Rules, ends: float | None, now: float) -> Alert | None:
    """Return the alert about the SuperLink's certificate, if it ends soon: then no device connects any more."""
    limit = rules.certificate_days
    if ends is None or not limit or (left := (ends - now) / DAY) >= limit:
        return None
    words = f"its certificate {'is' if left > 0 else 'was'} valid until {instant(_iso(ends))} (limit {limit:g} days)"
    return Alert(CERTIFICATE, "", left, limit, now, words)


def _refused_models(limit: int, devices: Sequence[FleetDevice], now: float) -> list[Alert]:
    """Return an alert for each model that at least `limit` devices, if not 0, say they have refused last."""
    refusals: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for one in devices:
        if one.telemetry is not None and (version := one.telemetry.refused.partition(": ")[0]):
            refusals[version][printable(one.name, NAME_LENGTH)] = _first(one.telemetry_at, now)
    return [
        Alert(
            MODEL_REFUSED, "", len(by), limit, min(by.values()),
            f"refused by {counted(len(by), 'device')} (limit {limit}): {', '.join(sorted(by)[:10])}", version,
        )
        for version, by in sorted(refusals.items())
        if limit and len(by) >= limit
    ]  # fmt: skip


@dataclass(frozen=True)
class Change:
    """An alert that begins or ends.

    Parameters
    ----------
    alert : Alert
    begins : bool
    at : float
        Seconds since 1970.
    """

    alert: Alert
    begins: bool
    at: float

    @property
    def line(self) -> str:
        """Return the change as a line of text."""
        return f"alert {'begins' if self.begins else 'ends'}: {self.alert.line}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        state = "begins" if self.begins else "ends"
        return {"state": state, "at": _iso(self.at), **self.alert.as_json()}


class AlertLog:
    """The alerts that have begun and not ended; each is announced once when it begins and once when it ends."""

    def __init__(self) -> None:
        self._current: dict[tuple[str, str, str], Alert] = {}

    @property
    def current(self) -> list[Alert]:
        """Return the alerts that last, in the order in which they began."""
        return list(self._current.values())

    def update(self, alerts: Iterable[Alert], now: float) -> list[Change]:
        """Replace the alerts by those of `now`, but for the moment they began, and return what begins and ends."""
        found = {one.key: one for one in alerts}
        ended = [Change(one, False, now) for key, one in self._current.items() if key not in found]
        begun = [Change(one, True, now) for key, one in found.items() if key not in self._current]
        lasting = {key: replace(found[key], since=one.since) for key, one in self._current.items() if key in found}
        self._current = lasting | {change.alert.key: change.alert for change in begun}
        return [*ended, *begun]


def section(alerts: Sequence[Alert]) -> str:
    """Return the section "Alerts" of a page, as HTML."""
    if not alerts:
        return page_section("alerts", '<h2>Alerts</h2><p class="good">No alert.</p>')
    rows = [
        [
            escape(one.device) or "–", escape(one.rule), escape(instant(_iso(one.since))),
            escape(f"model {one.model}: {one.words}" if one.model else one.words),
        ]
        for one in alerts
    ]  # fmt: skip
    table = data_table(["device", "rule", "since", "what was found"], rows, "Rules that do not hold.", "text cards")
    return page_section("alerts", f"<h2>Alerts</h2>{table}")


#: The labels are `rule` and `device`; that of a rule about a model or the SuperLink is empty.
METRIC: Named[None] = Named("fedtta_alerts", "1 while a rule does not hold.", lambda _: 1)
LABELS = ("rule", "device")


def metric(alerts: Iterable[Alert]) -> Metric:
    """Return the metric of the alerts that last."""
    return METRIC.of([(labels, None) for labels in sorted({(one.rule, one.device) for one in alerts})], LABELS)


def _iso(moment: float) -> str:
    """Return a time in ISO 8601, UTC, to the second."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _first(moment: float | None, now: float) -> float:
    return now if moment is None else moment
