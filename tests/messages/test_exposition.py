"""Telemetry as Prometheus reads it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedtta.messages.exposition import METRICS, SECONDS, metrics
from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry


class Fixed:
    def __init__(self, *devices: Telemetry) -> None:
        self.devices = devices

    def collect(self) -> list:
        return metrics(self.devices)


def read(*devices: Telemetry) -> dict[tuple[str, ...], float]:
    """Return (name, label values...) → value, by prometheus-client's own parser of the text."""
    registry = CollectorRegistry()
    registry.register(Fixed(*devices))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_names_follow_prometheus_rules() -> None:
    names = [one.name for one in METRICS]
    assert len(names) == len(set(names))
    for name in names:
        assert re.fullmatch(r"fedtta_[a-z]+(_[a-z]+)*", name)
        assert not name.endswith(("_total", "_info", "_bucket", "_count", "_sum", "_created"))
    for one in METRICS:
        assert one.about.endswith(".")


def test_what_is_unknown_is_left_out() -> None:
    found = read(Telemetry(name="a"), Telemetry(name="b", weight=0.25, drift=0.0, holding=True))
    assert ("fedtta_head_weight", "a") not in found
    assert found["fedtta_head_weight", "b"] == 0.25
    assert found["fedtta_drift", "b"] == 0.0
    assert found["fedtta_guard_holding", "a"] == 0.0
    assert found["fedtta_guard_holding", "b"] == 1.0
    found = read(Telemetry(name="a"), Telemetry(name="b", uptime=0.5, disk_used=1, memory=2))  # a disk may be full
    names = ("uptime_seconds", "disk_used_bytes", "disk_free_bytes", "memory_bytes")
    assert [found[f"fedtta_{name}", "b"] for name in names] == [0.5, 1, 0, 2]
    assert not {(f"fedtta_{name}", "a") for name in names} & set(found)


def test_hostile_texts_stay_in_their_labels() -> None:
    found = read(Telemetry(name="a", model='x"} 1\nfedtta_uptime_seconds{device="b'.replace("\n", "\\n")))
    assert ("fedtta_uptime_seconds", "b") not in found
    assert ("fedtta_predictions_total", "a") in found


@given(st.lists(st.integers(0, 1000), min_size=len(LATENCY_BOUNDS) + 1, max_size=len(LATENCY_BOUNDS) + 1))
def test_the_histogram_counts_every_request_once(counts: list[int]) -> None:
    found = read(Telemetry(name="a", latency=counts, latency_sum=2.5, predictions=7, guard_events={"noise": 3}))
    bounds = [*LATENCY_BOUNDS, float("inf")]
    buckets = {float(key[2]): value for key, value in found.items() if key[0] == f"{SECONDS}_bucket"}
    assert buckets == {bound: sum(counts[: i + 1]) for i, bound in enumerate(bounds)}
    assert found[f"{SECONDS}_count", "a"] == sum(counts)
    assert found[f"{SECONDS}_sum", "a"] == 2.5
    assert found["fedtta_predictions_total", "a"] == 7
    assert found["fedtta_guard_events_total", "a", "noise"] == 3
