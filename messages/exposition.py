"""Telemetry of devices in Prometheus' data model: the same names at an agent and at the operator's server.

Every metric has the label `device`. A metric that a device does not know is left out for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry


@dataclass(frozen=True)
class Named:
    """A number of `Telemetry` as a metric.

    Parameters
    ----------
    name : str
        Without the ending "_total" of a counter.
    about : str
    value : callable
        Telemetry → number, truth value, None if it is unknown, or label value → number for a metric with a label.
    family : type
        `CounterMetricFamily` or `GaugeMetricFamily`.
    label : str
        A label in addition to "device"; empty: none.
    """

    name: str
    about: str
    value: Callable[[Telemetry], Any]
    family: type[CounterMetricFamily] | type[GaugeMetricFamily] = GaugeMetricFamily
    label: str = ""

    def of(self, devices: Iterable[Telemetry]) -> Metric:
        """Return the metric of all devices."""
        found = self.family(self.name, self.about, labels=["device", *([self.label] if self.label else [])])
        for one in devices:
            value = self.value(one)
            if self.label:
                for label, number in sorted(value.items()):
                    found.add_metric([one.name, label], float(number))
            elif value is not None:
                found.add_metric([one.name], float(value))
        return found


METRICS = (
    Named("fedtta_uptime_seconds", "Seconds since the agent began.", lambda one: one.uptime),
    Named("fedtta_predictions", "Images predicted.", lambda one: one.predictions, CounterMetricFamily),
    Named("fedtta_refused_requests", "Requests refused.", lambda one: one.refusals, CounterMetricFamily),
    Named("fedtta_head_weight", "Mean weight e of the global head over the last images.", lambda one: one.weight),
    Named(
        "fedtta_estimated_accuracy",
        "Accuracy over the last images, estimated without labels.",
        lambda one: one.estimated_accuracy,
    ),
    Named(
        "fedtta_drift",
        "Total variation distance between the classes predicted lately and those at the model's evaluation.",
        lambda one: one.drift,
    ),
    Named("fedtta_guard_holding", "1 while predictions are those of the unadapted model.", lambda one: one.holding),
    Named(
        "fedtta_guard_events", "Times that the guard has acted.", lambda one: one.guard_events, CounterMetricFamily,
        "kind",
    ),
    Named("fedtta_adapter_samples", "Images that the adapter has seen.", lambda one: one.samples),
    Named("fedtta_unsaved_samples", "Those of them that no snapshot covers.", lambda one: one.unsaved_samples),
    Named("fedtta_saving_fails", "1 while the adapter's state cannot be saved.", lambda one: one.saving_fails),
    Named("fedtta_waiting_model", "1 while a model is tried or waits for approval.", lambda one: one.candidate != ""),
    Named("fedtta_disk_used_bytes", "Bytes of the state directory.", lambda one: one.disk_used),
    Named("fedtta_disk_free_bytes", "Bytes free on its disk.", lambda one: one.disk_free),
    Named("fedtta_memory_bytes", "Resident bytes of the agent.", lambda one: one.memory),
    Named("fedtta_data_samples", "Files of the device's own data.", lambda one: one.data_samples),
    Named("fedtta_data_skipped", "Those of them that cannot be used.", lambda one: one.data_skipped),
)  # fmt: skip
SECONDS = "fedtta_predict_seconds"
INFO = "fedtta_device"


def metrics(devices: Iterable[Telemetry]) -> list[Metric]:
    """Return all metrics of devices with different names, for a collector of prometheus-client."""
    known = list(devices)
    return [_info(known), _seconds(known), *(one.of(known) for one in METRICS)]


def _info(devices: Iterable[Telemetry]) -> InfoMetricFamily:
    found = InfoMetricFamily(INFO, "Model, adapter and software.", labels=["device"])
    for one in devices:
        about = {"model": one.model, "adapter": one.adapter, "software": _listed(one.software)}
        found.add_metric([one.name], about)
    return found


def _listed(software: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(software.items()))


def _seconds(devices: Iterable[Telemetry]) -> HistogramMetricFamily:
    bounds = [*(f"{bound:g}" for bound in LATENCY_BOUNDS), "+Inf"]
    found = HistogramMetricFamily(SECONDS, "Seconds from a request's arrival to its answer.", labels=["device"])
    for one in devices:
        found.add_metric([one.name], list(zip(bounds, accumulate(one.latency), strict=True)), one.latency_sum)
    return found
