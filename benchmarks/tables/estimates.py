"""`estimates`: how far accuracy estimated without labels is from accuracy, and what choosing by it (`auto`) is worth.

The clients of `brfl-central`: one network, trained on the union of the clients' training splits, with a personal head
for each client. Every number is of one adapter on one test stream of one client. "own": calibrated on the client's
validation split; "others": by the mean thresholds and offsets of the other clients, for a client without labels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedtta.benchmarks.provenance import RESULTS, provenance, write_json
from fedtta.benchmarks.tables.engine import FOLDER, QUICK, seeds_of
from fedtta.benchmarks.tables.networks import kept_or_trained
from fedtta.benchmarks.tables.protocol_file import read_protocol
from fedtta.client.adapters import AdapterContext
from fedtta.client.algorithms.training import labelled
from fedtta.client.device import Device
from fedtta.client.evaluation import Labelled, calibrate_row, evaluate_row, predicted_by, signals_of
from fedtta.client.network import receive
from fedtta.client.node import make_device
from fedtta.client.sites import simulated_nodes
from fedtta.client.statistics import join_statistics
from fedtta.data import Stream, stream
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow, Summarize, TrainingTask
from fedtta.models import load_model
from fedtta.settings import Settings, SettingsError, to_json
from fedtta.tta.estimates import ESTIMATES, Calibration, Signals, calibrations, estimates, of_others
from fedtta.tta.statistics import Statistics

FILE = "estimates.json"
PROTOCOL, NETWORK, TRAINING = "brfl-central", "central", TrainingTask("cross_entropy")
#: The adapters that fit the network and finish in minutes on two cores.
ADAPTERS = ("none", "personal", "fixed_mix", "fedthe", "btfl", "t3a", "em", "bbse", "shot")
AUTO = "auto"
#: The parts of a stream that switches, one after the other.
SWITCHING, PARTS = "switching", ("original", "corrupted", "out_of_client", "original")
#: Test distributions with severities; only corruptions have several.
STREAMS = (
    ("original", 0), ("corrupted", 1), ("corrupted", 3), ("corrupted", 5), ("out_of_client", 0), ("mixture", 5),
    (SWITCHING, 5),
)  # fmt: skip
#: One adapter on one stream of one client: accuracy, and estimate → [accuracy, low, high] by either calibration.
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `estimates`."""
    parser.add_argument("--clients", type=int, default=10, metavar="N", help="test the first N clients (default: 10)")
    parser.add_argument("--seeds", type=seeds_of, default=[1], metavar="N", help="how many, or which: 3, 2,3 or 2-3")
    parser.add_argument("--quick", action="store_true", help=f"the protocol's small version, in {QUICK}")
    parser.add_argument("--out", type=Path, help=f"of {FILE} (default: benchmarks/results)")
    parser.add_argument("--folder", type=Path, help=f"of networks (default: {FOLDER})")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, keep the results and print the tables.

    Raises
    ------
    SettingsError
        Fewer than three clients, which leave no others, or data that cannot be read.
    """
    if arguments.clients < 3:
        raise SettingsError(f"--clients {arguments.clients}: allowed are at least 3")
    out = arguments.out or (QUICK if arguments.quick else RESULTS)
    folder = arguments.folder or (QUICK / "runs" if arguments.quick else FOLDER)
    measured: list[Row] = []
    for seed in arguments.seeds:
        measured += measure(seed, arguments.clients, arguments.quick, folder, console)
    about = {"clients": arguments.clients, "seeds": arguments.seeds, "quick": arguments.quick}
    content = {**provenance(), **about, **summary(measured)}
    write_json(out / FILE, content)
    console.print(estimates_page(content), highlight=False)


def measure(seed: int, clients: int, quick: bool, folder: Path, console: Console) -> list[Row]:
    """Return accuracy and estimates of every adapter, and auto's accuracy, for each stream of each client."""
    network = read_protocol(PROTOCOL, [], quick).networks[NETWORK]
    path = kept_or_trained(network, seed, folder, folder, console)
    settings = network.settings.replace(seed=seed, device="cpu")
    model, _ = load_model(path)
    arrays = {name: value.numpy(force=True).copy() for name, value in model.global_state().items()}
    devices, means = _prepared(settings, arrays)
    tested = [_tested(device, arrays, means) for device in devices[:clients]]
    rows = []
    for number, (one, results) in enumerate(tested):
        others = [known for other, (known, _) in enumerate(tested) if other != number]
        for (adapter, shift, severity), (accuracy, found) in results.items():
            own = {} if adapter == AUTO else _estimated(one[adapter], found)
            borrowed = {} if adapter == AUTO else _borrowed([known[adapter] for known in others], found)
            about = {"seed": seed, "client": number, "adapter": adapter, "shift": shift, "severity": severity}
            rows.append({**about, "accuracy": accuracy, "own": own, "others": borrowed})
    return rows


def _prepared(settings: Settings, arrays: Arrays) -> tuple[list[Device], Arrays]:
    """Return all clients' devices after the round of statistics, and the means of what they sent."""
    devices, sent = [], []
    for node in simulated_nodes(settings):
        request = Summarize(
            settings=to_json(settings), run=PROTOCOL, round=1, task=TRAINING, arrays=arrays,
            wanted=["label_prior", "confusion"],
        )  # fmt: skip
        devices.append(make_device(request, node))
        sent.append(devices[-1].summarize(request).statistics)
    return devices, {name: np.mean([one[name] for one in sent], 0) for name in sent[0]}


Known = dict[str, dict[str, Calibration]]
Results = dict[tuple[str, str, int], tuple[float, Signals]]


def _tested(device: Device, arrays: Arrays, means: Arrays) -> tuple[Known, Results]:
    """Return a client's calibrations by adapter, and accuracy and signals by adapter, shift and severity."""
    statistics, samples = _state(device, arrays, means)
    context, row = AdapterContext(device.model, device.settings, statistics), AdapterRow(AUTO, AUTO)
    known: Known = {}
    results: Results = {}
    auto = calibrate_row(row, context, samples)
    for name in ADAPTERS:
        predicted, right = predicted_by(AdapterRow(name, name), context, samples)
        known[name] = calibrations(signals_of(device.model, samples.x, predicted, True), right)
    for shift, severity in STREAMS:
        one = _stream(device, shift, severity)
        for name in ADAPTERS:
            predicted, right = predicted_by(AdapterRow(name, name), context, Labelled(one.x, one.y, True))
            results[name, shift, severity] = float(right.mean()), signals_of(device.model, one.x, predicted, True)
        done = evaluate_row(row, context, one, auto)
        results[AUTO, shift, severity] = done.correct / done.total, {}
    return known, results


def _state(device: Device, arrays: Arrays, means: Arrays) -> tuple[Statistics, Labelled]:
    """Load a client's network and personal head; return its statistics and its validation split."""
    private = device.state.load(TRAINING.training, 1)
    assert private is not None, "statistics have just been stored"
    receive(device.model, arrays, private, device.settings.seed)
    statistics = join_statistics(private, means, 1, device.device)
    split = device.federation.splits[device.partition]
    return statistics, Labelled(*labelled(device.federation, split.validation, device.device), True)


def _stream(device: Device, shift: str, severity: int) -> Stream:
    if shift == SWITCHING:
        parts = [_stream(device, one, severity) for one in PARTS]
        x, y = (torch.cat(rows) for rows in zip(*((one.x[:], one.y) for one in parts), strict=True))
        index, source = (np.concatenate([getattr(one, name) for one in parts]) for name in ("index", "source"))
        return Stream(SWITCHING, x, y, index, source)
    about: dict[str, Any] = {"seed": device.settings.seed, "severity": severity or 5}
    return stream(device.federation, device.partition, shift, device=device.device, natural=None, **about)


def _estimated(known: Mapping[str, Calibration], found: Signals) -> dict[str, list[float]]:
    return {name: [one.accuracy, one.low, one.high] for name, one in estimates(known, found).items()}


def _borrowed(others: Sequence[Mapping[str, Calibration]], found: Signals) -> dict[str, list[float]]:
    by_name = {name: of_others([one[name] for one in others], found[signal]) for name, (signal, _) in ESTIMATES.items()}
    return {name: [one.accuracy, one.low, one.high] for name, one in by_name.items()}


# What is kept


def stream_name(row: Row) -> str:
    """Return a stream's name, with the severity of its corruptions if it consists of them."""
    return f"{row['shift']} {row['severity']}" if row["severity"] else str(row["shift"])


def summary(measured: Sequence[Row]) -> dict[str, Any]:
    """Return mean errors of the estimates in points, and auto beside every adapter in percent."""
    fixed = [row for row in measured if row["adapter"] != AUTO]
    return {"errors": list(_errors(fixed)), "adapters": _accuracies(measured), "auto": _compared(measured)}


def _errors(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield for each calibration, adapter and stream the mean distance of each estimate from the accuracy."""
    for by in ("own", "others"):
        for adapter in dict.fromkeys(row["adapter"] for row in rows):
            for name in dict.fromkeys(map(stream_name, rows)):
                chosen = [row for row in rows if row["adapter"] == adapter and stream_name(row) == name]
                distances = {
                    one: _points(abs(row[by][one][0] - row["accuracy"]) for row in chosen) for one in ESTIMATES
                }
                inside = {
                    one: round(fmean(row[by][one][1] <= row["accuracy"] <= row[by][one][2] for row in chosen), 3)
                    for one in ESTIMATES
                }
                yield {"by": by, "adapter": adapter, "stream": name, "error": distances, "inside": inside}


def _accuracies(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return adapter → accuracy over all clients and streams, of the worst client and stream, and of each stream."""
    found = {}
    for adapter in dict.fromkeys(row["adapter"] for row in rows):
        own = [row for row in rows if row["adapter"] == adapter]
        streams = {
            name: _points(r["accuracy"] for r in own if stream_name(r) == name) for name in map(stream_name, own)
        }
        clients = {(row["seed"], row["client"]) for row in own}
        means = [fmean(r["accuracy"] for r in own if (r["seed"], r["client"]) == one) for one in clients]
        average = _points(row["accuracy"] for row in own)
        about = {"average": average, "worst client": _points([min(means)]), "worst stream": min(streams.values())}
        found[adapter] = {**about, **streams}
    return found


def _compared(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return for each stream how far auto is above none, at the worst client too, and below the best fixed adapter."""
    accuracies, found = _accuracies(rows), {}
    for name in dict.fromkeys(map(stream_name, rows)):
        by_client: dict[str, list[float]] = {}
        for row in rows:
            if stream_name(row) == name:
                by_client.setdefault(row["adapter"], []).append(row["accuracy"])
        gains = [one - other for one, other in zip(by_client[AUTO], by_client["none"], strict=True)]
        best = max((one for one in accuracies if one != AUTO), key=lambda one: accuracies[one][name])
        found[name] = {
            "over none": _points(gains),
            "worst client over none": _points([min(gains)]),
            "clients more than 1 below none": sum(gain < -0.01 - 1e-9 for gain in gains),
            "clients": len(gains),
            "best fixed": best,
            "below the best": round(accuracies[best][name] - accuracies[AUTO][name], 2),
        }
    return found


def _points(values: Iterable[float]) -> float:
    """Return the mean of shares in percent."""
    return round(100 * fmean(values), 2)


# The page


def read_estimates(path: Path = RESULTS / FILE) -> dict[str, Any]:
    """Return what is kept; nothing without a file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def estimates_page(content: Mapping[str, Any]) -> str:
    """Return what is kept as a Markdown page."""
    lines = ["# Estimates", "", "`fedtta bench estimates`"]
    if content:
        about = f"{content['clients']} clients, seed {', '.join(map(str, content['seeds']))}"
        lines[-1] += f"; {about}. {content['hardware']}, commit {content['commit']}, {content['time']}."
        for by, title in (
            ("own", "Calibrated on the client's own validation split"),
            ("others", "Mean thresholds and offsets of the other clients"),
        ):
            chosen = [row for row in content["errors"] if row["by"] == by]
            lines += ["", f"## {title}", "", "Mean distance from the accuracy, in points.", ""]
            lines += [*_grid("stream", chosen), "", *_grid("adapter", chosen)]
            inside = {name: f"{100 * fmean(row['inside'][name] for row in chosen):.0f}" for name in ESTIMATES}
            words = ", ".join(f"{name} {share} %" for name, share in inside.items())
            lines += ["", f"Of the 95 % intervals, these hold the accuracy: {words}."]
        lines += ["", "## auto", "", "Accuracy in %; the worst client's is its mean over the streams.", ""]
        lines += _table("adapter", content["adapters"])
        lines += ["", "auto beside none and the best fixed adapter of each stream, in points.", ""]
        lines += _table("stream", content["auto"])
    return "\n".join(lines) + "\n"


def _grid(by: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of mean errors: a row for each stream or adapter, a column for each estimate."""
    found = {
        name: {one: round(fmean(row["error"][one] for row in rows if row[by] == name), 1) for one in ESTIMATES}
        for name in dict.fromkeys(row[by] for row in rows)
    }
    return _table(by, {**found, "mean": {one: round(fmean(row["error"][one] for row in rows), 1) for one in ESTIMATES}})


def _table(head: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = list(next(iter(rows.values())))
    lines = [f"| {head} | {' | '.join(columns)} |", "| --- |" + " --: |" * len(columns)]
    return [*lines, *(f"| {name} | {' | '.join(str(row[one]) for one in columns)} |" for name, row in rows.items())]
