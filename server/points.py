"""The numbers of a run that trackers have: which event has which, under which names, the same in all trackers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedtta.server.events import Event
from fedtta.server.report.events import Evaluation, RunInfo, parse_event
from fedtta.server.report.results import Results
from fedtta.server.report.scores import METRICS, table
from fedtta.settings import Settings


@dataclass(frozen=True)
class Series:
    """Numbers of one kind of event.

    Parameters
    ----------
    name : str
        With fields of the event in braces; the numbers are called `<name>/<number>`.
    numbers : mapping
        Name of a number → field of the event. A list counts with its length, a mapping with each of its values.
    step : str
        Field with the step; empty: there is one point.
    """

    name: str
    numbers: Mapping[str, str]
    step: str = ""


TRAFFIC = {"seconds": "wall_seconds", "bytes_up": "bytes_up", "bytes_down": "bytes_down", "clients": "replied"}
#: Event → its numbers. `tested` and the accuracy of `adapt_round` are means that `Means` adds.
SERIES = {
    "round": Series(
        "train/{training}",
        {
            "loss": "train_loss",
            "validation_accuracy": "validation_accuracy",
            "personal_validation_accuracy": "personal_validation_accuracy",
            "bytes_up_float32": "bytes_up_float32",
            "trained_accuracy": "trained_accuracy",
            "decoded_accuracy": "decoded_accuracy",
            **TRAFFIC,
        },
        step="round",
    ),
    "rates_round": Series(
        "rates/{training}/{variant}", {"loss": "loss", "accuracy": "accuracy", **TRAFFIC}, step="round"
    ),
    "rates": Series("learned_rates/{training}/{variant}", {"": "rates"}),
    "adapt_round": Series("adapt/{method}/{collaboration}", {"accuracy": "accuracy", **TRAFFIC}, step="round"),
    "tested": Series("test/{training}", {"": "means"}),
    "privacy": Series("privacy", {"epsilon": "epsilon"}),
}


@dataclass(frozen=True)
class Point:
    """Numbers of one step of a series.

    Parameters
    ----------
    series : str
    step : int or None
        None in a series with one point.
    numbers : dict
        Full name → value.
    at : float
        Seconds since the epoch.
    """

    series: str
    step: int | None
    numbers: dict[str, float]
    at: float


class Means:
    """Adds to the events those with means over clients: of each method and test distribution, as in the report."""

    def __init__(self, settings: Settings) -> None:
        self._run = RunInfo("", dict(settings.flat()), {}, "")
        self._evaluations: list[Evaluation] = []
        self._correct = self._total = 0

    def __call__(self, event: Event) -> Iterator[Event]:
        """Yield the event, and what follows from it and those before."""
        kind = event["event"]
        if kind == "evaluation" and isinstance(found := parse_event(event), Evaluation):
            self._evaluations.append(found)
        elif kind == "adapted":
            self._correct, self._total = self._correct + sum(event["correct"]), self._total + sum(event["total"])
        elif kind == "adapt_round":
            event = {**event, "accuracy": self._correct / self._total if self._total else None}
            self._correct = self._total = 0
        yield event
        if kind == "leak_check" and self._evaluations:
            yield {**event, "event": "tested", "means": self._tested()}
            self._evaluations = []

    def _tested(self) -> dict[str, float]:
        """Return `<method>/<distribution>/<metric>` → mean."""
        results = Results(run=self._run, evaluations=self._evaluations)
        return {
            f"{row.method}/{shift}/{metric.name}": cell.mean
            for metric in METRICS
            for row in table(results, metric)
            for shift, cell in row.cells.items()
            if cell is not None
        }


def point_of(event: Event) -> Point | None:
    """Return the numbers of an event; None for events without any."""
    series = SERIES.get(event["event"])
    if series is None:
        return None
    name, numbers = _plain(series.name.format_map(event)), dict[str, float]()
    for number, key in series.numbers.items():
        value = event.get(key)
        value = float(len(value)) if isinstance(value, list) else value
        found = value if isinstance(value, Mapping) else {number: value}
        numbers |= {f"{name}/{_plain(one)}": float(each) for one, each in found.items() if each is not None}
    return Point(name, int(event[series.step]) if series.step else None, numbers, event["at"]) if numbers else None


def _plain(name: str) -> str:
    """Return a name of characters that all trackers allow: `atp[adapt=params]` is `atp_adapt_params_`."""
    return re.sub(r"[^\w./ -]", "_", name)
