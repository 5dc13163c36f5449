"""Alerts: every rule at its limit, what is announced, and what the guard has held, from readings alone."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from fedtta.messages.replies import Telemetry
from fedtta.watch.alerting import Alerting
from fedtta.watch.alerts import RULES, Alert, AlertLog, HeldSamples, evaluate, metric, section
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.rules import Limits, Rules
from tests.report.runs import Elements

NOW = 1_800_000_000.0
DAY = 86_400
OFF = Rules(silent_minutes=0, guard_holding_samples=0, saving_fails=False, model_refused_by=0, certificate_days=0)


def device(name: str = "a", *, seen: float | None = NOW, at: float = NOW - 30, **telemetry: Any) -> FleetDevice:
    known = Telemetry(name="a", **telemetry) if telemetry else None
    return FleetDevice(name, 1, "online", seen, known, at if known else None)


def held(samples: int) -> HeldSamples:
    found = HeldSamples()
    for predictions in (10, 10 + samples):
        found.note(("a", 1), Telemetry(name="a", holding=True, predictions=predictions), NOW - 99)
    return found


@pytest.mark.parametrize(
    ("rules", "quiet", "loud", "value", "words"),
    [
        (
            {"silent_minutes": 10}, device(seen=NOW - 599), device(seen=NOW - 600), 10.0,
            "a: silent-minutes: silent for 10 minutes (limit 10), since 2027-01-15 07:50 UTC",
        ),
        (
            {"least_estimated_accuracy": 0.6}, device(estimated_accuracy=0.6), device(estimated_accuracy=0.599), 0.599,
            "a: least-estimated-accuracy: estimated accuracy 0.599 (at least 0.6), since 2027-01-15 07:59 UTC",
        ),
        (
            {"most_drift": 0.25}, device(drift=0.25), device(drift=0.251), 0.251,
            "a: most-drift: drift 0.251 (at most 0.25), since 2027-01-15 07:59 UTC",
        ),
        (
            {"least_disk_mb": 500}, device(disk_free=500_000_000), device(disk_used=9, disk_free=0), 0.0,
            "a: least-disk-mb: 0 MB free (at least 500), since 2027-01-15 07:59 UTC",
        ),
        (
            {"saving_fails": True}, device(saving_fails=False, uptime=1.0), device(saving_fails=True), True,
            "a: saving-fails: the adapter's state cannot be saved, since 2027-01-15 07:59 UTC",
        ),
    ],
)  # fmt: skip
def test_a_rule_about_a_device_at_its_limit(
    rules: dict[str, Any], quiet: FleetDevice, loud: FleetDevice, value: float, words: str
) -> None:
    on, (key,) = replace(OFF, **rules), rules
    assert evaluate(on, [quiet], NOW) == []
    (found,) = evaluate(on, [quiet, loud], NOW)
    assert (found.rule, found.device, found.value, found.limit) == (key.replace("_", "-"), "a", value, rules[key])
    assert found.line == words
    assert evaluate(OFF, [loud], NOW) == []
    never = FleetDevice("b", 2, "registered", None, None, None)
    assert evaluate(on, [never], NOW) == []


def test_the_guard_holds_for_so_many_images() -> None:
    on, one = replace(OFF, guard_holding_samples=1000), device(holding=True)
    assert (
        evaluate(on, [one], NOW, held(999)) == evaluate(on, [one], NOW) == evaluate(OFF, [one], NOW, held(1000)) == []
    )
    (found,) = evaluate(on, [one], NOW, held(1000))
    assert (found.value, found.limit, found.since) == (1000, 1000, NOW - 99)
    assert "held for 1,000 images or more (limit 1,000)" in found.line


def test_a_model_that_several_devices_refuse() -> None:
    on = replace(OFF, model_refused_by=3)
    refusals = [device(name, refused=f"{model}: {why}") for name, model, why in (
        ("c", "run/2", "accuracy 0.1"), ("b", "run/2", "one class"), ("d", "run/1", "accuracy: 0.2"),
    )]  # fmt: skip
    assert evaluate(on, [*refusals, device("e", refused="")], NOW) == []
    third = device("a", refused="run/2: x", at=NOW - 60)
    (found,) = evaluate(on, [*refusals, third], NOW)
    assert (found.rule, found.device, found.model, found.value) == ("model-refused-by", "", "run/2", 3)
    assert found.since == NOW - 60
    assert found.line.startswith("model run/2: model-refused-by: refused by 3 devices (limit 3): a, b, c, since")
    assert evaluate(OFF, [*refusals, third], NOW) == []
    assert "refused by 1 device (limit 1): d" in evaluate(replace(OFF, model_refused_by=1), refusals, NOW)[0].line


def test_the_certificate_of_the_superlink_at_its_limit() -> None:
    on = replace(OFF, certificate_days=30)
    assert evaluate(on, [], NOW) == evaluate(on, [], NOW, None, NOW + 30 * DAY) == []
    (soon,) = evaluate(on, [], NOW, None, NOW + 30 * DAY - 60)
    assert (soon.rule, soon.device, soon.model, round(soon.value, 2)) == ("certificate-days", "", "", 30.0)
    words = "SuperLink: certificate-days: its certificate is valid until 2027-02-14 07:59 UTC (limit 30 days)"
    assert soon.line == f"{words}, since 2027-01-15 08:00 UTC"
    (over,) = evaluate(on, [], NOW, None, NOW - 60)
    assert "its certificate was valid until 2027-01-15 07:59 UTC" in over.line
    assert evaluate(OFF, [], NOW, None, NOW - 60) == []


def test_the_certificate_is_asked_for_by_its_rule_alone_and_announced_once() -> None:
    asked: list[float] = []

    def ends() -> float:
        asked.append(NOW)
        return NOW + DAY

    off = Alerting(OFF, lambda: [], lambda _: [], ends, clock=lambda: NOW)
    assert off.look() == asked == []
    on = Alerting(replace(OFF, certificate_days=2), lambda: [], lambda _: [], ends, clock=lambda: NOW)
    assert [one.begins for one in on.look()] == [True]
    assert on.look() == []


def test_an_alert_is_one_line_whatever_a_device_is_called() -> None:
    named = device("a\nb\x1b[2J", drift=0.5, refused="v: x\ny")
    found = evaluate(replace(OFF, most_drift=0.4, model_refused_by=1), [named], NOW)
    assert len(found) == 2
    assert all(one.line.isprintable() for one in found)


def test_every_limit_of_a_device_has_a_rule() -> None:
    assert [rule.key.replace("-", "_") for rule in RULES] == list(Limits.__dataclass_fields__)


def test_limits_of_single_devices() -> None:
    rules = replace(OFF, silent_minutes=10.0, devices=(("b*", {"silent-minutes": 60}), ("b2", {"silent-minutes": 0})))
    fleet = [device(name, seen=NOW - minutes * 60) for name, minutes in (("a", 20), ("b1", 59), ("b2", 999))]
    assert [one.device for one in evaluate(rules, fleet, NOW)] == ["a"]
    assert [one.device for one in evaluate(rules, fleet, NOW + 60)] == ["a", "b1"]


# What the guard has held

Step = tuple[bool, int, bool, bool]  # the guard holds, images, the process starts again, a reading is taken


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.booleans(), st.booleans())))
def test_held_images_are_a_lower_bound_and_exact_if_every_step_is_read(steps: list[Step]) -> None:
    """A device predicts batches, all of them held or none; readings come after some of them."""
    every, some = HeldSamples(), HeldSamples()
    predictions, truth, first = 0, 0, 0
    for moment, (holding, images, restarts, read) in enumerate(steps):
        predictions = images if restarts else predictions + images
        first = images if holding and not truth and not every.get("a") else first
        truth = truth + images if holding else 0
        one = Telemetry(name="a", holding=holding, predictions=predictions)
        every.note("a", one, moment)
        if read:
            some.note("a", one, moment)
            some.note("a", one, moment)  # twice is once
    found = every.get("a")
    assert (found is not None) == (bool(steps) and steps[-1][0])
    seen = [holding for holding, _, _, read in steps if read]
    assert (some.get("a") is not None) == (bool(seen) and seen[-1])
    if found is not None:
        assert found.samples <= truth - first
        assert found.samples == truth - first or any(restarts for _, _, restarts, _ in steps)


def test_a_device_that_starts_again_counts_on() -> None:
    found = HeldSamples()
    for at, predictions in enumerate((100, 150, 30, 40)):
        found.note("a", Telemetry(name="a", holding=True, predictions=predictions), at)
    known = found.get("a")
    assert known is not None
    assert (known.samples, known.since) == (50 + 30 + 10, 0)
    found.note("a", Telemetry(name="a", predictions=50), 9)
    assert found.get("a") is None


def test_a_reading_that_arrives_between_two_looks_at_the_files_is_not_counted_twice() -> None:
    """The fleet was read before it, the history of the device after it."""
    fleet = [device(holding=True, predictions=1_000_000, at=NOW - 60)]
    history = [(NOW - 60 + at, Telemetry(name="a", holding=True, predictions=1_000_000 + at)) for at in (0, 5)]
    alerting = Alerting(replace(OFF, guard_holding_samples=100), lambda: fleet, lambda _: history, clock=lambda: NOW)
    assert alerting.look() == []
    known = alerting._held.get(fleet[0].key)
    assert known is not None
    assert known.samples == 5


# What is announced

KEYS = list(itertools.product("rs", ("a", ""), ("", "v")))
SUBSETS = st.integers(0, 2 ** len(KEYS) - 1).map(lambda bits: {key for i, key in enumerate(KEYS) if bits >> i & 1})


def alert(key: tuple[str, str, str], value: float = 1.0, since: float = NOW) -> Alert:
    rule, name, model = key
    return Alert(rule, name, value, 0.0, since, "w", model)


@given(st.lists(SUBSETS))
def test_every_alert_is_announced_once_when_it_begins_and_once_when_it_ends(
    looks: list[set[tuple[str, str, str]]],
) -> None:
    log, before = AlertLog(), set[tuple[str, str, str]]()
    begun: dict[tuple[str, str, str], int] = {}
    for moment, keys in enumerate(looks):
        changes = log.update([alert(key, moment, moment) for key in sorted(keys)], moment)
        told = Counter((change.begins, change.alert.key) for change in changes)
        assert told == Counter([(True, key) for key in keys - before] + [(False, key) for key in before - keys])
        begun = {key: begun.get(key, moment) if key in before else moment for key in keys}
        assert {one.key: one.since for one in log.current} == begun
        assert all(one.value == moment for one in log.current)
        assert all(change.at == moment for change in changes)
        assert all(change.begins or change.alert.since < moment for change in changes)
        before = keys


def test_a_look_uses_the_history_of_a_device_that_holds_already() -> None:
    readings = [(NOW - 300 + at, Telemetry(name="a", holding=at > 0, predictions=600 * at)) for at in range(4)]
    fleet = [device(holding=True, predictions=1800, at=NOW - 297), device("b", holding=True, predictions=7)]
    asked: list[str] = []

    def history(one: FleetDevice) -> list[tuple[float, Telemetry]]:
        asked.append(one.name)
        return readings if one.name == "a" else []

    alerting = Alerting(replace(OFF, guard_holding_samples=1200), lambda: fleet, history, clock=lambda: NOW)
    (begun,) = alerting.look()
    assert (begun.begins, begun.alert.value, begun.alert.since) == (True, 1200, NOW - 299)
    assert alerting.look() == []
    assert asked == ["a", "b"]
    fleet[0] = device(predictions=2400, at=NOW - 10)
    (ended,) = alerting.look()
    assert (ended.begins, ended.alert.device) == (False, "a")
    assert json.loads(json.dumps(ended.as_json())) == {
        "state": "ends", "at": "2027-01-15T08:00:00+00:00", "rule": "guard-holding-samples", "device": "a", "model": "",
        "value": 1200, "limit": 1200, "since": "2027-01-15T07:55:01+00:00",
        "text": "a: guard-holding-samples: the guard has held for 1,200 images or more (limit 1,200), "
        "since 2027-01-15 07:55 UTC",
    }  # fmt: skip
    assert alerting.current == []


@pytest.mark.parametrize("holding", [True, False])
def test_devices_with_one_name_are_told_apart(holding: bool) -> None:
    """One enrolled again under its old name, the old one not removed: their numbers of images are not one series."""
    fleet: list[FleetDevice] = []
    alerting = Alerting(replace(OFF, guard_holding_samples=500), lambda: fleet, lambda one: [], clock=lambda: NOW)
    old = FleetDevice("a", 2, "offline", NOW, Telemetry(name="a", holding=holding, predictions=10), NOW - 30)
    found = []
    for predictions in (1000, 1300, 1499, 1500):
        fleet[:] = [device(holding=True, predictions=predictions), old]
        found.append([(one.begins, one.alert.value) for one in alerting.look()])
    assert found == [[], [], [], [(True, 500)]]


# What is shown


def test_the_section_and_the_metric() -> None:
    assert "No alert" in Elements(section([])).text
    shown = section([alert(("r<", "a<b>", "")), alert(("model-refused-by", "", "v<i>"))])
    words = Elements(shown).text
    assert "a<b>" in words
    assert "model v<i>: w" in words
    assert shown.startswith('<section id="alerts">')

    class Collector:
        def collect(self) -> list[Any]:
            return [
                metric([alert(("r", 'a"', "")), alert(("r", "b", "")), alert(("m", "", "v")), alert(("m", "", "w"))])
            ]

    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type]
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert lines == [
        'fedtta_alerts{device="",rule="m"} 1.0',
        'fedtta_alerts{device="a\\"",rule="r"} 1.0',
        'fedtta_alerts{device="b",rule="r"} 1.0',
    ]
