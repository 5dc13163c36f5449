"""Evaluation metrics, and their means over clients for each method and test distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedtta.server.report.events import WEIGHT_BINS, Evaluation
from fedtta.server.report.results import Results
from fedtta.strategies.limits import capped


def _weight(entry: Evaluation) -> float | None:
    """Mean weight e of the global head; a histogram without a mean counts with the centers of its bins."""
    if entry.weight_mean is not None or not entry.weight_histogram or not any(entry.weight_histogram):
        return entry.weight_mean
    centers = [(position + 0.5) / WEIGHT_BINS for position in range(WEIGHT_BINS)]
    total = sum(count * center for count, center in zip(entry.weight_histogram, centers, strict=True))
    return total / sum(entry.weight_histogram)


@dataclass(frozen=True)
class Metric:
    """A number of each evaluation: its name, its mean and its format.

    Parameters
    ----------
    name : str
        Name of the field in the event ``evaluation``, and prefix of the columns in the CSV file.
    title : str
        Name in tables, with the unit.
    over : "clients" or "samples"
        Whether each client or each sample has the same weight in the mean.
    value : callable, optional
        Value for one evaluation with samples, None where it is unknown. Default: the field `name`.
    scale, digits
        Factor and decimals with which a value is shown.
    best : "highest", "lowest" or None
        Which value of a column is set in bold.
    in_csv : bool
        Whether the CSV file has columns ``name:distribution``.
    """

    name: str
    title: str
    over: Literal["clients", "samples"]
    value: Callable[[Evaluation], float | None] | None = None
    scale: float = 1.0
    digits: int = 2
    best: Literal["highest", "lowest"] | None = None
    in_csv: bool = True

    def of(self, entry: Evaluation) -> float | None:
        """Value for one evaluation; None without samples or where it is unknown."""
        if entry.total == 0:
            return None
        return self.value(entry) if self.value else entry.extra.get(self.name)

    def show(self, value: float | None, digits: int | None = None, missing: str = "–") -> str:
        """Format a value."""
        return missing if value is None else f"{self.scale * value:.{self.digits if digits is None else digits}f}"

    def top(self, values: Iterable[float | None]) -> str | None:
        """Best of some values as shown, so that values that read the same are all the best; None where none is best."""
        numbers = [value for value in values if value is not None]
        if not numbers or self.best is None:
            return None
        return self.show(max(numbers) if self.best == "highest" else min(numbers))


def _accuracy(entry: Evaluation) -> float:
    return entry.correct / entry.total


#: The main table's metric: its columns in the CSV file have no prefix.
ACCURACY = Metric("accuracy", "Accuracy in %", "clients", _accuracy, scale=100, digits=1, best="highest")
#: Every metric of the report. A number that clients add to their evaluations needs one line here.
METRICS = (
    ACCURACY,
    Metric("sample_accuracy", "Accuracy in %", "samples", _accuracy, scale=100, digits=1, best="highest", in_csv=False),
    Metric("weight_mean", "Weight e of the global head", "samples", _weight, in_csv=False),
    Metric(
        "seconds",
        "Time of a prediction in ms, adaptation included",
        "samples",
        lambda entry: None if entry.seconds is None else entry.seconds / entry.total,
        scale=1000,
        in_csv=False,
    ),
)  # the last three are in_csv=False so that the files of earlier versions stay comparable


def percent(value: float | None, digits: int = 1, missing: str = "–") -> str:
    """Format an accuracy (0 to 1) as a percentage, without the sign."""
    return ACCURACY.show(value, digits, missing)


@dataclass(frozen=True)
class Cell:
    """A metric for one method on one distribution.

    Parameters
    ----------
    mean : float
        Mean over clients or samples, as the metric says.
    sd : float
        Population standard deviation over clients; 0 for one client.
    clients : int
        Number of clients with samples.
    """

    mean: float
    sd: float
    clients: int


@dataclass(frozen=True)
class Row:
    """A metric for one method after one training.

    `cells` has one entry for each distribution of the run, None where the method has no value. `average` and
    `average_sd` are the mean and the standard deviation of the cells' means over the distributions (FedTHE's
    "average"); they are None where a cell is, because averages over different distributions do not compare.
    """

    training: str
    method: str
    label: str  # the method, followed by its training if the run has the method after several trainings
    cells: dict[str, Cell | None]
    average: float | None
    average_sd: float | None

    def mean(self, shift: str) -> float | None:
        """Return the mean on one distribution, None where the method has no value."""
        cell = self.cells[shift]
        return cell.mean if cell else None


def table(results: Results, metric: Metric = ACCURACY) -> list[Row]:
    """Return one row for each method and training, in order of first appearance.

    The columns are the distributions on which some client has samples, in order of first appearance.
    """
    groups = by_method(results)
    columns = list(dict.fromkeys(entry.shift for entry in results.evaluations if entry.total > 0))
    labels, share = row_labels(results), float(results.setting("max-share") or 0)
    rows = []
    for pair, shifts in groups.items():
        cells = {shift: _cell(shifts.get(shift, []), metric, share) for shift in columns}
        means = [cell.mean for cell in cells.values() if cell is not None]
        complete = bool(means) and len(means) == len(cells)
        average = statistics.fmean(means) if complete else None
        rows.append(Row(*pair, labels[pair], cells, average, statistics.pstdev(means) if complete else None))
    return rows


#: The row that the others are compared with: the global model, unadapted.
UNADAPTED = "fedavg"


def verdict(rows: Sequence[Row]) -> str:
    """Return on which distributions a method beats the unadapted global model, and on which none does.

    Empty without a row of the unadapted model, or without others.
    """
    base = next((row for row in rows if row.label == UNADAPTED), None)
    others = [row for row in rows if row is not base]
    if base is None or not others:
        return ""
    gains, losses = [], []
    for shift in base.cells:
        reference = base.mean(shift)
        means = [(value, row.label) for row in others if (value := row.mean(shift)) is not None]
        if reference is None or not means:
            continue
        value, label = max(means)
        gain = 100 * (value - reference)
        if round(gain, 1) > 0:
            gains.append(f"{shift} ({label} {gain:+.1f} points)")
        else:
            losses.append(shift)
    parts = [f"Better than {base.label}, the unadapted global model, on {', '.join(gains)}."] if gains else []
    if losses:
        parts.append(f"No method is better than {base.label} on {', '.join(losses)}: adaptation does not pay there.")
    return " ".join(parts)


def by_method(results: Results) -> dict[tuple[str, str], dict[str, list[Evaluation]]]:
    """Group the evaluations: (training, method) → distribution → one evaluation for each client."""
    groups: dict[tuple[str, str], dict[str, list[Evaluation]]] = {}
    for entry in results.evaluations:
        groups.setdefault((entry.training, entry.method), {}).setdefault(entry.shift, []).append(entry)
    return groups


def row_labels(results: Results) -> dict[tuple[str, str], str]:
    """Name each (training, method): the method alone where it is unique."""
    pairs = list(by_method(results))
    methods = [method for _, method in pairs]
    return {pair: pair[1] if methods.count(pair[1]) == 1 else f"{pair[1]} ({pair[0]})" for pair in pairs}


def _cell(evaluations: list[Evaluation], metric: Metric, share: float) -> Cell | None:
    values, weights = [], []
    for entry in evaluations:
        value = metric.of(entry)
        if value is not None:
            values.append(value)
            weights.append(1 if metric.over == "clients" else entry.total)
    if not values:
        return None
    weights = capped(weights, share)  # the number of samples is a client's own word
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    return Cell(mean, statistics.pstdev(values), len(values))


@dataclass(frozen=True)
class Estimated:
    """An estimate of accuracy without labels for one method on one distribution: means over clients.

    Parameters
    ----------
    accuracy, low, high : float
        The estimate and the ends of its interval.
    error : float
        Its distance from a client's accuracy.
    """

    accuracy: float
    low: float
    high: float
    error: float


def estimated(entries: Iterable[Evaluation]) -> dict[str, Estimated]:
    """Return the estimates for one method on one distribution by name, those that every client with samples has."""
    known = [(entry, entry.estimates or {}) for entry in entries if entry.total]
    names = [name for name in (known[0][1] if known else {}) if all(name in found for _, found in known)]
    return {name: _estimated([(_accuracy(entry), *found[name]) for entry, found in known]) for name in names}


def _estimated(clients: Sequence[tuple[float, ...]]) -> Estimated:
    """Return the means of an estimate, given accuracy, estimate, low and high of each client."""
    _, estimate, low, high = (statistics.fmean(column) for column in zip(*clients, strict=True))
    return Estimated(estimate, low, high, statistics.fmean(abs(one[1] - one[0]) for one in clients))


#: An accuracy so many standard deviations from the median client's is an outlier.
DEVIATIONS = 3.5
#: Among fewer clients there is no outlier.
FEW = 5


def outlying(counts: Mapping[int, tuple[int, int]]) -> list[int]:
    """Return the clients whose accuracy is far from that of most clients.

    The standard deviation is that of the clients, by their median distance from the median accuracy, and at least what
    chance alone gives for the client's number of samples, at an accuracy of the median client's.

    Parameters
    ----------
    counts : mapping
        Client → (right predictions, samples); a client without samples is left out.
    """
    known = {client: (correct / total, total) for client, (correct, total) in counts.items() if total}
    if len(known) < FEW:
        return []
    middle = statistics.median(accuracy for accuracy, _ in known.values())
    spread = 1.4826 * statistics.median(abs(accuracy - middle) for accuracy, _ in known.values())

    def far(accuracy: float, total: int) -> bool:
        chance = math.sqrt(max(middle * (1 - middle), 1 / total) / total)
        return abs(accuracy - middle) > DEVIATIONS * max(spread, chance)

    return [client for client, one in known.items() if far(*one)]


def client_outliers(results: Results) -> dict[str, list[int]]:
    """Return label → clients whose accuracy is an outlier on some distribution, in partition order."""
    found, labels = {}, row_labels(results)
    for pair, shifts in by_method(results).items():
        counts = [{one.partition: (one.correct, one.total) for one in entries} for entries in shifts.values()]
        found[labels[pair]] = sorted({client for one in counts for client in outlying(one)})
    return {label: clients for label, clients in found.items() if clients}


def client_accuracy(results: Results) -> dict[str, dict[int, float]]:
    """Return label → client → accuracy, as the mean over the distributions on which the client has samples."""
    found, labels = {}, row_labels(results)
    for pair, shifts in by_method(results).items():
        values: dict[int, list[float]] = {}
        for entry in (entry for entries in shifts.values() for entry in entries if entry.total):
            values.setdefault(entry.partition, []).append(_accuracy(entry))
        found[labels[pair]] = {client: statistics.fmean(values[client]) for client in sorted(values)}
    return {label: values for label, values in found.items() if values}
