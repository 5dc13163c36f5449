"""`drift`: delay and false alarms of the drift test on streams that switch, by kind of values and window.

CIFAR-10 in BRFL's setting with all images: 20 clients, one network trained centrally on their training splits
(`brfl-central`). A client's reference is its validation split. A stream has four parts of equal length: its own test
images, others of them corrupted, other clients' test images, its own again; no image twice. Beside it, its own test
images alone, where every alarm is a false one.

The comparison is the test with the maximum mean discrepancy (MMD) of a sliding window, up to its first alarm. Its
thresholds for each time step are simulated by drawing streams from the reference: Cobb, Van Looveren, Klaise,
Sequential multivariate change detection with calibrated and memoryless false detection rates, AISTATS 2022.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.benchmarks.tables.networks import kept_or_trained, load_federation
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.data import Federation, Rows, stream
from fedtta.models import TwoHead, load_model
from fedtta.settings import SettingsError
from fedtta.tta.drift import DriftTest, outputs

Float = NDArray[np.float64]
FILE = "drift.json"
SEED = 1
SEVERITIES = (1, 2, 3, 4, 5)
WINDOWS = (25, 50, 100)
MMD_WINDOW = 50
VALUES = ("outputs", "features")
SWITCHES = ("original → corrupted", "corrupted → other clients", "other clients → original")
STREAMS = 3000  # simulated for the thresholds of MMD


class Detector(Protocol):
    """Finds changes in one stream after another."""

    def reset(self) -> None:
        """Begin a stream."""

    def update(self, values: Float, /) -> list[int]:
        """Return the positions of alarms in a stream of values [n, d]."""


class Mmd:
    """The MMD of the last `window` samples and a reference, with a Gaussian kernel of the median width.

    Parameters
    ----------
    reference : ndarray [n, d]
        `2 window - 1` of it are left out of the comparison, as in the simulated streams.
    window : int
    false_alarms : float
        The probability of an alarm at each sample of which there has been none before.
    seed : int
    """

    def __init__(self, reference: Float, window: int, false_alarms: float, seed: int) -> None:
        draw, size, kept = np.random.default_rng(seed), len(reference), len(reference) - 2 * window + 1
        if kept < window:
            raise ValueError(f"a reference of {size} samples is too small: at least {3 * window - 1}")
        squares = distances(reference, reference)
        self.window, self._scale = window, float(np.median(squares[np.triu_indices(size, 1)]))
        kernel = np.exp(-squares / self._scale)
        orders = draw.permuted(np.tile(np.arange(size), (STREAMS, 1)), axis=1)
        found = np.stack([mmd(kernel, order[:kept], order[kept:], window) for order in orders])
        self._limits = np.empty(window)
        for step in range(window):
            self._limits[step] = np.quantile(found[:, step], 1 - false_alarms)
            found = found[found[:, step] <= self._limits[step]]
        self._reference = reference[draw.permutation(size)[:kept]]

    def reset(self) -> None:
        """Begin a stream; there is no state."""

    def update(self, values: Float) -> list[int]:
        """Return the position of the first alarm in a stream [n, d], if there is any."""
        rows = np.concatenate((self._reference, values))
        kernel, kept = np.exp(-distances(rows, rows) / self._scale), len(self._reference)
        found = mmd(kernel, np.arange(kept), np.arange(kept, len(rows)), self.window)
        limits = np.append(self._limits, np.full(max(0, len(found) - self.window), self._limits[-1]))[: len(found)]
        return (np.flatnonzero(found > limits)[:1] + self.window - 1).tolist()


def distances(one: Float, other: Float) -> Float:
    """Return the squared distances [n, m] of rows [n, d] and [m, d]."""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    return np.maximum(squares, 0)


def mmd(kernel: Float, reference: NDArray[np.int64], stream: NDArray[np.int64], window: int) -> Float:
    """Return the unbiased squared MMD of a reference and each window of a stream, given as rows of a kernel matrix."""
    n, stops = len(reference), np.arange(window, len(stream) + 1)
    starts = stops - window
    means = kernel[:, reference].mean(1)
    within = (means[reference].sum() * n - n) / (n * (n - 1))
    cross = np.append(0, means[stream].cumsum())
    sums = np.pad(kernel[np.ix_(stream, stream)].cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    inside = sums[stops, stops] - sums[starts, stops] - sums[stops, starts] + sums[starts, starts]
    between = (cross[stops] - cross[starts]) / window
    result: Float = within + (inside - window) / (window * (window - 1)) - 2 * between
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `drift`."""
    parser.add_argument("--orders", type=int, default=2, metavar="N", help="streams of each client (default: 2)")
    parser.add_argument(
        "--false-alarms", type=float, default=0.001, metavar="P", help="stated for a sample (default: %(default)s)"
    )
    parser.add_argument("--networks", type=Path, metavar="DIR", help="keep the trained network here, or find it here")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"of {FILE} (default: benchmarks/results)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, keep the table and print it.

    Raises
    ------
    SettingsError
        An argument is out of range, the data cannot be read, or the kept network was trained with other settings.
    """
    if arguments.orders < 1:
        raise SettingsError(f"--orders {arguments.orders}: allowed is 1 or more")
    if not 0 < arguments.false_alarms <= 0.5:  # as `DriftTest`, which comes after the training
        raise SettingsError(f"--false-alarms {arguments.false_alarms:g}: allowed is above 0, up to 0.5")
    network = read_protocol("brfl-central", ["fraction=1.0"]).networks["central"]
    with tempfile.TemporaryDirectory() as folder:
        path = kept_or_trained(network, SEED, arguments.networks or Path(folder), Path(folder), console)
        model, _ = load_model(path)
    federation = load_federation(network.settings.replace(seed=SEED))
    rows = measure(model, federation, arguments.orders, arguments.false_alarms, console)
    settings = {"false_alarms": arguments.false_alarms, "orders": arguments.orders, "clients": federation.num_clients}
    content = {**provenance(), **settings, "measured": rows}
    write_json(arguments.out / FILE, content)
    console.print(drift_page(content), highlight=False)


def measure(
    model: TwoHead, federation: Federation, orders: int, false_alarms: float, console: Console
) -> list[dict[str, Any]]:
    """Return a row for each kind of values and detector: false alarms, and delays for each severity and switch."""
    alarms: dict[tuple[str, str], dict[int, list[tuple[list[int], int]]]] = {}
    for partition in range(federation.num_clients):
        reference = values_of(model, federation.images.batch(federation.splits[partition].validation, "cpu"))
        streams = [one for order in range(1, orders + 1) for one in streams_of(model, federation, partition, order)]
        for kind in VALUES:
            for name, detector in detectors(reference[kind], false_alarms):
                found = alarms.setdefault((kind, name), {})
                for severity, parts in streams:
                    detector.reset()
                    rows = np.concatenate([part[kind] for part in parts])
                    found.setdefault(severity, []).append((detector.update(rows), len(parts[0][kind])))
        console.print(f"client {partition + 1} of {federation.num_clients}", highlight=False)
    return [
        {"values": kind, "test": name, **summary(found, orders, first_only=name.startswith("MMD"))}
        for (kind, name), found in alarms.items()
    ]


def detectors(reference: Float, false_alarms: float) -> Iterator[tuple[str, Detector]]:
    """Yield name and detector of one kind of values."""
    for window in WINDOWS:
        yield f"ranks, window {window}", DriftTest(reference, false_alarms=false_alarms, window=window, seed=SEED)
    yield f"MMD, window {MMD_WINDOW}", Mmd(reference, MMD_WINDOW, false_alarms, SEED)


def streams_of(
    model: TwoHead, federation: Federation, partition: int, order: int
) -> Iterator[tuple[int, list[dict[str, Float]]]]:
    """Yield severity and parts of a client's streams; severity 0 is its own test split as it is, in one part."""
    own = stream(federation, partition, "original", order)
    values, third = values_of(model, own.x), len(own) // 3
    others = values_of(model, stream(federation, partition, "out_of_client", order).x[:third])
    yield 0, [values]
    for severity in SEVERITIES:
        corrupted = stream(federation, partition, "corrupted", order, severity)
        rows = np.flatnonzero(np.isin(corrupted.index, own.index[third : 2 * third]))
        changed = values_of(model, corrupted.x[torch.from_numpy(rows)])
        first, last = ({kind: rows[part] for kind, rows in values.items()} for part in _thirds(third))
        yield severity, [first, changed, others, last]


def _thirds(size: int) -> tuple[slice, slice]:
    return slice(0, size), slice(2 * size, 3 * size)


@torch.no_grad()
def values_of(model: TwoHead, x: Rows) -> dict[str, Float]:
    """Return the values [n, d] of images by kind, under the network in evaluation mode."""
    model.eval()
    features = torch.cat([model.features(part) for part in x.split(256)])
    probabilities = model.head(features).softmax(1)
    return {"outputs": outputs(probabilities), "features": features.double().numpy()}


def summary(found: dict[int, list[tuple[list[int], int]]], orders: int, first_only: bool) -> dict[str, Any]:
    """Return what alarms tell.

    Parameters
    ----------
    found : dict
        Severity → (positions of alarms, length of a part) of each stream, a client's `orders` streams in a row; the
        unchanged streams have severity 0.
    first_only : bool
        The test stops at its first alarm, so that only the first switch counts.
    """
    switches = SWITCHES[:1] if first_only else SWITCHES
    same, rows, alarms, samples = found[0], [], 0, 0
    of_clients = np.zeros((len(same) // orders, 2), np.int64)  # switches found, and all
    for severity, streams in found.items():
        if not severity:
            continue
        alarms += sum(len(positions) for positions, _ in streams)
        samples += sum((len(SWITCHES) + 1) * length for _, length in streams)
        for number, switch in enumerate(switches, 1):
            firsts = [first_in(positions, number * length, length) for positions, length in streams]
            np.add.at(of_clients, np.arange(len(firsts)) // orders, [(one is not None, 1) for one in firsts])
            delays = [one for one in firsts if one is not None]
            median, most = np.quantile(delays, (0.5, 0.9)).round(1).tolist() if delays else (None, None)
            rows.append({"switch": switch, "severity": severity, "found": len(delays), "of": len(firsts)})
            rows[-1] |= {"median_delay": median, "delay_90": most}
    shares = of_clients[:, 0] / of_clients[:, 1]
    return {
        "false_alarms": sum(len(positions) for positions, _ in same),
        "samples": sum(length for _, length in same),
        "streams": len(same),
        "streams_with_false_alarms": sum(bool(positions) for positions, _ in same),
        "false_alarms_of_clients": [
            sum(len(positions) for positions, _ in same[start : start + orders])
            for start in range(0, len(same), orders)
        ],
        "found_of_clients": shares.round(3).tolist(),
        "other_alarms_per_1000": None
        if first_only
        else round(1000 * (alarms - int(of_clients[:, 0].sum())) / samples, 3),
        "switches": rows,
    }


def first_in(positions: Sequence[int], start: int, length: int) -> int | None:
    """Return the samples from `start` to the first alarm in a part, both included; None without one."""
    return next((position - start + 1 for position in positions if start <= position < start + length), None)


def read_drift(path: Path = RESULTS / FILE) -> dict[str, Any]:
    """Return what is kept; SettingsError if it cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise SettingsError(f"{path} cannot be read ({error})") from error


def drift_page(content: dict[str, Any]) -> str:
    """Return the kept tables as a Markdown page."""
    rows, stated = content["measured"], content["false_alarms"]
    length = rows[0]["samples"] // rows[0]["streams"]
    lines = ["# Drift", "", f"`fedtta bench drift`; {content['clients']} clients, {content['orders']} streams of each."]
    lines += [f"{content['hardware']}, commit {content['commit']}, {content['time']}.", "", "## Without a change", ""]
    lines += ["| values | test | alarms per 1,000 samples | stated | streams with an alarm | at most |"]
    lines += ["| --- | --- | --: | --: | --: | --: |"]
    for row in rows:
        alarms, share = 1000 * row["false_alarms"] / row["samples"], row["streams_with_false_alarms"] / row["streams"]
        bound = f"{100 * min(1, stated * length):.0f} %"
        if row["test"].startswith("MMD"):  # it stops at the first alarm
            lines.append(f"| {row['values']} | {row['test']} | | {1000 * stated:g} | {100 * share:.0f} % | |")
        else:
            rates = f"{alarms:.2f} | {1000 * stated:g} | {100 * share:.0f} % | {bound}"
            lines.append(f"| {row['values']} | {row['test']} | {rates} |")
    for switch in SWITCHES:
        lines += ["", f"## {switch}", ""]
        lines += [f"| values | test | {' | '.join(f'severity {one}' for one in SEVERITIES)} |"]
        lines += ["| --- | --- |" + " --: |" * len(SEVERITIES)]
        for row in rows:
            if cells := [_cell(one) for one in row["switches"] if one["switch"] == switch]:
                lines.append(f"| {row['values']} | {row['test']} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Clients",
        "",
        "| values | test | switches found by: worst | median | best | other alarms per 1,000 |",
    ]
    lines += ["| --- | --- | --: | --: | --: | --: |"]
    for row in rows:
        if row["other_alarms_per_1000"] is not None:
            shares = " | ".join(f"{100 * one:.0f} %" for one in np.quantile(row["found_of_clients"], (0, 0.5, 1)))
            lines.append(f"| {row['values']} | {row['test']} | {shares} | {row['other_alarms_per_1000']:.2f} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    """Return median and ninth decile of the delay, and the share of streams in which the switch was found."""
    share = f"{100 * row['found'] / row['of']:.0f} %"
    return f"{row['median_delay']:.0f}, {row['delay_90']:.0f} ({share})" if row["found"] else f"({share})"
