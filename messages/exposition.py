"""Telemetry of devices in Prometheus' data model: the same names at an agent and at the operator's server.

Every metric has the label `device`. A metric that a device does not know is left out for it. `Named` also describes
the metrics of the server (`fedtta.watch.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from fedtta.messages.replies import LATENCY_BOUNDS, Telemetry

Subject = TypeVar("Subject")
Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily] | type[InfoMetricFamily]
#: Family → what Prometheus appends to the name.
ENDINGS: dict[Family, str] = {CounterMetricFamily: "_total", InfoMetricFamily: "_info"}


@dataclass(frozen=True)
class Named(Generic[Subject]):
    """A number of some object as a metric.

    Parameters
    ----------
    name : str
        Without the ending "_total" of a counter and "_info" of an info.
    about : str
    value : callable
        Object → number, truth value, None if it is unknown, or label value → number for a metric with a label. For a
        histogram, (upper bound → count up to it, sum); for an info, label → text.
    family : type
        The type of the metric.
    label : str
        A label in addition to those that say which object it is; empty: none.
    """

    name: str
    about: str
    value: Callable[[Subject], Any]
    family: Family = GaugeMetricFamily
    label: str = ""

    @property
    def exposed(self) -> str:
        """Name in the exposition; a histogram has several, with this beginning."""
        return self.name + ENDINGS.get(self.family, "")

    def of(self, subjects: Iterable[tuple[Sequence[str], Subject]], labels: Sequence[str]) -> Metric:
        """Return the metric of all objects, each given with the values of `labels`, which differ between objects."""
        found: Any = self.family(self.name, self.about, labels=[*labels, *([self.label] if self.label else [])])
        for names, subject in subjects:
            value = self.value(subject)
            if self.label:
                for label, number in sorted(value.items()):
                    found.add_metric([*names, label], float(number))
            elif isinstance(value, tuple):
                counts, total = value
                found.add_metric([*names], list(counts.items()), total)
            elif value is not None:
                found.add_metric([*names], value if isinstance(value, dict) else float(value))
        return found


def histogram(bounds: Sequence[float], counts: Sequence[int], total: float) -> tuple[dict[str, int], float]:
    """Return a histogram as `Named.value` gives it.

    Parameters
    ----------
    bounds : sequence of float
        Upper bounds of the intervals; one more has none.
    counts : sequence of int
        Of each interval.
    total : float
        Sum of what was counted.
    """
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return dict(zip(names, accumulate(counts), strict=True)), total


def _listed(software: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(software.items()))


SECONDS = "fedtta_predict_seconds"
METRICS: tuple[Named[Telemetry], ...] = (
    Named(
        "fedtta_device", "1, with model, adapter, its choice and software as labels.",
        lambda one: {
            "model": one.model, "adapter": one.adapter, "choice": one.choice, "software": _listed(one.software),
        }, InfoMetricFamily,
    ),
    Named(
        SECONDS, "Seconds from a request's arrival to its answer.",
        lambda one: histogram(LATENCY_BOUNDS, one.latency, one.latency_sum), HistogramMetricFamily,
    ),
    Named("fedtta_uptime_seconds", "Seconds since the agent began.", lambda one: one.uptime or None),
    Named("fedtta_predictions", "Images predicted.", lambda one: one.predictions, CounterMetricFamily),
    Named("fedtta_refused_requests", "Prediction requests refused.", lambda one: one.refusals, CounterMetricFamily),
    Named("fedtta_head_weight", "Mean weight e of the global head over the last images.", lambda one: one.weight),
    Named(
        "fedtta_estimated_accuracy",
        "Accuracy of the unadapted network over the last images, estimated without labels.",
        lambda one: one.estimated_accuracy,
    ),
    Named(
        "fedtta_drift",
        "Total variation distance between the classes predicted lately and the usual ones.",
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
    Named(
        "fedtta_disk_used_bytes", "Bytes of the state directory.",
        lambda one: one.disk_used if one.knows_disk else None,
    ),
    Named(
        "fedtta_disk_free_bytes", "Bytes free on its disk.", lambda one: one.disk_free if one.knows_disk else None
    ),
    Named("fedtta_memory_bytes", "Resident bytes of the agent.", lambda one: one.memory or None),
    Named("fedtta_data_samples", "Files of the device's own data.", lambda one: one.data_samples),
    Named("fedtta_data_skipped", "Those of them that cannot be used.", lambda one: one.data_skipped),
)  # fmt: skip


def metrics(devices: Iterable[Telemetry]) -> list[Metric]:
    """Return all metrics of devices with different names, for a collector of prometheus-client."""
    known = [((one.name,), one) for one in devices]
    return [one.of(known, ("device",)) for one in METRICS]
